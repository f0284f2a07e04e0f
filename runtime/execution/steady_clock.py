"""The time of day as this process has known it since its start, whatever becomes of the machine's clock meanwhile."""

from __future__ import annotations

import time

_BEGAN = time.time() - time.monotonic()


def steady_now() -> float:
    """Seconds since 1970, which go on evenly where the clock is set forward or back."""
    return _BEGAN + time.monotonic()
