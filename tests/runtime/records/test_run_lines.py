"""The lines of a run: those that were cut short are none, and others that are wrong are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.profiles.errors import BadInput
from meshwright.runtime.records.run_lines import append_line, completed_steps, elapsed_seconds, observations, read_lines


def test_a_line_that_was_cut_short_is_dropped_and_another_that_is_wrong_is_told(tmp_path: Path) -> None:
    (tmp_path / "evaluations.jsonl").write_text("")
    (tmp_path / "trace.jsonl").write_text('{"step": 0, "end_seconds": 2.5}\n{"step": 1, "end_sec')
    assert elapsed_seconds(tmp_path) == 2.5
    for wrong in ("[1]", "{}", "{", '{"step": "x"}', "[" * 100_000):
        (tmp_path / "metrics.jsonl").write_text(f'{{"step": 0, "seconds": 1.0}}\n{wrong}\n{{"step": 1}}\n')
        with pytest.raises(BadInput, match=r"metrics\.jsonl line 2 is not a line of a run"):
            observations(tmp_path, 9)


def test_metrics_stay_one_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in range(3):
        append_line(path, {"step": step})
    assert read_lines(path, lambda line: line["step"]) == [0, 1, 2]
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_has_ended_when_its_summary_says_so(tmp_path: Path) -> None:
    assert completed_steps(tmp_path) is None
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 4}))
    assert completed_steps(tmp_path) == 4
