"""A worker process says that it is ready, or why not, and then answers line by line."""

from __future__ import annotations

import io
import json

import pytest

from meshwright.runtime.environment.worker_process import serve
from tests.runtime.environment.samples import MODULE, sample


def answers(function: str, *batches: list[str]) -> list[dict[str, object]]:
    lines = (json.dumps([sample(response).message for response in batch]) for batch in batches)
    found = io.StringIO()
    serve(function, io.StringIO("\n".join(lines)), found)
    return [json.loads(line) for line in found.getvalue().splitlines()]


def test_every_batch_has_its_scores(capsys: pytest.CaptureFixture[str]) -> None:
    assert answers(f"{MODULE}:length", ["a", "bb"], ["ccc"]) == [{"answers": []}, {"answers": [1, 2]}, {"answers": [3]}]
    assert "scored 2" in capsys.readouterr().out


def test_an_exception_is_the_answer_to_its_batch_alone() -> None:
    _, one, other = answers(f"{MODULE}:fussy", ["raise"], ["well"])
    assert one == {"error": "ValueError: no such word"}
    assert other == {"answers": [1.0]}


def test_too_few_scores_are_an_error() -> None:
    assert answers(f"{MODULE}:fussy", ["few"])[1] == {"error": "ValueError: 0 scores for 1 samples"}


def test_a_function_that_is_not_there_is_told_first() -> None:
    (only,) = answers("no_such_module:score", ["a"])
    assert "cannot be loaded" in str(only["error"])
