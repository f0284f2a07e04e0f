"""Each cost that a plan states otherwise than its model has it is told, with both."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.cost_models.cost import Cost, Source, Term
from meshwright.planner.analysis.recorded_costs import mismatched_costs
from meshwright.planner.plan.plan import Plan
from tests.planner.jobs import ToyModel, small_facts
from tests.planner.plans import random_plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    facts = small_facts(memory_bytes=2**50)
    return next(p for p in (random_plan(seed, facts, ToyModel(facts)) for seed in range(20)) if p.refits)


def told(plan: Plan, **update: Any) -> tuple[str, ...]:
    """What is said of the plan with its first placement changed."""
    first, *others = plan.placements
    changed = plan.model_copy(update={"placements": (first.model_copy(update=update), *others)})
    return mismatched_costs(changed, ToyModel(plan.facts))


def test_a_plan_states_what_its_model_says(plan: Plan) -> None:
    assert mismatched_costs(plan, ToyModel(plan.facts)) == ()


def test_an_amount_is_told_with_its_term_and_what_it_is(plan: Plan) -> None:
    first, *others = plan.placements[0].cost.terms
    changed = Cost((Term(first.name, 2 * first.amount, first.source), *others))
    assert told(plan, cost=changed) == (
        f"actor_generate: its cost: the term 'compute' is recorded as {2 * first.amount:.12g} s, and the cost model "
        f"computes {first.amount:.12g} s; plan the job again.",
    )


def test_a_difference_of_rounding_is_none(plan: Plan) -> None:
    assert told(plan, cost=plan.placements[0].cost.scaled(1 + 1e-10)) == ()


def test_a_source_and_a_name_are_stated_too(plan: Plan) -> None:
    terms = plan.placements[0].cost.terms
    measured = Cost(tuple(Term(term.name, term.amount, Source.MEASURED) for term in terms))
    assert "recorded as measured, and is analytic in the cost model" in told(plan, cost=measured)[0]
    assert (
        "its cost is recorded as compute, and the cost model computes compute, losses"
        in told(plan, cost=Cost(terms[:1]))[0]
    )


def test_tails_bytes_and_what_messages_cost_are_stated_too(plan: Plan) -> None:
    assert told(plan, tail_seconds=1.0)[0].startswith("actor_generate: its tail is recorded as 1 s")
    for what in ("resident", "transient", "host"):
        assert told(plan, **{what: Cost((Term("more", 1.0),))})[0].startswith(f"actor_generate: its {what} memory")
    model = ToyModel(plan.facts)
    edge, refit = plan.edges[0], plan.refits[0]
    heavier = plan.model_copy(update={"edges": (edge.model_copy(update={"bytes": 1.0}), *plan.edges[1:])})
    assert mismatched_costs(heavier, model)[0].startswith(
        "the edge actor_generate -> reward_score: what it moves is recorded"
    )
    dearer = plan.model_copy(update={"refits": (refit.model_copy(update={"cost": Cost()}), *plan.refits[1:])})
    assert mismatched_costs(dearer, model)[0].startswith(
        f"the refit of {refit.target}: its cost is recorded as nothing"
    )
