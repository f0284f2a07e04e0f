"""The memory that planning may take: a share of what is free when it begins, so that it never takes it all."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import psutil

from meshwright.profiles.errors import Infeasible

_SHARE = 0.75
"""Of the memory that is free: the rest is for what else begins meanwhile."""
_SECONDS = 0.25
"""Of computing between two looks."""


@contextmanager
def within_memory(most_bytes: float | None = None) -> Iterator[None]:
    """Raises Infeasible inside as soon as this process and its children take more than `most_bytes`, by default three
    quarters of what is available now. Of the main thread."""
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
    """Resident in this process and its children."""
    this = psutil.Process()
    total = 0
    for process in (this, *this.children(recursive=True)):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total
