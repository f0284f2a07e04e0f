"""Blocking library calls in a separate thread, so that the waiting main thread still handles signals."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_POLL_SECONDS = 0.1
"""Python runs signal handlers only between two bytecode instructions, so the wait is cut into pieces."""


def call_in_thread(call: Callable[[], T], seconds: float | None = None) -> T:
    """Return or raise what `call` does, made in another thread.

    Raises TimeoutError if it takes longer than `seconds`; the thread then continues, as it does when a signal ends the
    wait.
    """
    returned: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(call())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="aside", daemon=True)
    thread.start()
    deadline = None if seconds is None else time.monotonic() + seconds
    while thread.is_alive():
        thread.join(_POLL_SECONDS)
        if deadline is not None and time.monotonic() > deadline and thread.is_alive():
            raise TimeoutError(f"no answer within {seconds:g} s")
    if raised:
        raise raised[0]
    return returned[0]
