"""The next best structures are the next best: tried against every structure of a small job."""

from __future__ import annotations

import itertools

import pytest

from meshwright.planner.analysis.plan_structures import best_structures, whole_space_search
from meshwright.planner.compile import best_plan
from meshwright.planner.plan.pins import Pin
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.verify import verify
from meshwright.planner.solver.result import Limits
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.layout import Layout
from tests.planner.jobs import RandomModel, small_facts

FREE = ("actor_generate", "actor_train")
FACTS = small_facts(ranks_per_node=2, batch_size=4)
LAYOUTS = (Layout(), Layout(tp=2), Layout(tp=2, sp=True), Layout(pp=2), Layout(dp=2))
FIXED = tuple(Pin(stage.name, "layout", Layout()) for stage in PPO_GRAPH.stages if stage.name not in FREE)


def structure(plan: Plan) -> tuple[Layout, ...]:
    return tuple(plan.placement(name).layout for name in FREE)


def best(*pins: Pin) -> Plan | None:
    found = best_plan(FACTS, RandomModel(4, 2**20), pins=(*FIXED, *pins), limits=Limits(gap=0.0))
    return found if isinstance(found, Plan) else None


@pytest.fixture(scope="module")
def found() -> tuple[Plan, ...]:
    first = best()
    assert first is not None
    search = whole_space_search(first, RandomModel(4, 2**20), Limits(gap=0.0))
    return best_structures(first, FIXED, search, count=3)


@pytest.mark.check_all
def test_no_structure_that_is_left_out_is_faster(found: tuple[Plan, ...]) -> None:
    every = [
        plan.period_seconds
        for layouts in itertools.product(LAYOUTS, repeat=len(FREE))
        if (plan := best(*(Pin(name, "layout", layout) for name, layout in zip(FREE, layouts, strict=True))))
    ]
    assert [plan.period_seconds for plan in found] == pytest.approx(sorted(every)[: len(found)], rel=1e-4)


def test_the_structures_are_different_and_valid(found: tuple[Plan, ...]) -> None:
    assert len({structure(plan) for plan in found}) == len(found) == 3
    assert all(verify(plan) == () and plan.pins == found[0].pins for plan in found)
