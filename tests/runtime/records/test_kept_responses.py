"""Responses that a run keeps are read as they were written, the last of them, and none twice behind a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.profiles.errors import BadInput
from meshwright.runtime.records.kept_responses import SAMPLES, KeptResponse, drop_samples, last_samples, write_samples


def sample(step: int, row: int = 0) -> KeptResponse:
    return KeptResponse(
        step=step, row=row, prompt="1 + 1 =", response=" 2\n\x1b", score=0.5, response_tokens=2, truncated=False
    )


def test_the_last_samples_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert last_samples(tmp_path, 4) == ()
    for step in range(0, 30, 10):
        write_samples(tmp_path, [sample(step, row) for row in range(2)])
    assert last_samples(tmp_path, 3) == (sample(10, 1), sample(20, 0), sample(20, 1))


def test_a_resume_drops_samples_of_steps_that_run_again(tmp_path: Path) -> None:
    write_samples(tmp_path, [sample(step) for step in (0, 10, 20)])
    drop_samples(tmp_path, 15)
    assert [one.step for one in last_samples(tmp_path, 9)] == [0, 10]


def test_a_line_that_is_no_sample_is_named(tmp_path: Path) -> None:
    (tmp_path / SAMPLES).write_text('{"step": 1}\n')
    with pytest.raises(BadInput, match=r"samples\.jsonl line 1 is not a line of a run"):
        last_samples(tmp_path, 9)
