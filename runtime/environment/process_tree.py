"""A keeper process that ends a child and all of its descendants when the child or the parent ends.

The keeper runs no code of the child. It adopts orphaned descendants (PR_SET_CHILD_SUBREAPER, prctl(2)), and the kernel
sends it a signal when its parent or one of its children ends.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from meshwright.planner.search.parent_death import end_with_parent
from meshwright.runtime.environment import sandbox

_END_SECONDS = 2.0
_SIGNALS = {signal.SIGTERM, signal.SIGCHLD}


def fork_under_keeper(parent: int) -> None:
    """Fork and return in the child; this process becomes its keeper.

    When the child or `parent`, the parent of this process, has ended, or on SIGTERM, the keeper ends all descendants.
    Call it before any threads are started.
    """
    sandbox.become_subreaper()
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    end_with_parent(parent, signal.SIGTERM)
    keeper = os.getpid()
    child = os.fork()
    if not child:
        end_with_parent(keeper)
        # a rank blocks signals; processes that the function starts would inherit that and could not be ended by signals
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        return
    code = 1
    for number in range(3):
        with suppress(OSError):
            os.close(number)
    while signal.sigwait(_SIGNALS) == signal.SIGCHLD:
        exit_code = _child_exit_code(child)
        if exit_code is not None:
            code = max(0, exit_code)
            break
    kill_all(descendants)
    os._exit(code)


def _child_exit_code(child: int) -> int | None:
    """Return the exit code of the child, None while it runs; adopted processes that have ended are reaped."""
    with suppress(ChildProcessError):
        while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
            if reaped[0] == child:
                return os.waitstatus_to_exitcode(reaped[1])
    return None


def descendants() -> list[int]:
    """Return the ids of all descendants of this process."""
    ids, waiting = [], [os.getpid()]
    while waiting:
        children = list(_children(waiting.pop()))
        ids += children
        waiting += children
    return ids


def _children(process: int) -> Iterator[int]:
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            yield from map(int, Path(f"/proc/{process}/task/{thread}/children").read_text().split())


def kill_all(list_processes: Callable[[], list[int]]) -> None:
    """Kill these processes until none is left, because they may start others meanwhile."""
    deadline = time.monotonic() + _END_SECONDS
    while (processes := list_processes()) and time.monotonic() < deadline:
        for process in processes:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.001)
