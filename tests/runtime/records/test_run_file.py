"""What a run was asked is kept beside what it wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.planner.job.job import read_job
from meshwright.profiles.errors import BadInput
from meshwright.runtime.records.run_directory import RunFile, read_run_file, write_run_file
from tests.runtime.small_job import write_job


def test_what_a_run_was_asked_is_read_as_it_was_written(tmp_path: Path) -> None:
    asked = RunFile(job=read_job(write_job(tmp_path, num_ranks=2)), directory=str(tmp_path), prompts="digest")
    write_run_file(tmp_path / "run", asked)
    assert read_run_file(tmp_path / "run") == asked


def test_a_directory_without_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"run\.json, .* does not exist; name the directory of a run"):
        read_run_file(tmp_path)
