"""A process whose children end with it, whatever they do and whatever ended it: it runs nothing of theirs.

The keeper adopts what its children leave behind (PR_SET_CHILD_SUBREAPER, prctl(2)), and the kernel tells it by a signal
of the end of the process that it works for, as it tells it of theirs.
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
_ASKED = {signal.SIGTERM, signal.SIGCHLD}


def keep(parent: int) -> None:
    """Returns in a child of this process, which from now on keeps it: when the child or the `parent` of this process
    has ended, or SIGTERM asks for it, everything that descends from here is ended. To be called before there are
    threads."""
    sandbox.adopt()
    signal.pthread_sigmask(signal.SIG_BLOCK, _ASKED)
    end_with_parent(parent, signal.SIGTERM)
    keeper = os.getpid()
    child = os.fork()
    if not child:
        end_with_parent(keeper)
        # a rank holds signals back, and what the function starts would do so too and could not be ended by them
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        return
    code = 1
    for number in range(3):
        with suppress(OSError):
            os.close(number)
    while signal.sigwait(_ASKED) == signal.SIGCHLD:
        ended = _ended(child)
        if ended is not None:
            code = max(0, ended)
            break
    end_all(descendants)
    os._exit(code)


def _ended(child: int) -> int | None:
    """The exit code of the child; None while it runs. Others that were adopted are taken leave of."""
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == child:
                return os.waitstatus_to_exitcode(found[1])
    return None


def descendants() -> list[int]:
    """All processes that this one has started, and theirs."""
    found, waiting = [], [os.getpid()]
    while waiting:
        children = list(_children(waiting.pop()))
        found += children
        waiting += children
    return found


def _children(process: int) -> Iterator[int]:
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            yield from map(int, Path(f"/proc/{process}/task/{thread}/children").read_text().split())


def end_all(found: Callable[[], list[int]]) -> None:
    """Kills until there is nothing left, for code may start processes meanwhile."""
    until = time.monotonic() + _END_SECONDS
    while (processes := found()) and time.monotonic() < until:
        for process in processes:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.001)
