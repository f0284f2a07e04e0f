"""A run is watched from Python as from the command line."""

from __future__ import annotations

from pathlib import Path

from meshwright import api
from tests.planner.plans import random_plan
from tests.runtime.records.written_run import write_run


def test_a_directory_is_told_as_it_stands(tmp_path: Path) -> None:
    write_run(random_plan(2), tmp_path, steps=3)
    found = api.watch(str(tmp_path))
    assert isinstance(found, api.RunStatus)
    assert (found.updates, found.directory) == (3, str(tmp_path))
