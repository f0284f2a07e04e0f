"""Jobs with an adapter are planned, proven, verified, simulated and explained, with one copy of the weights where it
serves."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from benchmarks.search.brute_force import best_makespan
from meshwright.cost_models.cost import WEIGHTS
from meshwright.planner.analysis.explain import explain
from meshwright.planner.compile import compile_plan
from meshwright.planner.plan.cost_queries import stage_transfers
from meshwright.planner.plan.evaluate import evaluate, resident_bytes
from meshwright.planner.plan.pins import parse_pins
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.steps_ahead import search_cases, steps_ahead_patterns
from meshwright.planner.plan.verify import verify
from meshwright.planner.search.formulate import formulate
from meshwright.planner.search.frontiers import frontiers
from meshwright.planner.simulation.simulate import simulate
from meshwright.planner.solver.result import Limits
from meshwright.planner.solver.solve import solve
from meshwright.profiles.documents import canonical_json, parse
from meshwright.profiles.schedule import Offload
from tests.planner.drawn import model_of
from tests.planner.jobs import RandomModel, adapted_facts, critic_free_facts, small_facts
from tests.planner.plans import random_plan
from tests.planner.problems import everywhere
from tests.planner.proofs import require_proof
from tests.seeds import seeds


@cache
def planned(memory_bytes: int = 2**30) -> Plan:
    facts = adapted_facts(critic_free_facts(facts=small_facts(memory_bytes=memory_bytes)))
    plan = compile_plan(facts, model_of(facts))
    assert isinstance(plan, Plan), plan
    return plan


def test_a_plan_verifies_is_read_back_and_takes_its_time() -> None:
    plan = planned()
    assert verify(plan) == ()
    assert evaluate(plan) == plan
    assert parse(Plan, canonical_json(plan), "plan") == plan
    assert simulate(plan, steps=3).steps.mean == pytest.approx(plan.period_seconds, rel=0.05)


@seeds(4, all=20)
def test_the_reference_holds_weights_only_where_no_stage_of_the_actor_holds_them(seed: int) -> None:
    facts = adapted_facts(small_facts(memory_bytes=2**50))
    plan = random_plan(seed, facts)
    assert verify(plan) == ()
    ref = plan.placement("ref_logprob")
    alike = [
        p for p in plan.placements if (p.pool, p.layout) == (ref.pool, ref.layout) and plan.stage(p.stage).is_trained
    ]
    actors = [p.stage for p in alike if plan.stage(p.stage).role == "actor"]
    assert (plan.copy_of("ref_logprob") in actors) == bool(actors)
    held = resident_bytes(plan, ref)
    assert held == pytest.approx(ref.resident.total - (ref.resident.amount(WEIGHTS) if actors else 0.0))


@seeds(3, all=12)
def test_what_the_actor_is_refit_with_does_not_depend_on_the_reference(seed: int) -> None:
    plan = random_plan(seed, adapted_facts(small_facts(memory_bytes=2**50)))
    owned = {p.stage for p in plan.placements if plan.copy_of(p.stage) == p.stage}
    assert {refit.target for refit in plan.refits} == owned & set(plan.graph.refit_targets)
    assert all(refit.role in ("actor", "critic") for refit in plan.refits)


def test_weights_that_may_be_shared_do_not_wait_in_the_host() -> None:
    plan = planned()
    placements = tuple(
        p.model_copy(update={"schedule": replace(p.schedule, offload=Offload.WEIGHTS)})
        if p.stage == "ref_logprob"
        else p
        for p in plan.placements
    )
    sentences = verify(plan.model_copy(update={"placements": placements}))
    assert any("offload=weights is not for this stage; use none" in sentence for sentence in sentences)


@pytest.mark.parametrize("seed", [1, 2, 4, 5, 6])
def test_the_search_equals_trying_everything_where_memory_is_short(seed: int) -> None:
    """Copies of the actor take so much that all of them fit only where some are shared."""
    few = adapted_facts(critic_free_facts(facts=small_facts(ranks_per_node=2, batch_size=4), group_size=2))
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
    assert ("actor_train", "actor_generate", "actor_logprob", "ref_logprob") in problem.sharing_groups
    assert solve(problem, Limits()).objective == best_makespan(problem)


@pytest.mark.parametrize("memory_bytes", [2**30, 7 * 2**19])
def test_a_proof_holds_where_copies_serve_the_reference_too(memory_bytes: int) -> None:
    facts = small_facts(ranks_per_node=2, batch_size=4, memory_bytes=memory_bytes)
    facts = adapted_facts(critic_free_facts(facts=facts, group_size=2))
    require_proof(facts)


def test_a_base_that_may_be_shared_makes_a_plan_faster_where_memory_is_short() -> None:
    facts = small_facts(ranks_per_node=2, batch_size=4, memory_bytes=4 * 2**20)
    facts = adapted_facts(critic_free_facts(facts=facts, group_size=2))
    shared, apart = (
        compile_plan(one, model_of(one)) for one in (facts, facts.model_copy(update={"ref_is_base": False}))
    )
    assert isinstance(shared, Plan)
    assert isinstance(apart, Plan)
    assert shared.copy_of("ref_logprob") != "ref_logprob" == apart.copy_of("ref_logprob")
    assert apart.placement("ref_logprob").schedule.offload is Offload.WEIGHTS
    assert shared.period_seconds < apart.period_seconds


def test_an_explanation_says_what_is_trained_and_where_there_is_no_copy() -> None:
    found = explain(planned())
    assert found.adapter is not None
    one, two, *_ = found.adapter.sentences
    assert one.startswith("actor: an adapter of rank 4 on linear_qkv, linear_proj, linear_fc1, linear_fc2: 0.0 million")
    assert "ref copy" in two or "has its own copy of the actor's weights" in two
