"""The status of a run."""

from __future__ import annotations

from pathlib import Path

from meshwright.runtime.api.given import Pathname
from meshwright.runtime.records.run_standing import RunStatus, StatusReader


def watch(directory: Pathname) -> RunStatus:
    """The status of the run in a directory, from the files that it writes; the run itself is not contacted.

    Raises BadInput for a directory that holds no run.
    """
    return StatusReader(Path(directory)).read()
