"""One run at a time in a directory. The lock is the kernel's: it goes when the process that holds it does."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from meshwright.profiles.errors import BadInput
from meshwright.profiles.values import require_file

_NAME = "run.lock"
_MOST_BYTES = 0


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Holds the directory, which exists. Raises BadInput where another process holds it.

    Of a run on several ranks and nodes the first rank holds it.
    """
    with (directory / _NAME).open("a") as file:
        _lock(file, directory, fcntl.LOCK_EX)
        yield


def require_free(directory: Path) -> None:
    """Raises BadInput where a process holds the directory; several may ask at once."""
    if (directory / _NAME).exists():
        require_file(directory / _NAME, "the lock of a run", _MOST_BYTES)
        with (directory / _NAME).open() as file:
            _lock(file, directory, fcntl.LOCK_SH)


def is_held(directory: Path) -> bool:
    """Whether a process holds the directory."""
    try:
        require_free(directory)
    except BadInput:
        return True
    return False


def _lock(file: IO[str], directory: Path, kind: int) -> None:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BadInput(
            f"--out {directory} is in use by a run that has not ended; wait for it, or name another directory."
        ) from None
