"""Working ahead: what is allowed, what it does to a turn, and what the simulated clock then says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planner.compile import compile_plan
from meshwright.planner.plan.evaluate import items, ranks_of
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.steps_ahead import (
    max_deferral,
    search_cases,
    staleness_of,
    steps_ahead_patterns,
    synchronous,
)
from meshwright.planner.plan.verify import verify
from meshwright.planner.program.check_program import check_program
from meshwright.planner.program.program import MoveWeights, Receive, RunStage, Send, is_active, lower
from meshwright.planner.simulation.simulate import simulate
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import GENERATE
from tests.planner.jobs import RandomModel, small_facts
from tests.planner.plans import random_plan
from tests.seeds import seeds

AHEAD = steps_ahead_patterns(PPO_GRAPH, 2)


def test_a_bound_of_zero_allows_nothing_but_synchronous_steps() -> None:
    assert steps_ahead_patterns(PPO_GRAPH, 0) == (synchronous(PPO_GRAPH),)


@pytest.mark.parametrize("ahead", AHEAD)
def test_steps_ahead_never_rise_along_an_edge(ahead: dict[str, int]) -> None:
    assert all(ahead[producer] >= ahead[consumer] for producer, consumer, _ in PPO_GRAPH.edges)


@pytest.mark.parametrize("ahead", AHEAD)
def test_what_works_ahead_stays_within_the_bound(ahead: dict[str, int]) -> None:
    bound = max(ahead.values())
    assert staleness_of(ahead["actor_generate"], Schedule(), bound) == bound
    assert max_deferral(ahead, bound) == 0


def test_what_selects_samples_scores_them_in_the_period_that_draws_them() -> None:
    graph = replace(PPO_GRAPH, selects_samples=True)
    for plain, selecting in zip(AHEAD, steps_ahead_patterns(graph, 2), strict=True):
        assert selecting == {**plain, "reward_score": plain[GENERATE]}


def test_a_token_is_as_stale_as_generation_is_ahead_and_each_batch_in_flight_behind_the_first_adds_one() -> None:
    found = [staleness_of(ahead, Schedule(batches_in_flight=number), 9) for ahead in (0, 1) for number in (1, 2, 3)]
    assert found == [0, 1, 2, 1, 2, 3]
    assert staleness_of(1, Schedule(overcommit=8), 9) == 9


@pytest.mark.parametrize("ahead", AHEAD)
@seeds(4, all=20)
def test_the_program_of_any_plan_is_sound_whatever_works_ahead(seed: int, ahead: dict[str, int]) -> None:
    plan = random_plan(seed, ahead=ahead)
    assert verify(plan) == ()
    program = lower(plan)
    assert check_program(program, PPO_GRAPH) == ()
    assert check_program(lower(plan, ("actor_generate", "reward_score")).synchronous(), PPO_GRAPH) == ()


def test_every_step_meets_every_stage_once_over_its_turns() -> None:
    program, steps = lower(random_plan(3, ahead=AHEAD[2])), range(4, 9)
    done = [
        (turn + i.steps_ahead, i.name)
        for turn in program.periods(steps)
        for i in program.instructions
        if is_active(i, turn, steps) and not isinstance(i, MoveWeights)
    ]
    names = [i.name for i in program.instructions if not isinstance(i, MoveWeights)]
    assert sorted(done) == sorted((step, name) for step in steps for name in names)


def test_a_receive_ahead_of_its_send_is_named() -> None:
    program = lower(random_plan(3, ahead=AHEAD[1]))
    moved = tuple(replace(i, steps_ahead=2) if isinstance(i, Receive) else i for i in program.instructions)
    found = check_program(replace(program, instructions=moved), PPO_GRAPH)
    assert any("has steps_ahead=2, ahead of its send with steps_ahead=1; use 1." in sentence for sentence in found)


def test_a_planted_circle_over_two_turns_is_named() -> None:
    """Rank 0 wants the scores of a step before it generates for that step; rank 1 cannot score what is not there."""
    tokens = {"producer": "actor_generate", "consumer": "reward_score", "fields": ("tokens",)}
    scores = {"producer": "reward_score", "consumer": "critic_train", "fields": ("scores",)}
    order = (
        Receive(**scores, ranks=(0,), owners=(1,), steps_ahead=0),
        RunStage(stage="actor_generate", ranks=(0,), steps_ahead=0),
        Send(**tokens, ranks=(0,), targets=(1,), steps_ahead=0),
        Receive(**tokens, ranks=(1,), owners=(0,), steps_ahead=0),
        RunStage(stage="reward_score", ranks=(1,), steps_ahead=0),
        Send(**scores, ranks=(1,), targets=(0,), steps_ahead=0),
    )
    program = replace(lower(random_plan(3)), instructions=order)
    found = check_program(program, PPO_GRAPH)
    assert any(sentence.startswith("deadlock: rank 0 waits in") for sentence in found)
    ahead = tuple(
        replace(i, steps_ahead=1) if i.name in {"actor_generate", "send actor_generate -> reward_score"} else i
        for i in order
    )
    assert not any("circle" in sentence for sentence in check_program(replace(program, instructions=ahead), PPO_GRAPH))


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from(AHEAD[1:]))
def test_a_simulated_turn_takes_no_longer_than_planned_and_no_less_than_its_busiest_rank(
    seed: int, ahead: dict[str, int]
) -> None:
    plan = random_plan(seed, ahead=ahead)
    simulated = simulate(plan, steps=12, warm_up=6)
    load = dict.fromkeys(range(plan.facts.cluster.num_ranks), 0.0)
    for item in items(plan):
        for rank in ranks_of(plan, item):
            load[rank] += item.cost.total
    assert max(load.values()) * (1 - 1e-9) <= simulated.steps.mean <= plan.period_seconds * (1 + 1e-9)


@pytest.mark.slow
def test_a_larger_bound_on_staleness_never_makes_a_slower_plan() -> None:
    model = RandomModel(1, memory_scale=1.0)
    periods = []
    for staleness in (0, 1, 2):
        facts = small_facts().model_copy(update={"staleness": staleness})
        plan = compile_plan(facts, model)
        assert isinstance(plan, Plan)
        assert plan.staleness <= staleness
        periods.append(plan.period_seconds)
    assert periods == sorted(periods, reverse=True)


def test_the_critic_reads_no_chunks_of_sequences_that_run_on() -> None:
    whole, running = search_cases(synchronous(PPO_GRAPH), 1)
    assert whole.streams(PPO_GRAPH.by_name["critic_value"])
    assert not running.streams(PPO_GRAPH.by_name["critic_value"])
    assert running.streams(PPO_GRAPH.by_name["ref_logprob"])
    assert not any(scope.streams(PPO_GRAPH.by_name["ref_logprob"]) for scope in search_cases(AHEAD[1], 2))


def test_a_critic_that_streams_from_sequences_that_run_on_is_told() -> None:
    assert told_of_chunks("critic_value", batches_in_flight=2)
    assert told_of_chunks("critic_value", overcommit=8)


def test_a_stage_may_stream_from_what_runs_on_if_nothing_trains_it_and_the_critic_from_what_does_not() -> None:
    assert not told_of_chunks("ref_logprob", batches_in_flight=2)
    assert not told_of_chunks("critic_value", batches_in_flight=1)


def told_of_chunks(stage: str, **generation: int) -> bool:
    """Whether the verifier says that a stage that streams has weights that change between chunks."""
    plan = random_plan(3, ahead=synchronous(PPO_GRAPH))
    changed = {GENERATE: generation, stage: {"chunk_tokens": 8}}
    placements = tuple(
        p.model_copy(update={"schedule": replace(p.schedule, **changed.get(p.stage, {}))}) for p in plan.placements
    )
    sentences = verify(plan.model_copy(update={"placements": placements}))
    return any(sentence.startswith(f"{stage}: chunk_tokens=8, and its weights change") for sentence in sentences)
