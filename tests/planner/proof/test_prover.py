"""More splits prove more, the same splits prove the same, and enough is proven of a small job."""

from __future__ import annotations

import pytest

from meshwright.planner.compile import compile_plan
from meshwright.planner.plan.plan import Plan
from meshwright.planner.proof.prover import TARGET_GAP, prove
from tests.planner.jobs import ToyModel, small_facts


@pytest.fixture(scope="module")
def plan() -> Plan:
    facts = small_facts(ranks_per_node=2, batch_size=4)
    found = compile_plan(facts, ToyModel(facts))
    assert isinstance(found, Plan)
    return found


def test_more_splits_never_prove_less(plan: Plan) -> None:
    model = ToyModel(plan.facts)
    proven = [prove(plan, model, max_splits=number).bound_seconds for number in (0, 4, 16, 64)]
    assert proven == sorted(proven)
    assert proven[-1] > 0.9 * plan.solver.bound_seconds


def test_nothing_is_split_where_enough_is_proven(plan: Plan) -> None:
    found = prove(plan, ToyModel(plan.facts), max_splits=10_000)
    if found.bound_seconds >= plan.period_seconds * (1 - TARGET_GAP):
        assert sum(len(tree.nodes) for tree in found.trees) < 10_000


def test_a_plan_has_one_proof(plan: Plan) -> None:
    first, second = (prove(plan, ToyModel(plan.facts), max_splits=20) for _ in range(2))
    assert first == second
