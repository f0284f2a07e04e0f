"""Keys and values that are computed anew: a term of generation's cost, and nothing where a job keeps them."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.cost_models.generation_cost import RECOMPUTATION
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.cost_queries import query_for_placement
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.verify import verify
from meshwright.planner.search.re_evaluate import re_evaluate
from meshwright.planner.simulation.sampled_durations import Sampled
from meshwright.profiles.documents import canonical_json
from meshwright.profiles.stages import GENERATE
from tests.planner.drawn import carrying_over, model_of


def recomputing(plan: Plan) -> Plan:
    """The same plan of a job that recomputes, costed for it."""
    facts = plan.facts.model_copy(update={"cache_after_refit": "recompute"})
    return re_evaluate(plan, facts, model_of(facts))


def seconds(plan: Plan) -> float:
    return sum(t.amount for t in plan.placement(GENERATE).cost.terms if t.name == RECOMPUTATION)


@pytest.mark.parametrize("overcommits", [False, True])
def test_a_turn_that_finds_sequences_in_flight_is_costed_with_their_prefill(overcommits: bool) -> None:
    for plan in carrying_over(overcommits):
        kept, anew = re_evaluate(plan, plan.facts, model_of(plan.facts)), recomputing(plan)
        assert seconds(kept) == 0 < seconds(anew)
        costs = [one.placement(GENERATE).cost.total for one in (kept, anew)]
        assert costs[1] == pytest.approx(costs[0] + seconds(anew))
        turns = [Sampled(one, model_of, seed=0).of_step(5).seconds[GENERATE] for one in (kept, anew)]
        for before, after in zip(*turns, strict=True):
            assert after == pytest.approx(before + seconds(anew), rel=1e-3)


def test_generation_that_ends_with_its_turn_recomputes_nothing() -> None:
    plan = carrying_over(overcommits=True)[0]
    call = query_for_placement(recomputing(plan), plan.placement(GENERATE))
    alone = dataclasses.replace(call, schedule=dataclasses.replace(call.schedule, overcommit=0, batches_in_flight=1))
    model = model_of(plan.facts)
    assert model.seconds(alone) == model.seconds(dataclasses.replace(alone, recomputes_cache=False))


def test_a_plan_says_whether_its_job_keeps_the_cache() -> None:
    plan = carrying_over(overcommits=True)[0]
    assert '"cache_after_refit": "keep"' in canonical_json(plan)
    for facts in (plan.facts, plan.facts.model_copy(update={"cache_after_refit": "recompute"})):
        assert Facts.model_validate_json(canonical_json(facts)) == facts
    assert '"cache_after_refit": "recompute"' in canonical_json(recomputing(plan))
    assert verify(plan) == ()
