"""What the search must never predict: that more memory, more ranks or fewer pins make a step slower."""

from __future__ import annotations

import itertools

import pytest

from meshwright.planner.compile import compile_plan
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.plan import Plan
from meshwright.planner.solver.result import Limits
from tests.planner.jobs import ToyModel, small_facts

MIB = 2**20
ROUNDING = 1 + 1e-4
"""Both plans are optimal to within their gap."""


def period(facts: Facts, *pins: str) -> float:
    plan = compile_plan(facts, ToyModel(facts), pins=pins, limits=Limits(gap=0.0))
    assert isinstance(plan, Plan)
    assert plan.solver.status == "optimal"
    return plan.period_seconds


def test_more_memory_is_never_slower() -> None:
    periods = [period(small_facts(ranks_per_node=2, memory_bytes=size * MIB)) for size in (8, 10, 14, 64)]
    assert all(more <= less * ROUNDING for less, more in itertools.pairwise(periods))
    assert periods[-1] < periods[0]


def test_more_ranks_are_never_slower() -> None:
    periods = [period(small_facts(ranks_per_node=ranks)) for ranks in (1, 2, 4)]
    assert all(more <= less * ROUNDING for less, more in itertools.pairwise(periods))


@pytest.mark.parametrize(
    "pin",
    ["actor_generate.pool=0:1", "critic_train.recompute=full", "actor_train.layout=tp2", "actor_generate.layout!=dp2"],
)
def test_a_pin_is_never_faster(pin: str) -> None:
    facts = small_facts(ranks_per_node=2)
    assert period(facts) <= period(facts, pin) * ROUNDING
