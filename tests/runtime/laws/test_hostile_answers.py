"""Whatever a judge answers, its sample is scored or has failed within the time that the job gives it, and no connection
leads elsewhere."""

from __future__ import annotations

import math
import resource
import time
from pathlib import Path

import pytest

from meshwright.planner.job.rewards_and_tools import Tool
from meshwright.runtime.environment.judge import Judge
from meshwright.runtime.environment.samples import RewardError
from meshwright.runtime.environment.worker import Worker
from meshwright.runtime.environment.worker_pool import RewardWorkers, ToolWorkers
from tests.runtime.environment import hostile
from tests.runtime.environment.samples import sample
from tests.runtime.environment.test_tools import call
from tests.runtime.environment.test_unit_tests import CHEATS, HUNGRY
from tests.seeds import cases

ANSWERS = hostile.answers()
FEW = sorted(ANSWERS)[::9]
FUNCTIONS = sorted(hostile.REWARDS)
FEW_FUNCTIONS = ["it hangs", "it is killed", "it leaves a child", "it calls itself", "a surly exception", "no number"]
TOOLS = sorted(hostile.TOOLS)
FEW_TOOLS = ["it holds the interpreter", "it is stopped", "it writes into every file", "an interrupt", "17 MiB"]
TIMEOUT_SECONDS, MORE_SECONDS = 0.3, 1.5


@cases("name", sorted(ANSWERS), few=FEW)
def test_an_answer_of_a_judge_is_a_score_or_a_failure_in_time(name: str) -> None:
    with hostile.server(ANSWERS[name]) as (url, asked):
        judge = Judge(url, timeout_seconds=TIMEOUT_SECONDS)
        crew = RewardWorkers("judge", lambda: judge, num_workers=1, failure_score=-1.0)
        begun = time.monotonic()
        score = crew.score(sample("a")).result(10.0).score
        assert time.monotonic() - begun < TIMEOUT_SECONDS + MORE_SECONDS
        assert math.isfinite(score)
        assert score == -1.0 or name.endswith(": a truth")
        assert len(asked) == 1
        crew.close()


def test_without_a_failure_score_the_reason_is_printable_and_names_the_way_out() -> None:
    for name, told in (
        ("302 to 'http://127.0.0.2:9/'", r"status 302 and redirects to http://127.0.0.2:9/; name that URL in the job"),
        ("body: 400 digits", "a score is not a finite number"),
        ("body: deep lists", "RecursionError"),
        ("body: 17 MiB", "an answer of more than 16777216 bytes"),
    ):
        with hostile.server(ANSWERS[name]) as (url, _), pytest.raises(RewardError, match=told) as raised:
            Judge(url, timeout_seconds=5.0).score([sample("a")])
        assert str(raised.value).isprintable()


@pytest.mark.slow
@cases("name", FUNCTIONS, few=FEW_FUNCTIONS)
def test_whatever_a_reward_does_its_sample_fails_alone_in_time(name: str) -> None:
    crew = RewardWorkers("mine", lambda: Worker(f"{hostile.MODULE}:reward", 1.0), num_workers=1, failure_score=-1.0)
    assert crew.score(sample("well")).result(60.0).score == 1.0
    begun = time.monotonic()
    assert crew.score(sample(name)).result(30.0).score == -1.0
    assert time.monotonic() - begun < 1.0 + 3 * MORE_SECONDS
    assert crew.score(sample("well")).result(60.0).score == 1.0
    crew.close()


@pytest.mark.slow
@cases("name", TOOLS, few=FEW_TOOLS)
def test_whatever_a_tool_does_its_call_is_answered_in_time(name: str) -> None:
    tools = ToolWorkers(
        Tool(function=f"{hostile.MODULE}:tool", workers=1, timeout_seconds=1.0, failure_answer="failed")
    )
    assert tools.call(call("well")).result(60.0).text == "well"
    begun = time.monotonic()
    assert tools.call(call(name)).result(30.0).text == "failed"
    assert time.monotonic() - begun < 1.0 + 3 * MORE_SECONDS
    assert tools.call(call("well")).result(60.0).text == "well"
    tools.close()


def test_a_worker_that_cannot_be_started_fails_its_sample_and_the_next_is_scored(tmp_path: Path) -> None:
    """No file may be opened any more: what a run that has too many of them meets."""
    crew = RewardWorkers("mine", lambda: Worker("exact_match", 20.0), num_workers=1, failure_score=-1.0)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with (tmp_path / "a").open("w") as last:
        resource.setrlimit(resource.RLIMIT_NOFILE, (last.fileno(), before[1]))
        try:
            assert crew.score(sample("a", "a")).result(20.0).score == -1.0
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert crew.score(sample("a", "a")).result(60.0).score == 1.0
    crew.close()


def test_there_are_two_hundred_answers() -> None:
    """Beside those of `test_unit_tests.py`."""
    assert len(ANSWERS) + len(FUNCTIONS) + len(TOOLS) + len(CHEATS) + len(HUNGRY) >= 200
