"""The scratch directory of this process, and the removal of those that killed processes have left.

A process holds a lock in its directory, which the kernel releases however the process ends: a directory whose lock is
free has no owner.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
import time
from functools import cache
from multiprocessing import process
from pathlib import Path

_PREFIX, _NEW, _LOCK = "meshwright-", "new-meshwright-", "lock"

_UNLOCKED_SECONDS = 86_400.0
"""Age at which directories of the test suite, which have no lock and are used for seconds, are removed."""

_UNLOCKED = f"{_PREFIX}tests-"

_MAX_SOCKET_BYTES = 107
"""Longest path of a socket on Linux (unix(7), sun_path without its terminator)."""

_SOCKET_IN_DIRECTORY = len(f"/{_PREFIX}12345678/listener-12345678")


@cache
def scratch_directory() -> Path:
    """Return this process's directory, created at the first call.

    multiprocessing keeps its sockets there too, instead of in a `pymp-*` directory of its own.
    """
    temporary = tempfile.gettempdir()
    parent = scratch_parent(temporary)
    for directory in {parent, Path(temporary)}:
        remove_leftovers(directory)
    unlocked = Path(tempfile.mkdtemp(prefix=_NEW, dir=parent))
    lock = os.open(unlocked / _LOCK, os.O_CREAT | os.O_RDWR)  # stays open as long as the process lives
    fcntl.flock(lock, fcntl.LOCK_EX)
    locked = unlocked.rename(parent / unlocked.name.replace(_NEW, _PREFIX))  # now others may test its lock
    atexit.register(shutil.rmtree, locked, ignore_errors=True)
    config = vars(process.current_process())["_config"]
    config.setdefault("tempdir", str(locked))
    return locked


def scratch_parent(temporary: str) -> Path:
    """Return the directory for temporary files, or /tmp if the path of a socket in it would be too long."""
    is_short = len(os.fsencode(temporary)) + _SOCKET_IN_DIRECTORY <= _MAX_SOCKET_BYTES
    return Path(temporary if is_short else "/tmp")


def remove_leftovers(parent: Path) -> None:
    """Remove the directories of this user's processes that were killed."""
    for directory in parent.glob(f"{_PREFIX}*"):
        try:
            if directory.is_dir() and directory.stat().st_uid == os.getuid() and _is_abandoned(directory):
                shutil.rmtree(directory, ignore_errors=True)
        except OSError:  # another process has removed it
            continue


def _is_abandoned(directory: Path) -> bool:
    if not (directory / _LOCK).exists():
        age = time.time() - directory.stat().st_mtime
        return directory.name.startswith(_UNLOCKED) and age > _UNLOCKED_SECONDS
    with (directory / _LOCK).open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
