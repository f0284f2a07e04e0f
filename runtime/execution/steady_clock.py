"""A wall clock that changes of the system clock during the process do not affect."""

from __future__ import annotations

import time

_BEGAN = time.time() - time.monotonic()


def steady_now() -> float:
    """Return seconds since 1970, evenly increasing even if the system clock is set forward or back."""
    return _BEGAN + time.monotonic()
