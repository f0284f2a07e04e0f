"""Processes that a test has started, and those that these have started."""

from __future__ import annotations

import time

import psutil


def at_work(first: psutil.Process, number: int, seconds: float = 60.0) -> list[psutil.Process]:
    """All processes below this one, as soon as there are so many."""
    deadline = time.monotonic() + seconds
    while len(found := first.children(recursive=True)) < number:
        assert first.is_running()
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found
