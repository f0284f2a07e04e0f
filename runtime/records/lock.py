"""The lock that allows one run at a time in a directory. The kernel releases it when the process ends."""

from __future__ import annotations

import fcntl
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from meshwright.profiles.errors import BadInput
from meshwright.profiles.values import require_file

_NAME = "run.lock"
_MAX_BYTES = 0

WAIT_SECONDS = 10.0
"""Time for a process that is ending to release the lock; it first frees its memory and that of its devices."""

_SILENT_SECONDS, _POLL_SECONDS = 1.0, 0.05


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of an existing directory. Raises BadInput if another process holds it and does not end soon.

    In a run only rank 0 holds it.
    """
    with (directory / _NAME).open("a") as file:
        _lock(file, directory, fcntl.LOCK_EX, WAIT_SECONDS)
        yield


def require_unlocked(directory: Path, seconds: float | None = None) -> None:
    """Raises BadInput if a process holds the lock for longer than `seconds` (default `WAIT_SECONDS`).

    Several processes may ask at once.
    """
    if (directory / _NAME).exists():
        require_file(directory / _NAME, "the lock of a run", _MAX_BYTES)
        with (directory / _NAME).open() as file:
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
