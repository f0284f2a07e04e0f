"""The benchmark's judge takes for a sample always the same time, as its latency says."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.rewards.judging import Calls, seconds_at_once, served
from benchmarks.rewards.words import share_of_letters
from meshwright.profiles.environment.latency import LatencySpec
from meshwright.runtime.environment.judge import Judge
from meshwright.runtime.environment.samples import RewardSample


def sample(response: str, name: str = "0/0") -> RewardSample:
    return RewardSample(id=name, prompt="", response=response)


def test_a_sample_takes_its_own_time_and_all_together_the_mean() -> None:
    calls = Calls(LatencySpec(mean=0.2, p99=1.0))
    assert calls.seconds("3/5") == Calls(LatencySpec(mean=0.2, p99=1.0)).seconds("3/5")
    found = [calls.seconds(f"{step}/{row}") for step in range(40) for row in range(64)]
    assert statistics.fmean(found) == pytest.approx(0.2, rel=0.1)


def test_a_judge_scores_and_remembers_whom() -> None:
    calls = Calls(LatencySpec(fixed=0.0))
    with served(calls) as url:
        judge = Judge(url, timeout_seconds=5.0)
        assert judge.score([sample("ab1!", "1/2")]) == share_of_letters([sample("ab1!")]) == [0.5]
    assert calls.scored == ["1/2"]


def test_samples_at_once_take_as_long_as_the_slowest() -> None:
    taken = seconds_at_once(LatencySpec(fixed=0.2), 8, 2)
    assert all(0.2 <= seconds < 1.0 for seconds in taken)
