"""A plan that was made before is where a search starts, if the new job allows it."""

from __future__ import annotations

import pytest

from meshwright.planner.compile import best_plan
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.pins import parse_pin
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.verify import verify
from meshwright.planner.search.re_evaluate import re_evaluated_or_violation
from meshwright.planner.solver.result import Limits
from meshwright.profiles.algorithms import PPO_GRAPH
from tests.planner.jobs import ToyModel, small_facts

FACTS = small_facts(ranks_per_node=2, batch_size=4)
EXACT = Limits(gap=0.0)


@pytest.fixture(scope="module")
def plan() -> Plan:
    found = best_plan(FACTS, ToyModel(FACTS))
    assert isinstance(found, Plan)
    return found


def started(plan: Plan, facts: Facts, *pins: str) -> Plan | str:
    return re_evaluated_or_violation(plan, facts, ToyModel(facts), tuple(parse_pin(pin, facts.graph) for pin in pins))


def test_under_its_own_facts_a_plan_is_what_it_was(plan: Plan) -> None:
    found = started(plan, FACTS)
    assert isinstance(found, Plan)
    assert found.placements == plan.placements
    assert found.period_seconds == plan.period_seconds


def test_a_plan_is_costed_under_the_new_facts(plan: Plan) -> None:
    longer = small_facts(ranks_per_node=2, batch_size=4, response=256)
    found = started(plan, longer)
    assert isinstance(found, Plan)
    assert verify(found) == ()
    assert found.facts == longer
    assert found.period_seconds > plan.period_seconds


@pytest.mark.parametrize(
    ("facts", "pin", "said"),
    [
        (small_facts(ranks_per_node=1, batch_size=4), "", "pool"),
        (small_facts(ranks_per_node=2, batch_size=4, memory_bytes=2**18), "", "its device can use"),
        (FACTS, "actor_train.recompute=full", "pin 'actor_train.recompute=full' is not kept."),
        (FACTS, "actor_train.pool=1:1", "pin 'actor_train.pool=1:1' is not kept."),
    ],
)
def test_what_the_new_job_does_not_allow_is_told(plan: Plan, facts: Facts, pin: str, said: str) -> None:
    found = started(plan, facts, *filter(None, [pin]))
    assert isinstance(found, str)
    assert said in found


def test_a_search_that_starts_from_the_best_plan_returns_it_with_its_proof(plan: Plan) -> None:
    best = best_plan(FACTS, ToyModel(FACTS), limits=EXACT)
    assert isinstance(best, Plan)
    start = started(best, FACTS)
    assert isinstance(start, Plan)
    again = best_plan(FACTS, ToyModel(FACTS), limits=EXACT, start=start)
    assert isinstance(again, Plan)
    assert again.placements == best.placements
    assert again.solver.status == best.solver.status == "optimal"
    assert again.solver.gap <= 1e-4


@pytest.mark.parametrize("gap", [0.0, 0.05])
def test_a_search_is_as_near_to_the_best_wherever_it_starts(gap: float) -> None:
    slow = best_plan(FACTS, ToyModel(FACTS), pins=(parse_pin("actor_train.recompute=full", PPO_GRAPH),))
    assert isinstance(slow, Plan)
    start = started(slow, FACTS)
    assert isinstance(start, Plan)
    best = best_plan(FACTS, ToyModel(FACTS), limits=EXACT)
    found = best_plan(FACTS, ToyModel(FACTS), limits=Limits(gap=gap), start=start)
    assert isinstance(best, Plan)
    assert isinstance(found, Plan)
    assert found.period_seconds <= best.period_seconds / (1 - gap) * (1 + 1e-5)
    assert found.solver.bound_seconds <= best.period_seconds * (1 + 1e-9)
