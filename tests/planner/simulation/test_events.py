"""A program in virtual time, on numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from meshwright.planner.program.durations import Planned, StepWork, TransferDelays, transfer_delays
from meshwright.planner.program.program import Instruction, Program, Receive, RunStage, Send, Stream, lower
from meshwright.planner.simulation.events import Record, group_ranks, simulate_events
from tests.planner.plans import random_plan
from tests.seeds import seeds

HANDOVER = {"producer": "actor_generate", "consumer": "reward_score", "fields": ("tokens",)}
"""Ranks 0 and 1 generate, rank 2 scores what they send it."""


def program(*, streams: bool = False, steps_ahead: int = 0) -> Program:
    generate = RunStage(stage="actor_generate", ranks=(0, 1), steps_ahead=steps_ahead)
    send = Send(**HANDOVER, ranks=(0, 1), targets=(2,), steps_ahead=steps_ahead)
    scoring = RunStage(stage="reward_score", ranks=(2,))
    receive = Receive(**HANDOVER, ranks=(2,), owners=(0, 1))
    behind: tuple[Instruction, ...] = (scoring, receive) if streams else (receive, scoring)
    stream = Stream(producer="actor_generate", consumer="reward_score", chunk_tokens=8, owners=(0, 1), targets=(2,))
    return Program((generate, send, *behind), (stream,) if streams else ())


def played(
    program: Program, seconds: Mapping[str, tuple[float, ...]], *, steps: int = 1, tail: float = 0.0
) -> dict[tuple[int, str, int], Record]:
    """What each group did, by step, instruction and group; groups count from the one of rank 0."""
    split = frozenset(name for name, each in seconds.items() if len(each) > 1)
    parts = group_ranks(program, 3, split, lambda stage, rank: rank if stage == "actor_generate" else 0)
    works = [StepWork(seconds=seconds, num_tokens=1.0)] * steps
    lags = TransferDelays(transfers={("actor_generate", "reward_score"): 0.5}, tails={"reward_score": tail})
    names = [*(instruction.name for instruction in program.instructions), "end"]
    return {(r.step, names[r.number], r.group): r for r in simulate_events(parts, works, lags)}


def test_ranks_that_do_the_same_in_the_same_time_are_one_group() -> None:
    alike = group_ranks(program(), 3, frozenset(), lambda _stage, _rank: 0)
    assert alike.groups == ((0, 1), (2,))
    apart = group_ranks(program(), 3, frozenset({"actor_generate"}), lambda _stage, rank: rank)
    assert apart.groups == ((0,), (1,), (2,))
    assert apart.members[0] == (0, 1)


def test_a_receive_ends_when_what_every_owner_sent_has_arrived() -> None:
    """Replicas take 2 and 5 seconds, a hand-over half a second, scoring 1."""
    found = played(program(), {"actor_generate": (2.0, 5.0), "reward_score": (1.0,)})
    assert [found[0, "actor_generate", group].end for group in (0, 1)] == [2.0, 5.0]
    receive = found[0, "receive actor_generate -> reward_score", 2]
    assert (receive.arrived, receive.start, receive.end) == (0.0, 5.0, 5.5)
    assert receive.cause == "actor_generate"
    assert found[0, "reward_score", 2].end == 6.5


def test_a_step_begins_when_every_rank_has_ended_the_last_one() -> None:
    found = played(program(), {"actor_generate": (2.0,), "reward_score": (1.0,)}, steps=3)
    assert [found[step, "actor_generate", 0].start for step in range(3)] == [0.0, 3.5, 7.0]


def test_ranks_that_work_ahead_go_on_at_once() -> None:
    """Generation of step n + 1 runs beside the scoring of step n."""
    found = played(program(steps_ahead=1), {"actor_generate": (2.0,), "reward_score": (1.0,)}, steps=3)
    assert [found[step, "actor_generate", 0].start for step in range(3)] == [0.0, 2.0, 4.0]
    assert [found[step, "reward_score", 1].end for step in range(3)] == [3.5, 5.5, 7.5]


@pytest.mark.parametrize(("seconds", "end"), [(1.0, 4.7), (9.0, 9.0)])
def test_a_stage_that_streams_starts_with_its_producer_and_ends_its_tail_behind_it(seconds: float, end: float) -> None:
    """Generation takes 4 s, the last chunk arrives half a second later, and 0.2 s are left to read."""
    found = played(program(streams=True), {"actor_generate": (4.0,), "reward_score": (seconds,)}, tail=0.2)
    record = found[0, "reward_score", 1]
    assert (record.start, record.end) == (0.0, pytest.approx(end))
    assert record.stream_wait == pytest.approx(end - seconds)


@seeds(2, all=6)
def test_every_rank_does_every_instruction_of_its_own_once_a_step(seed: int) -> None:
    plan = random_plan(seed)
    lowered = lower(plan)
    parts = group_ranks(lowered, plan.facts.cluster.num_ranks, frozenset(), lambda _stage, _rank: 0)
    works = [Planned(plan).of_step(step) for step in range(2)]
    done = sorted(
        (record.step, rank, record.number)
        for record in simulate_events(parts, works, transfer_delays(plan))
        for rank in parts.groups[record.group]
    )
    ends = len(lowered.instructions)
    assert done == sorted(
        (step, rank, number)
        for step in range(2)
        for rank in range(plan.facts.cluster.num_ranks)
        for number in (*(n for n, one in enumerate(lowered.instructions) if rank in one.ranks), ends)
    )
