"""Which stages may cut their sequences, and that search, verifier, refits and clocks agree about those that do."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from benchmarks.search.brute_force import best_makespan
from meshwright.cost_models.analytic import AnalyticModel
from meshwright.planner.compile import compile_plan
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.cost_queries import Choice, query_for_choice, stage_transfers
from meshwright.planner.plan.evaluate import evaluate
from meshwright.planner.plan.layout_and_schedule_rules import (
    MIN_CONTEXT_TOKENS,
    layout_rules,
    max_context_parallel,
    schedule_rules,
    schedules,
)
from meshwright.planner.plan.micro_batch_rules import NO_EXTRA_CHOICES, ExtraChoices
from meshwright.planner.plan.pins import parse_pins
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.steps_ahead import search_cases, steps_ahead_patterns
from meshwright.planner.plan.verify import verify
from meshwright.planner.program.check_program import require_sound
from meshwright.planner.program.program import lower, output_owners
from meshwright.planner.search.choice_costs import cost_query
from meshwright.planner.search.formulate import formulate
from meshwright.planner.search.frontiers import frontier, frontiers
from meshwright.planner.search.legal_choices import check_pins, legal_choices
from meshwright.planner.simulation.simulate import simulate
from meshwright.planner.solver.result import Limits
from meshwright.planner.solver.solve import solve
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.documents import canonical_json, parse
from meshwright.profiles.errors import BadInput
from meshwright.profiles.experts import Experts
from meshwright.profiles.hardware import Cluster, device_named, network_named
from meshwright.profiles.layout import Layout
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.workload import Workload
from tests.planner.jobs import RandomModel, small_facts
from tests.planner.plans import random_plan
from tests.planner.problems import everywhere
from tests.seeds import seeds

LONG = small_facts(batch_size=4, response=4 * MIN_CONTEXT_TOKENS - 64)
"""Sequences that four ranks may share."""

WAYS = (NO_EXTRA_CHOICES, ExtraChoices(by_rows=True))


def layouts(facts: Facts, stage: str, num_ranks: int = 4) -> set[Layout]:
    return {choice.layout for choice in legal_choices(facts, PPO_GRAPH.by_name[stage], num_ranks, ())}


def test_every_stage_but_generation_may_cut_long_sequences() -> None:
    for stage in PPO_GRAPH.stages:
        degrees = {layout.cp for layout in layouts(LONG, stage.name)}
        assert degrees == ({1} if stage.generates else {1, 2, 4})


def test_a_rank_is_left_so_many_tokens_of_the_longest_sequence() -> None:
    stage = PPO_GRAPH.by_name["actor_train"]
    assert max_context_parallel(LONG, stage) == 4
    shorter = small_facts(response=4 * MIN_CONTEXT_TOKENS - 65)
    assert max_context_parallel(shorter, stage) == 3
    assert {layout.cp for layout in layouts(shorter, "actor_train")} == {1, 2}
    (sentence,) = layout_rules(shorter, stage, Layout(cp=4))
    assert sentence == (
        "cp=4 leaves 2047 of the 8191 tokens of the longest sequence to a rank, fewer than 2048; use cp=3 at most."
    )


def test_where_sequences_are_short_the_choices_are_those_without() -> None:
    assert all(layout.cp == 1 for stage in PPO_GRAPH.stages for layout in layouts(small_facts(), stage.name))


def test_generation_and_chunks_are_refused_in_one_sentence() -> None:
    (sentence,) = layout_rules(LONG, PPO_GRAPH.by_name["actor_generate"], Layout(cp=2))
    assert sentence == "cp=2 shards sequences, and generation samples one token at a time; use cp=1."
    layout, stage = Layout(cp=2), PPO_GRAPH.by_name["ref_logprob"]
    assert schedule_rules(LONG, stage, layout, Schedule(chunk_tokens=128)) == (
        "cp=2 shards whole sequences, and chunks arrive one by one; use cp=1 or chunk_tokens=0.",
    )


def test_several_rows_at_a_time_are_legal_and_offered_where_they_are_wanted() -> None:
    layout, stage = Layout(cp=2), PPO_GRAPH.by_name["ref_logprob"]
    assert schedule_rules(LONG, stage, layout, Schedule(micro_batch_size=2)) == ()
    sizes = {
        wanted: {one.micro_batch_size for one in schedules(LONG, stage, layout, extra_choices=wanted)}
        for wanted in WAYS
    }
    assert sizes == {NO_EXTRA_CHOICES: {1}, ExtraChoices(by_rows=True): {1, 2, 4}}


def test_a_cap_is_of_all_ranks_that_share_a_sequence_and_costs_what_as_many_rows_do() -> None:
    facts = llama_on_64_ranks()
    longest, model = facts.workload.max_tokens, AnalyticModel(facts.cluster, facts.workload, facts.precision)
    fixed = facts.workload.sequence_lengths.tokens[0] == longest
    for name in ("ref_logprob", "actor_train"):
        stage, layout = PPO_GRAPH.by_name[name], Layout.parse("tp4,dp2,cp2,sp")
        cap = Schedule(micro_batch_size=0, micro_batch_tokens=2 * longest)
        assert schedule_rules(facts, stage, layout, cap) == ()
        assert cap in schedules(facts, stage, layout, extra_choices=ExtraChoices(caps=(2 * longest,)))
        capped, rows = (
            cost_query(model, query_for_choice(facts, stage, Choice(layout, schedule), deferral=0))
            for schedule in (cap, Schedule(micro_batch_size=2))
        )
        assert capped.peak_bytes == pytest.approx(rows.peak_bytes, rel=0.001)
        assert capped.seconds == pytest.approx(rows.seconds) if fixed else capped.seconds <= rows.seconds


def test_experts_take_whole_sequences() -> None:
    experts = Experts(num_experts=4, experts_per_token=2, ffn_size=64)
    models = LONG.models.model_copy(update={"ref": replace(LONG.models.ref, experts=experts)})
    facts = LONG.model_copy(update={"models": models})
    assert {layout.cp for layout in layouts(facts, "ref_logprob")} == {1}
    assert len(layout_rules(facts, PPO_GRAPH.by_name["ref_logprob"], Layout(dp=2, cp=2))) == 1
    with pytest.raises(BadInput, match="cp=2 divides sequences, and the experts of ref take whole ones; use cp=1"):
        check_pins(facts, parse_pins(["ref_logprob.layout=dp2,cp2"], PPO_GRAPH))


def test_of_two_sequences_at_a_time_each_replica_of_two_takes_one_no_slower() -> None:
    """Why one at a time is offered."""
    facts = llama_on_64_ranks()
    model = AnalyticModel(facts.cluster, facts.workload, facts.precision)
    for name in ("ref_logprob", "actor_train"):
        stage = PPO_GRAPH.by_name[name]
        cut, apart = (
            cost_query(
                model,
                query_for_choice(facts, stage, Choice(Layout.parse(layout), Schedule(micro_batch_size=n)), deferral=0),
            )
            for layout, n in (("tp4,dp2,cp2,sp", 2), ("tp4,dp4,sp", 1))
        )
        assert apart.seconds <= cut.seconds
        assert apart.peak_bytes <= cut.peak_bytes


PINS = (
    "ref_logprob.layout=cp4",
    "reward_score.layout=dp2,cp2",
    "critic_train.layout=pp2,cp2",
    "actor_train.layout=tp2,cp2,sp",
)


@cache
def planned() -> Plan:
    plan = compile_plan(LONG, AnalyticModel(LONG.cluster, LONG.workload, LONG.precision), pins=PINS)
    assert isinstance(plan, Plan), plan
    return plan


def test_a_plan_with_cut_sequences_verifies_and_is_read_back() -> None:
    plan = planned()
    assert verify(plan) == ()
    assert evaluate(plan) == plan
    assert parse(Plan, canonical_json(plan), "plan") == plan
    assert "ref_logprob.layout=tp1,pp1,dp1,cp4" in plan.pins
    assert {refit.target for refit in plan.refits} >= {"actor_generate"}


def test_a_pool_that_is_not_filled_is_told_with_its_context_ranks() -> None:
    plan = planned()
    placements = [
        p.model_copy(update={"layout": Layout(cp=2)}) if p.stage == "ref_logprob" else p for p in plan.placements
    ]
    sentences = verify(plan.model_copy(update={"placements": tuple(placements)}))
    assert "ref_logprob: tp=1 x pp=1 x dp=1 x cp=2 is 2 ranks and its pool has 4; make the product 4." in sentences


def test_the_simulated_clock_takes_the_planned_time() -> None:
    plan = planned()
    assert simulate(plan, steps=3).steps.mean == pytest.approx(plan.period_seconds, rel=0.02)


@seeds(2, all=6)
def test_the_search_equals_trying_everything(seed: int) -> None:
    """With all but the reference and the actor's training pinned, which may cut their sequences."""
    facts = small_facts(ranks_per_node=2, batch_size=2, response=2 * MIN_CONTEXT_TOKENS - 64)
    model = RandomModel(seed, 2**27)
    free = ("ref_logprob", "actor_train")
    pins = parse_pins(
        [f"{s.name}.{key}" for s in PPO_GRAPH.stages if s.name not in free for key in ("pool=0:2", "layout=dp2")]
        + [f"{s.name}.generation_slots=1" for s in PPO_GRAPH.stages if s.generates]
        + [f"{s.name}.micro_batch_size=1" for s in PPO_GRAPH.stages if not s.generates],
        PPO_GRAPH,
    )
    scope = next(scope for ahead in steps_ahead_patterns(PPO_GRAPH, 0) for scope in search_cases(ahead, 0))
    found = frontiers(facts, model, pins, search_case=scope)
    problem = everywhere(formulate(facts, model, found, stage_transfers(facts, model)).problem)
    assert any(c.layout.cp == 2 for f in found for kept in f.candidates.values() for c in kept)
    assert solve(problem, Limits()).objective == best_makespan(problem)


@seeds(2, all=4)
def test_a_compiled_plan_verifies_and_the_evaluator_reproduces_it(seed: int) -> None:
    facts = small_facts(ranks_per_node=2, batch_size=4, response=2 * MIN_CONTEXT_TOKENS - 64)
    plan = compile_plan(facts, RandomModel(seed, 2**27))
    assert isinstance(plan, Plan)
    assert verify(plan) == ()
    assert evaluate(plan) == plan


def test_random_plans_with_cut_sequences_verify_and_their_programs_are_sound() -> None:
    """Every rank of every pool has what it reads, whoever holds it."""
    facts = small_facts(memory_bytes=2**50, batch_size=4, response=4 * MIN_CONTEXT_TOKENS - 64)
    plans = [random_plan(seed, facts) for seed in range(20)]
    assert {p.layout.cp for plan in plans for p in plan.placements} > {1, 2}
    for plan in plans:
        assert verify(plan) == ()
        require_sound(lower(plan), PPO_GRAPH)
        for placement in plan.placements:
            layout = placement.layout
            held = output_owners(plan, placement.stage)
            first = plan.pool_of(placement.stage).first_rank
            places = [layout.coordinates(rank - first) for rank in held]
            assert [(place.tp, place.cp, place.dp) for place in places] == [(0, 0, dp) for dp in range(layout.dp)]


def llama_on_64_ranks() -> Facts:
    """Llama-2 7B on 64 H100, 32 sequences of up to 64k tokens."""
    device, intra_node, host = device_named("h100-sxm")
    llama = ModelSpec(
        name="llama",
        architecture="LlamaForCausalLM",
        num_layers=32,
        hidden_size=4096,
        ffn_size=11008,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        vocab_size=32000,
        max_positions=2**17,
        tied_embeddings=False,
        activation="silu",
        norm_epsilon=1e-5,
    )
    models = {role: replace(llama, name=role, scalar_head=role in ("critic", "reward")) for role in ROLES}
    return small_facts().model_copy(
        update={
            "models": small_facts().models.model_copy(update=models),
            "cluster": Cluster(
                nodes=8,
                ranks_per_node=8,
                device=device,
                intra_node=intra_node,
                inter_node=network_named("ib-ndr-400"),
                host=host,
                host_memory_bytes=2**40,
            ),
            "workload": Workload(
                batch_size=32,
                prompt=LengthSpec(max=1024, median=256, p99=1000),
                response=LengthSpec(max=65536, median=32768, p99=65436),
            ),
        }
    )


ROLES = ("actor", "critic", "ref", "reward")


@pytest.mark.parametrize("num_ranks", [32, 64])
def test_training_on_sequences_of_64k_tokens_is_fastest_with_them_cut(num_ranks: int) -> None:
    facts = llama_on_64_ranks()
    model = AnalyticModel(facts.cluster, facts.workload, facts.precision)
    found = frontier(
        facts, model, PPO_GRAPH.by_name["actor_train"], parse_pins([f"actor_train.pool=0:{num_ranks}"], PPO_GRAPH)
    )
    every = [candidate for kept in found.candidates.values() for candidate in kept]
    best = {cut: min(c.seconds for c in every if (c.layout.cp > 1) == cut) for cut in (False, True)}
    assert best[True] < 0.96 * best[False]
