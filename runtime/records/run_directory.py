"""The directory of a run: the lock that allows one run at a time in it, and the run file with the job.

The kernel releases the lock when the process ends. `run --resume` and `export` read the run file.
"""

from __future__ import annotations

import fcntl
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, ClassVar

from pydantic import Field

from meshwright.planner.job.job import Job
from meshwright.profiles.documents import VersionedDocument, canonical_json, read_json, write_atomically
from meshwright.profiles.errors import BadInput
from meshwright.profiles.untrusted_text import require_file

_LOCK_FILE = "run.lock"
_MAX_BYTES = 0
"""Size limit of the lock file, which is always empty."""

WAIT_SECONDS = 10.0
"""Time for a process that is ending to release the lock; it first frees its memory and that of its devices."""

_SILENT_SECONDS, _POLL_SECONDS = 1.0, 0.05
"""Time until a message says that the lock is waited for, and time between two attempts to take it."""


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of an existing directory. Raises BadInput if another process holds it and does not end soon.

    In a run only rank 0 holds it.
    """
    with (directory / _LOCK_FILE).open("a") as file:
        _lock(file, directory, fcntl.LOCK_EX, WAIT_SECONDS)
        yield


def require_unlocked(directory: Path, seconds: float | None = None) -> None:
    """Raises BadInput if a process holds the lock for longer than `seconds` (default `WAIT_SECONDS`).

    Several processes may check at the same time.
    """
    if (directory / _LOCK_FILE).exists():
        require_file(directory / _LOCK_FILE, "the lock of a run", _MAX_BYTES)
        with (directory / _LOCK_FILE).open() as file:
            _lock(file, directory, fcntl.LOCK_SH, WAIT_SECONDS if seconds is None else seconds)


def is_locked(directory: Path) -> bool:
    """Return True if a process holds the lock of the directory."""
    try:
        require_unlocked(directory, seconds=0.0)
    except BadInput:
        return True
    return False


def _lock(file: IO[str], directory: Path, kind: int, seconds: float) -> None:
    start, has_printed = time.monotonic(), False
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = time.monotonic() - start
            if waited >= seconds:
                raise BadInput(
                    f"--out {directory} is in use by a run that has not ended; wait for it, or name another directory."
                ) from None
            if waited >= _SILENT_SECONDS and not has_printed:
                has_printed = True
                sys.stderr.write(f"waiting for the run in {directory} to end, {seconds:.0f} s at most\n")
            time.sleep(_POLL_SECONDS)
        else:
            return


RUN_FILE = "run.json"


class RunFile(VersionedDocument):
    """The job with which a run was last started or resumed; its plan is in `plan.json` beside it."""

    remedy: ClassVar[str] = "start a new run in another --out"

    job: Job
    directory: str = Field(description="where the job's relative paths start, absolute on the node of rank 0")
    prompts: str = Field(description="SHA-256 of the encoded training prompts")


def write_run_file(out: Path, run_file: RunFile) -> None:
    """Write the run file into the directory of a run."""
    write_atomically(out / RUN_FILE, canonical_json(run_file))


def read_run_file(out: Path) -> RunFile:
    """Read the run file of a directory. Raises BadInput if there is none."""
    path = out / RUN_FILE
    if not path.exists():
        raise BadInput(f"{path}, which holds the job of a run, does not exist; name the directory of a run.")
    return read_json(RunFile, path, "run")
