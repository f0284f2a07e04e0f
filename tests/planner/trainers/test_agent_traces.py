"""Rollouts of agents, as chat messages, become the workload of a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.planner.analysis.observed_lengths import read_agent_trace
from meshwright.profiles.documents import parse
from meshwright.profiles.errors import BadInput
from meshwright.profiles.workload import Workload

ROLLOUT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "what is 2 + 3 ?"},
    {"role": "assistant", "content": "I ask", "timestamp": 10.0},
    {"role": "tool", "content": "it is 5", "timestamp": 12.5},
    {"role": "assistant", "content": "five", "timestamp": 13},
]


def words(text: str) -> int:
    return len(text.split())


def written(path: Path, *rollouts: Any) -> Path:
    path.write_text("".join(json.dumps(rollout) + "\n" for rollout in rollouts))
    return path


def test_what_stands_before_between_and_in_turns_is_counted(tmp_path: Path) -> None:
    found = read_agent_trace(written(tmp_path / "t.jsonl", {"messages": ROLLOUT}), words)
    assert (found.prompt_tokens, found.num_turns, found.turn_tokens, found.tool_tokens) == ((8,), (2,), (2, 1), (3,))
    assert found.latency_seconds == (2.5,)
    assert found.max_tokens == 6


@pytest.mark.parametrize("key", ["messages", "trajectory", "history"])
def test_a_workload_of_it_can_be_planned(tmp_path: Path, key: str) -> None:
    short = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, {"role": "assistant", "content": "hello"}]
    found = read_agent_trace(written(tmp_path / "t.jsonl", {key: ROLLOUT}, {key: short}), words).workload()
    workload = parse(Workload, json.dumps({"batch_size": 8, **found}), "workload")
    assert workload.turns is not None
    assert workload.turns.mean_calls == pytest.approx(0.5)
    assert workload.turns.latency_seconds.resolve().mean == 2.5
    assert workload.prompt_lengths.maximum == 8


def test_the_time_of_a_tool_may_be_written_as_a_date(tmp_path: Path) -> None:
    dated = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": 1}], "timestamp": "2026-01-01T00:00:00+00:00"},
        {"role": "tool", "content": "ok", "timestamp": "2026-01-01T00:01:00Z"},
        {"role": "assistant", "content": "done"},
    ]
    assert read_agent_trace(written(tmp_path / "t.jsonl", {"messages": dated}), words).latency_seconds == (60.0,)


def test_an_answer_of_several_messages_has_taken_until_the_last_of_them(tmp_path: Path) -> None:
    spoken = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "look", "timestamp": 10.0},
        {"role": "tool", "content": "one", "timestamp": 11.0},
        {"role": "tool", "content": "two", "timestamp": 14.0},
        {"role": "assistant", "content": "done", "timestamp": 15.0},
        {"role": "user", "content": "thanks", "timestamp": 99.0},
    ]
    found = read_agent_trace(written(tmp_path / "t.jsonl", {"messages": spoken}), words)
    assert (found.latency_seconds, found.tool_tokens) == ((4.0,), (2,))


def test_many_numbers_are_told_by_the_means_of_their_parts(tmp_path: Path) -> None:
    rollouts = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b " * length}]}
        for length in range(1, 1001)
    ]
    response = read_agent_trace(written(tmp_path / "t.jsonl", *rollouts), words).workload()["response"]
    assert len(response["histogram"]) == 64
    assert response["max"] == 1000


@pytest.mark.parametrize(
    ("rollouts", "told"),
    [
        ([], "has no rollouts"),
        ([{"messages": ROLLOUT}, {"text": "a"}], "line 2 is not a rollout"),
        ([{"messages": ROLLOUT[:2]}], "line 1 has no message of an assistant"),
        ([{"messages": [{"content": "a"}]}], "line 1 is not a rollout"),
        ([[1]], "line 1 is not a rollout"),
    ],
)
def test_what_is_no_rollout_is_refused_with_its_line(tmp_path: Path, rollouts: list[Any], told: str) -> None:
    with pytest.raises(BadInput, match=told):
        read_agent_trace(written(tmp_path / "t.jsonl", *rollouts), words)
