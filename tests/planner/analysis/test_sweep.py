"""A sweep: its front has exactly the plans that no other one beats, and its costs and ranges are those of its plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.planner.analysis.predicted_ranges import predicted_ranges
from meshwright.planner.analysis.sensitivity import main_influences, step_interval
from meshwright.planner.analysis.sweep import SharedCostModels, SweepPoint, SweptPlan, sweep_of, sweep_point
from meshwright.planner.compile import compile_plan
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.plan.plan import Plan
from meshwright.planner.search.no_plan import Limit, NoPlan
from meshwright.profiles.uncertainty import Interval
from tests.planner.jobs import small_facts
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


def of_size(nodes: int, staleness: int) -> Facts:
    facts = small_facts(nodes=nodes, ranks_per_node=2, memory_bytes=2**34)
    return facts.model_copy(update={"staleness": staleness})


@pytest.mark.check_all
def test_plans_with_a_shared_cost_model_are_those_with_a_new_one() -> None:
    model_of = SharedCostModels(cost_model_of)
    cases = [of_size(4, 0), of_size(2, 1), of_size(3, 0), of_size(1, 0)]
    for facts in cases:
        shared, new = compile_plan(facts, model_of(facts)), compile_plan(facts, cost_model_of(facts))
        assert isinstance(shared, Plan)
        assert shared == new


def test_a_cost_model_is_shared_only_where_costs_are_the_same() -> None:
    model_of = SharedCostModels(cost_model_of)
    many = model_of(of_size(2, 0))
    assert model_of(of_size(64, 3)) is many
    assert model_of(of_size(1, 0)) is not many, "one node sends nothing between nodes"
    one = model_of(of_size(1, 1))
    assert model_of(of_size(1, 0)) is one
    assert model_of(of_size(1, 0).model_copy(update={"engine": "meshwright-graph"})) is not one


def test_a_shared_cost_model_does_not_grow_without_end() -> None:
    model_of = SharedCostModels(cost_model_of)
    assert len({id(model) for model in [model_of(of_size(nodes, 0)) for nodes in range(2, 42)]}) == 3
