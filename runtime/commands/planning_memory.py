"""The memory limit of planning: a share of the memory that is free when it starts."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import psutil

from meshwright.profiles.errors import Infeasible

_SHARE = 0.75
"""Share of the free memory; the rest is for other programs."""
_SECONDS = 0.25
"""Seconds of processor time between two checks."""


@contextmanager
def within_memory(most_bytes: float | None = None) -> Iterator[None]:
    """Raises Infeasible in the block once this process and its children take more than `most_bytes`.

    The default is three quarters of the memory that is available now. Call it in the main thread.
    """
    most = _SHARE * psutil.virtual_memory().available if most_bytes is None else most_bytes

    def look(_signal: int, _frame: FrameType | None) -> None:
        if _bytes_taken() > most:
            raise Infeasible(
                f"no plan was found within {most / 2**30:.1f} GiB, a share of this machine's free memory; plan on a "
                "larger machine, or for fewer ranks or a smaller batch."
            )

    before = signal.signal(signal.SIGVTALRM, look)
    signal.setitimer(signal.ITIMER_VIRTUAL, _SECONDS, _SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def _bytes_taken() -> int:
    """Resident bytes of this process and its children."""
    this = psutil.Process()
    total = 0
    for process in (this, *this.children(recursive=True)):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total
