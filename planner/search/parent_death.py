"""Lets the kernel end a process when its parent has ended, even if the process is busy, stopped or stuck."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int | None = None, by: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel send this process `by` (SIGKILL by default) when the thread that started it ends.

    See prctl(2), PR_SET_PDEATHSIG. If `parent` is given, a process whose parent ended before this call ends at once;
    pass None if the parent is in another namespace, where it has no process id here. Raises OSError if the kernel
    refuses the call.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(by), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), by)
