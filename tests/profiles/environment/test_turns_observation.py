"""Turns, answers and latencies as a run's trace tells them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.environment.latency import LatencySpec
from meshwright.profiles.environment.turns import ToolTurns
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.observations import TurnsObservation, observe, observe_turns, observe_workload
from meshwright.profiles.trace import CALL_SECONDS, NUM_CALLS, NUM_TOOL_TOKENS, Span
from meshwright.profiles.workload import Workload
from tests.profiles.test_observations import LAYOUTS, trace

TURNS = ToolTurns(
    number=LengthSpec(max=12, median=3, p99=10),
    result=LengthSpec(max=50, median=20, p99=50),
    latency_seconds=LatencySpec(mean=1.0, p99=5.0),
    max_tokens=1000,
)
SPAN = Span(
    step=1,
    instruction="actor_generate",
    kind="stage",
    rank=0,
    start_seconds=0.0,
    end_seconds=1.0,
    clock="measured",
    facts={NUM_TOOL_TOKENS: 600.0},
)
CALLING = replace(SPAN, facts={**SPAN.facts, NUM_CALLS: 40.0, CALL_SECONDS: 20.0})


def test_every_rank_of_a_replica_tells_its_tokens_and_one_of_them_its_calls() -> None:
    spans = [CALLING, SPAN, CALLING, SPAN]  # two replicas of two ranks
    assert observe_turns(spans, 2, num_rollouts=20) == TurnsObservation(4.0, 60.0, 2.0)
    assert observe_turns([replace(SPAN, facts={})], 1, num_rollouts=20) is None


def test_turns_that_were_met_have_the_means_of_the_trace() -> None:
    found = TurnsObservation(num_calls=4.0, tool_tokens=60.0, call_seconds=2.0).scale(TURNS)
    assert found.mean_calls == pytest.approx(4.0)
    assert found.result.resolve().mean == pytest.approx(15.0)
    assert found.latency_seconds.resolve().mean == pytest.approx(0.5)
    assert found.max_tokens == TURNS.max_tokens


def test_of_a_tool_that_was_never_called_nothing_was_seen() -> None:
    found = TurnsObservation(0.0, 0.0, 0.0).scale(TURNS)
    assert found.mean_calls == 0
    assert (found.result, found.latency_seconds) == (TURNS.result, TURNS.latency_seconds)


def test_a_turn_draws_its_part_of_what_a_rollout_draws_and_a_prompt_is_what_is_left(workload: Workload) -> None:
    several = workload.model_copy(update={"turns": TURNS})
    seen = observe(trace(3), LAYOUTS, PPO_GRAPH, batch_size=32)
    turns = TurnsObservation(num_calls=4.0, tool_tokens=60.0, call_seconds=2.0)
    found = observe_workload(several, replace(seen, response_tokens=80.0, sequence_tokens=145.0, turns=turns))
    assert found.response.resolve().mean == pytest.approx(16.0)
    assert found.prompt_lengths.mean == pytest.approx(5.0)
    assert found.sampled_lengths.mean == pytest.approx(80.0, rel=0.02)
