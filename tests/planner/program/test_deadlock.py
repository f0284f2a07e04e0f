"""Every rank of a compiled program can go on to its end; of one that cannot, the waits are named."""

from __future__ import annotations

import pytest

from meshwright.planner.plan.steps_ahead import steps_ahead_patterns
from meshwright.planner.program.check_program import find_deadlock
from meshwright.planner.program.program import Program, Receive, RunStage, Send, Stream, lower
from meshwright.profiles.algorithms import PPO_GRAPH
from tests.planner.plans import long_facts, random_plan
from tests.seeds import seeds


@pytest.mark.parametrize("ahead", steps_ahead_patterns(PPO_GRAPH, 2), ids=str)
@seeds(2, all=6)
def test_no_rank_of_a_lowered_plan_waits_for_ever(seed: int, ahead: dict[str, int]) -> None:
    assert tuple(find_deadlock(lower(random_plan(seed, long_facts(), ahead=ahead)))) == ()


def test_a_program_of_nothing_ends() -> None:
    assert tuple(find_deadlock(Program(()))) == ()


def test_a_planted_deadlock_is_found_and_its_circle_is_named() -> None:
    # Rank 1 waits for what rank 0 sends after the stage that rank 0 cannot begin without rank 1.
    handover = {"producer": "actor_generate", "consumer": "reward_score", "fields": ("tokens",)}
    program = Program(
        (
            Receive(**handover, ranks=(1,), owners=(0,)),
            RunStage(stage="actor_generate", ranks=(0, 1)),
            Send(**handover, ranks=(0,), targets=(1,)),
        )
    )
    (found,) = find_deadlock(program)
    assert found == (
        "deadlock: rank 0 waits in 'actor_generate' for rank 1, and rank 1 waits in "
        "'receive actor_generate -> reward_score' for rank 0; change the order of one of them."
    )


def test_a_wait_for_a_rank_that_has_ended_is_named() -> None:
    handover = {"producer": "actor_generate", "consumer": "reward_score", "fields": ("tokens",)}
    program = Program(
        (
            RunStage(stage="actor_generate", ranks=(0, 1)),
            Send(**handover, ranks=(0,), targets=(1,)),
            Receive(**handover, ranks=(1,), owners=(0, 2)),
        )
    )
    (found,) = find_deadlock(program)
    assert "for rank 2, which has ended: it waits for ever" in found


def test_a_planted_circle_through_a_stream_is_named() -> None:
    """Rank 1 generates only after it has scored what it has to generate."""
    handover = {"producer": "actor_generate", "consumer": "reward_score"}
    score, generate = RunStage(stage="reward_score", ranks=(1, 2, 3)), RunStage(stage="actor_generate", ranks=(0, 1))
    send = Send(**handover, fields=("tokens",), ranks=(0, 1), targets=(2, 3))
    receive = Receive(**handover, fields=("tokens",), ranks=(2, 3), owners=(0, 1))
    stream = Stream(**handover, chunk_tokens=128, owners=(0, 1), targets=score.ranks)
    (found,) = find_deadlock(Program((score, generate, send, receive), (stream,)))
    assert found == (
        "deadlock: rank 0 waits in 'actor_generate' for rank 1, and rank 1 waits in 'reward_score' for rank "
        "0; change the order of one of them."
    )
