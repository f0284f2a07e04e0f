"""One run at a time in a directory. The lock is the kernel's: it goes when the process that holds it does."""

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
_MOST_BYTES = 0

WAIT_SECONDS = 10.0
"""For a process that is being ended to let go: its memory, and that of its devices, is given back first."""

_SILENT_SECONDS, _LOOK_SECONDS = 1.0, 0.05


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Holds the directory, which exists. Raises BadInput where another process holds it and does not end soon.

    Of a run on several ranks and nodes the first rank holds it.
    """
    with (directory / _NAME).open("a") as file:
        _lock(file, directory, fcntl.LOCK_EX, WAIT_SECONDS)
        yield


def require_free(directory: Path, seconds: float | None = None) -> None:
    """Raises BadInput where a process holds the directory and does not let go of it for so many seconds, by default
    those of a process that is being ended; several may ask at once."""
    if (directory / _NAME).exists():
        require_file(directory / _NAME, "the lock of a run", _MOST_BYTES)
        with (directory / _NAME).open() as file:
            _lock(file, directory, fcntl.LOCK_SH, WAIT_SECONDS if seconds is None else seconds)


def is_held(directory: Path) -> bool:
    """Whether a process holds the directory."""
    try:
        require_free(directory, seconds=0.0)
    except BadInput:
        return True
    return False


def _lock(file: IO[str], directory: Path, kind: int, seconds: float) -> None:
    start, has_told = time.monotonic(), False
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = time.monotonic() - start
            if waited >= seconds:
                raise BadInput(
                    f"--out {directory} is in use by a run that has not ended; wait for it, or name another directory."
                ) from None
            if waited >= _SILENT_SECONDS and not has_told:
                has_told = True
                sys.stderr.write(f"waiting for the run in {directory} to end, {seconds:.0f} s at most\n")
            time.sleep(_LOOK_SECONDS)
        else:
            return
