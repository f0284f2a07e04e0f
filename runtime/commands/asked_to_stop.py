"""Ctrl-C and SIGTERM during a search: the first stops it with the best plan so far, the second ends the program."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPPED = 75
"""Exit code of a search or a run that stopped on request: EX_TEMPFAIL of sysexits.h."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_REPEAT_SECONDS = 1.0
"""A signal within this time after the first is the same request: timeout(1) sends each signal twice."""


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """Yield an event that the first signal sets; a later signal raises KeyboardInterrupt. Main thread only."""
    stop, first_signal = threading.Event(), time.monotonic()

    def handle_signal(_signal: int, _frame: FrameType | None) -> None:
        nonlocal first_signal
        if not stop.is_set():
            first_signal = time.monotonic()
            stop.set()
        elif time.monotonic() - first_signal > _REPEAT_SECONDS:
            raise KeyboardInterrupt

    old_handlers = {number: signal.signal(number, handle_signal) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
