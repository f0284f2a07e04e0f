"""The kernel ends a process when its parent has ended, however busy, stopped or stuck that process is."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int | None = None, by: signal.Signals = signal.SIGKILL) -> None:
    """From now on the kernel kills this process when the thread that started it ends, or sends it another signal; see
    prctl(2), PR_SET_PDEATHSIG.

    With the number of the `parent`, a process whose parent ended before this call ends at once. It is None where the
    parent is in another namespace, and has no number here. Raises OSError where the kernel has no such call.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(by), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), by)
