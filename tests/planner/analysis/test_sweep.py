"""A sweep: its front has exactly the plans that no other one beats, and its costs and ranges are those of its plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.planner.analysis.predicted_ranges import predicted_ranges
from meshwright.planner.analysis.sensitivity import main_influences, step_interval
from meshwright.planner.analysis.sweep import SweepPoint, SweptPlan, sweep_of, sweep_point
from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.search.no_plan import Limit, NoPlan
from meshwright.profiles.uncertainty import Interval
from tests.planner.plans import random_plan

INTERVAL = Interval(1.0, 4.0)


def point(name: int, *, price: float | None = None) -> SweepPoint:
    return sweep_point({"staleness": name}, random_plan(name), INTERVAL, price=price, num_steps=10)


def swept(seconds: float, num_ranks: int) -> SweepPoint:
    """A point with this step on this many ranks, whose cost follows from both."""
    known = point(0).plan
    assert known is not None
    cost = replace(known.cost, gpu_hours=seconds * num_ranks)
    plan = replace(known, step_seconds=seconds, num_ranks=num_ranks, cost=cost)
    return SweepPoint(setting={"cluster.nodes": num_ranks}, plan=plan)


def plan_of(found: SweepPoint) -> SweptPlan:
    assert found.plan is not None
    return found.plan


def test_the_front_has_the_plans_that_no_other_one_beats_in_all_three() -> None:
    # seconds x ranks: 80, 96 (faster), 96 (as fast as the second on more ranks), 90 (slower than the first, dearer)
    points = [swept(10, 8), swept(6, 16), swept(6, 24), swept(11, 8)]
    found = sweep_of(points, price=None, num_steps=10)
    assert [plan_of(one).is_on_front for one in found.points] == [True, True, False, False]
    assert [plan_of(one).cost.gpu_hours for one in found.by_cost] == [80, 88, 96, 144]


def test_equal_plans_are_on_the_front_together() -> None:
    found = sweep_of([swept(10, 8), swept(10, 8)], price=None, num_steps=10)
    assert all(plan_of(one).is_on_front for one in found.points)


def test_a_point_has_the_numbers_of_its_plan_and_their_ranges() -> None:
    plan = random_plan(3)
    found = plan_of(point(3, price=2.0))
    assert found.step_seconds == plan.period_seconds
    assert found.ranges.step_seconds == INTERVAL
    money = found.cost.gpu_hours * 2.0
    assert found.ranges.money == pytest.approx((money / plan.period_seconds, 4 * money / plan.period_seconds))
    assert found.ranges.tokens_per_second.p90 / found.ranges.tokens_per_second.p10 == pytest.approx(4.0)


def test_what_has_no_plan_comes_last_and_says_why() -> None:
    none = NoPlan(status="infeasible", limits=(Limit(stage=None, sentence="it lacks 3 GiB."),), changes=(), rejected={})
    without = sweep_point({"cluster.nodes": 1}, none, None, price=None, num_steps=10)
    found = sweep_of([without, swept(10, 8)], price=None, num_steps=10)
    assert found.by_cost[-1] == without
    assert without.violations == ("it lacks 3 GiB.",)


def test_the_interval_of_a_step_is_the_one_that_its_influences_report() -> None:
    plan = random_plan(1)
    influences = main_influences(plan, cost_model_of)
    of_step = step_interval(plan, cost_model_of)
    assert of_step == (influences.p10_seconds, influences.p90_seconds)
    assert of_step.p10 < plan.period_seconds < of_step.p90
    wider = step_interval(plan, cost_model_of, spread=0.5)
    assert wider.p90 > of_step.p90
    ranges = predicted_ranges(plan, of_step, plan_of(point(1)).cost)
    assert ranges.money is None
