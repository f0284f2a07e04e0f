"""Lengths are read from the rollouts of any trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.planner.analysis.observed_lengths import parse_fields, read_lengths
from meshwright.profiles.errors import BadInput
from tests.planner.trainers.test_agent_traces import written


def test_a_line_without_a_list_is_a_prompt_and_a_response(tmp_path: Path) -> None:
    lines = [{"prompt_tokens": 4, "response_tokens": 10}, {"prompt_tokens": 6, "response_tokens": 30.0}]
    found = read_lengths(written(tmp_path / "t.jsonl", *lines), {})
    assert found.prompt.resolve().tokens == (4, 6)
    assert found.response.resolve().mean == 20.0
    assert found.response.max == 30
    assert found.turns is None


def test_keys_may_have_other_names_and_lie_within_others(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", {"usage": {"in": 3, "out": 7}})
    found = read_lengths(path, parse_fields(["prompt=usage.in", "response=usage.out"]))
    assert (found.prompt.resolve().mean, found.response.resolve().mean) == (3.0, 7.0)


def test_lists_are_of_turns_their_answers_and_their_latencies(tmp_path: Path) -> None:
    several = {
        "prompt_tokens": 5,
        "response_tokens": [10, 20],
        "result_tokens": [7],
        "latency_seconds": [1.5],
    }
    found = read_lengths(written(tmp_path / "t.jsonl", several, {"prompt_tokens": 5, "response_tokens": [30]}), {})
    assert found.turns is not None
    assert found.turns.mean_calls == 0.5
    assert found.turns.result.resolve().tokens == (7,)
    assert found.turns.latency_seconds.resolve().mean == 1.5
    assert found.turns.max_tokens == 37
    assert found.response.resolve().mean == 20.0


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ([], "line 1 is not an object"),
        ({"prompt_tokens": 4}, r"has no 'response_tokens'; name the key that has it with --trace-field response=KEY\."),
        ({"prompt_tokens": [4], "response_tokens": 1}, "'prompt_tokens' is neither a number of 0 or more nor a list"),
        ({"prompt_tokens": 4, "response_tokens": "many"}, "'response_tokens' is neither a number"),
        ({"prompt_tokens": 4, "response_tokens": []}, "'response_tokens' is neither a number"),
        ({"prompt_tokens": 4, "response_tokens": True}, "'response_tokens' is neither a number"),
        ({"prompt_tokens": 4, "response_tokens": 0}, "response_tokens has 0, which is not a number of tokens"),
        ({"prompt_tokens": 4, "response_tokens": 1.5}, r"response_tokens has 1\.5, which is not a number of tokens"),
    ],
)
def test_a_line_that_does_not_tell_its_lengths_is_named(line: object, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=sentence):
        read_lengths(written(tmp_path / "t.jsonl", line), {})


def test_a_file_without_rollouts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="has no rollouts; give a line of JSON for each"):
        read_lengths(written(tmp_path / "t.jsonl"), {})


@pytest.mark.parametrize("text", ["response", "response=", "answer=n"])
def test_a_key_is_named_by_what_it_has(text: str) -> None:
    with pytest.raises(BadInput, match=f"--trace-field '{text}'"):
        parse_fields([text])


def test_a_run_has_keys_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is the directory of a run, whose trace has its own keys"):
        read_lengths(tmp_path, {"response": "n"})
