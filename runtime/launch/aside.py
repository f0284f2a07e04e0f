"""Calls that block in a library: made in another thread, so that whoever waits for them hears signals meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_LOOK_SECONDS = 0.1
"""Python runs what a signal asks for only between two of its own instructions."""


def aside(call: Callable[[], T], seconds: float | None = None) -> T:
    """What the call returns or raises. Raises TimeoutError when it takes longer than so many seconds, and is then left
    to itself, as it is when a signal ends the wait."""
    returned: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(call())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="aside", daemon=True)
    thread.start()
    until = None if seconds is None else time.monotonic() + seconds
    while thread.is_alive():
        thread.join(_LOOK_SECONDS)
        if until is not None and time.monotonic() > until and thread.is_alive():
            raise TimeoutError(f"no answer within {seconds:g} s")
    if raised:
        raise raised[0]
    return returned[0]
