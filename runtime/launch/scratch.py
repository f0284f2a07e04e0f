"""A directory for files that last as long as this process, and the removal of those that killed processes have left.

A process holds a lock in its directory, which the kernel gives back however the process ends: a directory whose lock is
free belongs to nobody.
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
"""Age of a directory of code under test, which nobody locks and which is used for seconds, when it is removed."""

_UNLOCKED = f"{_PREFIX}tests-"

_MOST_SOCKET_BYTES = 107
"""Most bytes of a socket's path on Linux (unix(7), sun_path without its end)."""

_SOCKET_IN_DIRECTORY = len(f"/{_PREFIX}12345678/listener-12345678")


@cache
def scratch() -> Path:
    """This process's directory, made at the first call; multiprocessing keeps its sockets there too, in place of a
    `pymp-*` of its own."""
    temporary = tempfile.gettempdir()
    parent = parent_of_scratch(temporary)
    for place in {parent, Path(temporary)}:
        remove_leftovers(place)
    unlocked = Path(tempfile.mkdtemp(prefix=_NEW, dir=parent))
    lock = os.open(unlocked / _LOCK, os.O_CREAT | os.O_RDWR)  # stays open as long as the process is there
    fcntl.flock(lock, fcntl.LOCK_EX)
    made = unlocked.rename(parent / unlocked.name.replace(_NEW, _PREFIX))  # now others may look whether it is locked
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    config = vars(process.current_process())["_config"]
    config.setdefault("tempdir", str(made))
    return made


def parent_of_scratch(temporary: str) -> Path:
    """The directory for temporary files, or /tmp where the path of a socket in it would be too long."""
    is_short = len(os.fsencode(temporary)) + _SOCKET_IN_DIRECTORY <= _MOST_SOCKET_BYTES
    return Path(temporary if is_short else "/tmp")


def remove_leftovers(parent: Path) -> None:
    """Removes the directories of this user's processes that were killed."""
    for found in parent.glob(f"{_PREFIX}*"):
        try:
            if found.is_dir() and found.stat().st_uid == os.getuid() and _is_left(found):
                shutil.rmtree(found, ignore_errors=True)
        except OSError:  # another process has removed it
            continue


def _is_left(directory: Path) -> bool:
    if not (directory / _LOCK).exists():
        age = time.time() - directory.stat().st_mtime
        return directory.name.startswith(_UNLOCKED) and age > _UNLOCKED_SECONDS
    with (directory / _LOCK).open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
