"""A tool's calls are answered side by side, and a call that fails is told or answered as the job says."""

from __future__ import annotations

import time

import pytest

from meshwright.planner.job.rewards_and_tools import Tool
from meshwright.runtime.environment.samples import RewardError, ToolCall
from meshwright.runtime.environment.worker_pool import ToolWorkers
from tests.runtime.environment.samples import MODULE


def call(sampled: str) -> ToolCall:
    return ToolCall(id="3/5", prompt="", response=sampled, turn=2, sampled=sampled)


def test_as_many_calls_run_at_a_time_as_there_are_workers() -> None:
    tools = ToolWorkers(Tool(function=f"{MODULE}:slow_echo", workers=4))
    for answer in [tools.call(call("start")) for _ in range(4)]:
        answer.result()
    begun = time.monotonic()
    answers = [tools.call(call(f"{number}")) for number in range(4)]
    assert [answer.result().text for answer in answers] == ["0!", "1!", "2!", "3!"]
    assert time.monotonic() - begun < 4 * 0.2
    assert min(answer.result().seconds for answer in answers) >= 0.2
    tools.close()


def test_a_call_that_fails_is_told_with_its_sample(capsys: pytest.CaptureFixture[str]) -> None:
    strict, lenient = (
        ToolWorkers(Tool(function=f"{MODULE}:slow_echo", workers=1, failure_answer=told)) for told in (None, "failed")
    )
    with pytest.raises(RewardError, match=r"in turn 2 of sample 3/5: ValueError: no such word"):
        strict.call(call("raise")).result()
    assert lenient.call(call("raise")).result().text == "failed"
    assert "it gets the failure_answer 'failed'" in capsys.readouterr().err
    for tools in (strict, lenient):
        tools.close()
