"""Of latencies that were measured it is told on what."""

from __future__ import annotations

from meshwright.planner.analysis.optional_features import measured_latencies
from meshwright.planner.job.job import Facts
from meshwright.planner.job.rewards_and_tools import RewardLoad
from meshwright.profiles.environment.latency import CallKey, LatencySpec, TimedCalls
from tests.planner.jobs import small_facts

CALLS = TimedCalls(called=CallKey(kind="reward", target="mine:style"), seconds=(0.1, 0.3), date="2026-11-25")


def rewarded(latency: LatencySpec) -> Facts:
    load = RewardLoad(name="style", is_remote=False, batch_size=1, latency_seconds=latency)
    return small_facts().model_copy(update={"rewards": (load,)})


def test_a_measured_latency_is_told_with_its_calls() -> None:
    found = measured_latencies(rewarded(CALLS.latency))
    assert found is not None
    assert list(found.sentences) == ["a call of reward style takes 0.2 s (the mean of 2 on 2026-11-25)"]


def test_nothing_is_told_of_what_the_job_states() -> None:
    assert measured_latencies(rewarded(LatencySpec(fixed=0.2))) is None
