"""Ctrl-C and SIGTERM while a plan is searched: the first asks the search to stop with what it has, the next ends it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPPED = 75
"""What ends with what it has, because it was asked: EX_TEMPFAIL of sysexits.h."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_AGAIN_SECONDS = 1.0
"""A signal that comes sooner after the first is the same wish: timeout(1) sends each twice."""


@contextmanager
def asked_to_stop() -> Iterator[threading.Event]:
    """Is set when the user asks. Raises KeyboardInterrupt inside when that was a while ago. Of the main thread."""
    stop, first = threading.Event(), time.monotonic()

    def ask(_signal: int, _frame: FrameType | None) -> None:
        nonlocal first
        if not stop.is_set():
            first = time.monotonic()
            stop.set()
        elif time.monotonic() - first > _AGAIN_SECONDS:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, ask) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
