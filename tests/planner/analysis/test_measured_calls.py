"""A plan names the latencies that its job does not state: measured ones with their calls, and assumed ones."""

from __future__ import annotations

import pytest

from meshwright.planner.analysis.optional_features import call_latencies
from meshwright.planner.job.job import Facts
from meshwright.planner.job.rewards_and_tools import Reward, RewardLoad
from meshwright.profiles.environment.latency import CallKey, LatencySpec, TimedCalls
from meshwright.profiles.environment.turns import ToolTurns
from meshwright.profiles.lengths import LengthSpec
from tests.planner.jobs import small_facts

CALLS = TimedCalls(called=CallKey(kind="reward", target="mine:style"), seconds=(0.1, 0.3), date="2026-11-25")
THREE = LengthSpec(max=4, fixed=3)


def rewarded(latency: LatencySpec) -> Facts:
    load = RewardLoad(name="style", is_remote=False, batch_size=1, latency_seconds=latency)
    return small_facts().model_copy(update={"rewards": (load,)})


def test_a_measured_latency_is_told_with_its_calls() -> None:
    found = call_latencies(rewarded(CALLS.latency))
    assert found is not None
    assert list(found.sentences) == ["a call of reward style takes 0.2 s (the mean of 2 on 2026-11-25)"]


def test_nothing_is_told_of_what_the_job_states() -> None:
    assert call_latencies(rewarded(LatencySpec(fixed=0.2))) is None


def test_an_assumed_latency_is_named_with_how_to_measure_it() -> None:
    """It was planned with 0.01 s a call, and JSON and report said nothing."""
    assumed = Reward(name="style", function="mine:style").load.latency_seconds
    found = call_latencies(rewarded(assumed))
    assert found is not None
    [sentence] = found.sentences
    assert sentence.startswith("a call of reward style is assumed to take 0.01 s: state its latency_seconds in the job")
    assert "meshwright profile" in sentence


def test_an_assumed_latency_of_the_tool_is_named() -> None:
    """It was planned with 0 s a call, and nothing was said."""
    facts = small_facts()
    turns = ToolTurns(number=THREE, result=THREE, max_tokens=40)
    workload = facts.workload.model_copy(update={"turns": turns})
    found = call_latencies(facts.model_copy(update={"workload": workload}))
    assert found is not None
    assert found.assumed == {"the tool": "0 s"}


def test_an_assumption_is_written_and_read_back() -> None:
    assumed = Reward(name="style", function="mine:style").load
    assert RewardLoad.model_validate_json(assumed.model_dump_json()) == assumed
    assert not LatencySpec(fixed=0.01).assumed


def test_a_measured_latency_is_not_assumed() -> None:
    with pytest.raises(ValueError, match="is not assumed"):
        LatencySpec.model_validate({**CALLS.latency.model_dump(), "assumed": True})
