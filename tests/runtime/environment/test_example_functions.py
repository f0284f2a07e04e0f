"""The example reward, judge and tool do what their files say, run as a run would run them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.runtime.environment.judge import Judge
from meshwright.runtime.environment.samples import RewardSample, ToolCall
from meshwright.runtime.environment.worker import Worker

FUNCTIONS = Path(__file__).parents[3] / "examples" / "functions"


def sample(response: str, answer: str | None = None, num_tokens: int = 0) -> RewardSample:
    return RewardSample(
        id="0/0", prompt="what is one and two", response=response, response_ids=(1,) * num_tokens, answer=answer
    )


def test_the_reward_values_short_correct_answers_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FUNCTIONS))
    worker = Worker("brevity:short_and_right", timeout_seconds=20)
    try:
        scores = worker.score([sample("3", "3"), sample("it is 3", "3", 256), sample("4", "3"), sample("", "3")])
    finally:
        worker.close()
    assert scores == [1.0, 0.75, 0.0, 0.0]


def test_a_first_reward_is_the_share_of_vowels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FUNCTIONS))
    worker = Worker("vowels:share", timeout_seconds=20)
    try:
        assert worker.score([sample("Aeon"), sample("rhythm"), sample("")]) == [0.75, 0.0, 0.0]
    finally:
        worker.close()


def test_the_tool_answers_what_is_asked_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FUNCTIONS))
    calls = [
        ToolCall(id="0/0", prompt="p", response=sampled, turn=0, sampled=sampled)
        for sampled in ("<<Kenya>>", "<<France>> no, << japan >>", "<<Atlantis>>")
    ]
    worker = Worker("look_up:capital", timeout_seconds=20, kind="tool")
    try:
        assert worker.answers(calls) == ["Nairobi", "Tokyo", "not known"]
    finally:
        worker.close()


def test_the_judge_answers_over_http() -> None:
    command = [sys.executable, str(FUNCTIONS / "judge.py"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        judge = Judge(server.stdout.readline().strip(), timeout_seconds=10)
        try:
            scores = judge.score([sample("one and two is three"), sample("nothing")])
        finally:
            server.terminate()
    assert scores == [pytest.approx(4 / 5), 0.0]
