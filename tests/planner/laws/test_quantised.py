"""Jobs that generate with 8-bit floats are planned, proven, verified, simulated and explained, with a copy that no
other stage shares."""

from __future__ import annotations

import json
from functools import cache

import pytest

from benchmarks.search.brute_force import best_makespan
from meshwright.cost_models.cost import WEIGHTS
from meshwright.planner.analysis.explain import explain
from meshwright.planner.compile import compile_plan
from meshwright.planner.job.job import Facts
from meshwright.planner.job.whatif_settings import with_setting
from meshwright.planner.plan.cost_queries import stage_transfers
from meshwright.planner.plan.evaluate import evaluate
from meshwright.planner.plan.pins import parse_pins
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.steps_ahead import search_cases, steps_ahead_patterns
from meshwright.planner.plan.verify import verify
from meshwright.planner.search.formulate import formulate
from meshwright.planner.search.frontiers import frontiers
from meshwright.planner.search.re_evaluate import violations_under
from meshwright.planner.simulation.simulate import simulate
from meshwright.planner.solver.result import Limits
from meshwright.planner.solver.solve import solve
from meshwright.profiles.documents import canonical_json, parse
from meshwright.profiles.errors import BadInput
from meshwright.profiles.stages import GENERATE
from tests.planner.drawn import model_of
from tests.planner.jobs import RandomModel, critic_free_facts, quantised_facts, small_facts
from tests.planner.plans import random_plan
from tests.planner.problems import everywhere
from tests.planner.proofs import require_proof
from tests.seeds import seeds


def exact(facts: Facts) -> Facts:
    """The same job with weights in its precision."""
    return facts.model_copy(update={"generation_weights": None})


@cache
def planned() -> Plan:
    facts = quantised_facts()
    plan = compile_plan(facts, model_of(facts))
    assert isinstance(plan, Plan), plan
    return plan


def test_a_plan_verifies_is_read_back_and_takes_its_time() -> None:
    plan = planned()
    assert verify(plan) == ()
    assert evaluate(plan) == plan
    assert parse(Plan, canonical_json(plan), "plan") == plan
    assert simulate(plan, steps=3).steps.mean == pytest.approx(plan.period_seconds, rel=0.05)


def test_a_plan_says_nothing_of_the_format_where_a_job_does_not() -> None:
    facts = small_facts()
    assert "generation_weights" not in json.loads(canonical_json(facts))
    assert "generation_weights" in json.loads(canonical_json(quantised_facts(facts)))


@seeds(4, all=20)
def test_the_generator_shares_no_copy_and_is_refit(seed: int) -> None:
    plan = random_plan(seed, quantised_facts(small_facts(memory_bytes=2**50)))
    assert verify(plan) == ()
    assert [p.stage for p in plan.placements if plan.copy_of(p.stage) == GENERATE] == [GENERATE]
    assert GENERATE in {refit.target for refit in plan.refits}


def test_a_plan_whose_generator_takes_the_trained_copy_is_not_valid() -> None:
    plan = planned()
    without = plan.model_copy(update={"refits": tuple(r for r in plan.refits if r.target != GENERATE)})
    assert any("actor_generate has its own copy" in sentence for sentence in verify(without))


def test_a_job_with_whole_weights_asks_for_another_plan() -> None:
    plan = planned()
    (sentence,) = violations_under(plan, exact(plan.facts))
    assert sentence.endswith("plan the job again.")


def test_what_if_asks_for_the_format_of_a_plan_that_says_nothing_of_it() -> None:
    facts = quantised_facts()
    assert with_setting(exact(facts), {"generation_weights": "fp8"}) == facts
    assert with_setting(facts, {"generation_weights": None}) == exact(facts)
    with pytest.raises(BadInput, match="does not multiply 8-bit floats"):
        with_setting(facts, {"cluster.device": "a100-80gb"})


@seeds(2, all=5)
def test_the_search_equals_trying_everything_where_memory_is_short(seed: int) -> None:
    few = quantised_facts(critic_free_facts(facts=small_facts(ranks_per_node=2, batch_size=4), group_size=2))
    model = RandomModel(seed, 2**28.6)
    pinned = (
        *(f"reward_score.{key}" for key in ("pool=0:2", "layout=dp2", "micro_batch_size=1")),
        *(f"{s}.micro_batch_size=1" for s in ("ref_logprob", "actor_logprob")),
        *(f"actor_train.{key}" for key in ("pool=0:2", "micro_batch_size=1", "recompute=none")),
    )
    graph = few.graph
    scope = next(scope for ahead in steps_ahead_patterns(graph, 0) for scope in search_cases(ahead, 0))
    found = frontiers(few, model, parse_pins(pinned, graph), search_case=scope)
    problem = everywhere(formulate(few, model, found, stage_transfers(few, model)).problem)
    assert ("actor_train", "actor_logprob") in problem.sharing_groups
    assert solve(problem, Limits()).objective == best_makespan(problem)


@pytest.mark.parametrize("memory_bytes", [2**30, 9 * 2**20])
def test_a_proof_holds_of_a_copy_that_is_refit_where_it_is_trained(memory_bytes: int) -> None:
    facts = small_facts(ranks_per_node=2, batch_size=4, memory_bytes=memory_bytes)
    facts = quantised_facts(critic_free_facts(facts=facts, group_size=2))
    require_proof(facts)


def test_the_generators_weights_take_half_and_a_scale_for_each_output() -> None:
    plan = planned()
    facts, generation = plan.facts, plan.placement(GENERATE)
    whole = random_plan(1, exact(facts), model_of(exact(facts)))
    assert generation.resident.amount("weight scales") > 0
    assert not any(p.resident.amount("weight scales") for p in whole.placements)
    assert generation.resident.amount(WEIGHTS) < 2 * facts.models.actor.num_params / generation.layout.tp


def test_an_explanation_says_what_is_in_8_bits_and_how_it_is_multiplied() -> None:
    told = " ".join(explain(planned()).sentences)
    assert "actor_generate has its linear layers in 8-bit floats" in told
    assert "multiplied as 8-bit floats" in told
