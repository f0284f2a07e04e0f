"""A run as it stands."""

from __future__ import annotations

from pathlib import Path

from meshwright.runtime.api.given import Pathname
from meshwright.runtime.records.run_standing import RunStanding, Watching


def watch(directory: Pathname) -> RunStanding:
    """Where the run in a directory stands, from the files that it writes; nothing is asked of the run.

    Raises BadInput for a directory that holds no run.
    """
    return Watching(Path(directory)).look()
