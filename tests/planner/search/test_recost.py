"""The same placements under other facts: legal or not, and at the price that they have there."""

from __future__ import annotations

import pytest

from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.verify import verify
from meshwright.planner.search.re_evaluate import re_evaluate, violations_under
from meshwright.profiles.lengths import LengthSpec
from tests.planner.drawn import model_of
from tests.planner.jobs import small_facts
from tests.planner.plans import random_plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    facts = small_facts(memory_bytes=2**50)
    return random_plan(4, facts, model_of(facts))


def test_costing_again_by_the_same_model_gives_the_plan_back(plan: Plan) -> None:
    again = re_evaluate(plan, plan.facts, model_of(plan.facts))
    assert again.placements == plan.placements
    assert again.refits == plan.refits
    assert again.edges == plan.edges
    assert again.period_seconds == plan.period_seconds
    assert verify(again) == ()


def test_nothing_was_searched_so_that_no_bound_is_known(plan: Plan) -> None:
    solver = re_evaluate(plan, plan.facts, model_of(plan.facts)).solver
    assert (solver.status, solver.bound_seconds, solver.gap) == ("pinned", 0.0, 1.0)
    assert solver.objective_seconds == pytest.approx(plan.period_seconds)


def test_longer_responses_cost_more_on_the_same_placements(plan: Plan) -> None:
    longer = plan.facts.workload.model_copy(update={"response": LengthSpec(max=256, fixed=256)})
    facts = plan.facts.model_copy(update={"workload": longer})
    assert violations_under(plan, facts) == ()
    again = re_evaluate(plan, facts, model_of(facts))
    assert again.facts == facts
    assert again.digests == facts.digests()
    assert again.period_seconds > plan.period_seconds
    for before, after in zip(plan.placements, again.placements, strict=True):
        assert (before.pool, before.layout, before.schedule) == (after.pool, after.layout, after.schedule)


def test_each_rule_that_other_facts_break_is_told_with_its_pool_or_stage(plan: Plan) -> None:
    assert violations_under(plan, plan.facts) == ()
    smaller = plan.facts.cluster.model_copy(update={"ranks_per_node": 1})
    facts = plan.facts.model_copy(update={"cluster": smaller})
    told = violations_under(plan, facts)
    assert any(sentence.startswith("pool ") for sentence in told)
    odd = plan.facts.workload.model_copy(update={"batch_size": 7})
    told = violations_under(plan, plan.facts.model_copy(update={"workload": odd}))
    assert told
    assert all(sentence.partition(":")[0] in plan.ahead for sentence in told)
