"""Processes that end with the one that they work for, however that ended.

A process that is killed can tell nobody. The kernel ends its children, even one that is stopped or holds the
interpreter (`parent_death.py`); what it has not started itself looks whether it is still there. The helper of a helper
is given the first one's number, for its own parent may be a server that outlives both.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil

from meshwright.planner.search.parent_death import end_with_parent

_SECONDS_BETWEEN_LOOKS = 0.5
"""So that a process ends within a second, and looking costs nothing."""


def end_with(pid: int) -> None:
    """From now on this process ends at most a second after the process `pid` has, whatever it does then.

    Nothing is cleaned up: what ended the other one had no time for that either. A child has to be started by a thread
    that lives as long as it is needed.
    """
    if os.getppid() == pid:
        end_with_parent(pid)
    threading.Thread(target=_watch, args=(pid,), name=f"ends with process {pid}", daemon=True).start()


def _watch(pid: int) -> None:
    try:
        process = psutil.Process(pid)
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:  # knows a number that is used again
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    except psutil.NoSuchProcess:
        pass
    os.kill(os.getpid(), signal.SIGKILL)
