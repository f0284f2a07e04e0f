"""Processor time of the processes that this one has started, step by step: other work on the same cores does not count.

A step is a line of the file that a run writes; the time is looked at several times a second.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

_SECONDS = 0.1
"""Between two looks."""


class ProcessorTime:
    """Of a process's descendants, at the moments when a file has got another line."""

    def __init__(self, steps: Path, process: psutil.Process) -> None:
        self._steps, self._process = steps, process
        self._spent: dict[int, float] = {}
        self._at: dict[int, float] = {}

    def look(self) -> None:
        """Notes what was spent when the file has a line more than when it was last looked at."""
        with suppress(psutil.NoSuchProcess):
            for child in self._process.children(recursive=True):
                with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    times = child.cpu_times()
                    self._spent[child.pid] = times.user + times.system
        lines = self._steps.read_bytes().count(b"\n") if self._steps.exists() else 0
        self._at.setdefault(lines, sum(self._spent.values()))

    def seconds(self, first: int, last: int) -> float:
        """From when the file had `first` lines to when it had `last`; the nearest that were seen."""
        before = max((n for n in self._at if n <= first), default=min(self._at))
        behind = min((n for n in self._at if n >= last), default=max(self._at))
        return self._at[behind] - self._at[before]


@contextmanager
def watched(steps: Path) -> Iterator[ProcessorTime]:
    """What this process starts within is looked at until it is left."""
    found, ended = ProcessorTime(steps, psutil.Process()), threading.Event()

    def look() -> None:
        while not ended.wait(_SECONDS):
            found.look()

    watching = threading.Thread(target=look, daemon=True)
    watching.start()
    try:
        yield found
    finally:
        ended.set()
        watching.join()
        found.look()
