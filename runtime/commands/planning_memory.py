"""The memory limit of planning: a share of the memory that is free when it starts."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import psutil

from meshwright.profiles.errors import Infeasible

_MEMORY_SHARE = 0.75
"""Share of the free memory; the rest is for other programs."""
_CHECK_SECONDS = 0.25
"""Seconds of processor time between two checks."""


@contextmanager
def limit_memory(max_bytes: float | None = None) -> Iterator[None]:
    """Raises Infeasible in the block once this process and its children take more than `most_bytes`.

    The default is three quarters of the memory that is available now. Call it in the main thread.
    """
    limit_bytes = _MEMORY_SHARE * psutil.virtual_memory().available if max_bytes is None else max_bytes

    def check(_signal: int, _frame: FrameType | None) -> None:
        if _resident_bytes() > limit_bytes:
            raise Infeasible(
                f"no plan was found within {limit_bytes / 2**30:.1f} GiB, a share of this machine's free memory; plan "
                "on a larger machine, or for fewer ranks or a smaller batch."
            )

    old_handler = signal.signal(signal.SIGVTALRM, check)
    signal.setitimer(signal.ITIMER_VIRTUAL, _CHECK_SECONDS, _CHECK_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, old_handler)


def _resident_bytes() -> int:
    """Resident bytes of this process and its children."""
    own_process = psutil.Process()
    total = 0
    for process in (own_process, *own_process.children(recursive=True)):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total
