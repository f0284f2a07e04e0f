"""A profile times real calls of a job's own functions and judges, and leaves out what the job states."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.planner.job.job import read_job, require_job
from meshwright.profiles.environment.latency import CallKey, TimedCalls
from meshwright.profiles.errors import BadInput
from meshwright.profiles.table import Table
from meshwright.runtime.api.files import resolve
from meshwright.runtime.api.planning import plan as planned
from meshwright.runtime.environment.samples import RewardSample
from meshwright.runtime.profiling.call_benchmarks import _time, time_calls
from tests.cost_models.tables import PROVENANCE
from tests.runtime.environment.servers import Judged, judge
from tests.runtime.rewarded import write_rewarded

MINE = "tests.runtime.rewarding"
NAP = {"name": "nap", "function": f"{MINE}:napping", "batch_size": 2}
TURNS = {"number": {"max": 3, "fixed": 2}, "result": {"max": 4, "fixed": 3}, "max_tokens": 40}


def written(directory: Path, *rewards: dict[str, Any], tool: str | None = None) -> Path:
    path = write_rewarded(directory, *rewards)
    if tool:
        job = yaml.safe_load(path.read_text())
        job["workload"] |= {"response": {"max": 16, "median": 8, "p99": 16}, "turns": TURNS}
        path.write_text(yaml.safe_dump({**job, "tool": {"function": tool, "call_end": "w5"}}))
    return path


def timed(path: Path, seconds: float = 1.0, allowed: tuple[str, ...] = (MINE,), **known: Any) -> tuple[TimedCalls, ...]:
    return time_calls(read_job(path), path.parent, known.get("known", ()), seconds=seconds, allowed=allowed)


def test_a_function_is_timed_on_samples_of_the_jobs_data(tmp_path: Path) -> None:
    [found] = timed(written(tmp_path, NAP), seconds=0.3)
    assert found.called.target == NAP["function"]
    assert found.called.batch_size == 2
    assert 1 <= len(found.seconds) <= 9  # two naps of 0.02 s a call, for 0.3 s
    assert min(found.seconds) >= 0.04
    assert found.num_failed == 0


def test_the_call_that_starts_what_answers_is_not_counted() -> None:
    naps = iter([0.3])
    [sample] = [RewardSample(id="0/0", prompt="", response="")]
    called = CallKey(kind="reward", target="mine:style")
    found = _time(called, lambda _: time.sleep(next(naps, 0.0)), [sample], 0.0)
    assert len(found.seconds) == 1
    assert found.seconds[0] < 0.3


def test_a_judge_is_timed_and_its_failures_are_counted(tmp_path: Path) -> None:
    judged = Judged()
    judged.statuses = [200, 503, 200, 500]  # of which the first call is not counted
    with judge(judged, seconds=lambda: 0.05) as url:
        [found] = timed(written(tmp_path, {"name": "judge", "url": url}), allowed=())
    assert found.num_failed == 2
    assert 1 <= len(found.seconds) <= 25
    assert min(found.seconds) >= 0.05


def test_a_tool_is_timed_on_calls_that_are_made_up(tmp_path: Path) -> None:
    stated = {"name": "third", "function": f"{MINE}:third_word", "latency_seconds": {"fixed": 0.1}}
    [found] = timed(written(tmp_path, stated, tool="calculator"), seconds=0.3, allowed=())
    assert (found.called.kind, found.called.target) == ("tool", "calculator")
    assert max(found.seconds) < 1.0


def test_what_is_known_is_not_called_again(tmp_path: Path) -> None:
    path = written(tmp_path, NAP)
    known = timed(path, seconds=0.1)
    assert timed(path, allowed=(), known=known) == ()


def test_a_function_of_a_module_that_was_not_allowed_is_not_called(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=rf"would run code of the module {MINE}, which was not allowed"):
        timed(written(tmp_path, NAP), allowed=())


def test_where_no_call_is_answered_the_last_reason_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"refusing: none of \d+ calls was answered; the last failed with ValueError: no"
    ):
        timed(written(tmp_path, {"name": "broken", "function": f"{MINE}:refusing"}), seconds=0.1)


def test_a_plan_has_the_measured_latency_and_is_of_its_job(tmp_path: Path) -> None:
    path = written(tmp_path, NAP)
    job, calls = read_job(path), timed(path, seconds=0.3)
    table = Table(provenance=PROVENANCE, calls=calls)
    facts = resolve(job, path.parent, table)
    assert facts.rewards[0].latency_seconds == calls[0].latency
    require_job(facts, job, path.parent)
    found: Any = planned(facts)
    assert found.facts.rewards[0].latency_seconds.measured.num_calls == len(calls[0].seconds)
    stated = written(tmp_path, {**NAP, "latency_seconds": {"fixed": 3.0}})
    assert resolve(read_job(stated), path.parent, table) == resolve(read_job(stated), path.parent)
    with pytest.raises(BadInput, match=r"the plan was made for another job: rewards"):
        require_job(facts, read_job(stated), path.parent)
