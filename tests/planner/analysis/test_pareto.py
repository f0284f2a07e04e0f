"""The fronts of step time against GPUs and against money hold what no other size beats in both."""

from __future__ import annotations

import pytest

from meshwright.planner.analysis.cluster_sizing import SizePoint, pareto
from meshwright.planner.compile import compile_plan
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.errors import BadInput
from tests.planner.jobs import ToyModel, small_facts


@pytest.fixture(scope="module")
def plan() -> Plan:
    facts = small_facts(ranks_per_node=2)
    found = compile_plan(facts, ToyModel(facts))
    assert isinstance(found, Plan)
    return found


@pytest.fixture(scope="module")
def points(plan: Plan) -> tuple[SizePoint, ...]:
    return pareto(plan, (4, 1, 2), ToyModel, price=3.0)


def test_there_is_a_point_for_each_size_in_order(plan: Plan, points: tuple[SizePoint, ...]) -> None:
    assert [point.num_ranks for point in points] == [1, 2, 4]
    here = next(point for point in points if point.num_ranks == plan.facts.cluster.num_ranks)
    assert here.metrics is not None
    assert here.metrics.step_seconds == pytest.approx(plan.period_seconds)


def test_a_point_is_on_a_front_when_none_is_better_in_both(points: tuple[SizePoint, ...]) -> None:
    for point in points:
        assert point.metrics is not None
        others = [other.metrics for other in points if other is not point and other.metrics]
        cheaper = [o for o in others if o.gpu_hours <= point.metrics.gpu_hours]
        assert point.is_on_front_of_money == all(o.step_seconds > point.metrics.step_seconds for o in cheaper)
        assert point.is_on_front_of_gpus
        assert point.metrics.money == pytest.approx(3.0 * point.metrics.gpu_hours)


def test_a_size_that_is_no_number_of_nodes_is_refused(plan: Plan) -> None:
    with pytest.raises(BadInput, match="--sizes 3 is not a number of whole nodes of 2 ranks; use 2 or 4"):
        pareto(plan, (3,), ToyModel)
