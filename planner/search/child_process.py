"""Ends helper processes when the process that they work for ends, however that happens.

A killed process cannot notify its helpers. The kernel ends its direct children, even one that is stopped or holds the
interpreter lock (`parent_death.py`). Other helpers poll whether the process still exists. The helper of a helper is
given the id of the first process, because its own parent may be a server that outlives both.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil

from meshwright.planner.search.parent_death import end_with_parent

_POLL_SECONDS = 0.5
"""Polling interval: short enough that a process ends within a second, long enough to cost nothing."""


def end_with_process(pid: int) -> None:
    """Make this process end at most a second after the process `pid` has ended.

    Nothing is cleaned up, because whatever ended the other process left no time for that either. A child has to be
    started by a thread that lives as long as the child is needed.
    """
    if os.getppid() == pid:
        end_with_parent(pid)
    threading.Thread(target=_watch, args=(pid,), name=f"ends with process {pid}", daemon=True).start()


def _watch(pid: int) -> None:
    try:
        process = psutil.Process(pid)
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:  # psutil detects a reused process id
            time.sleep(_POLL_SECONDS)
    except psutil.NoSuchProcess:
        pass
    os.kill(os.getpid(), signal.SIGKILL)
