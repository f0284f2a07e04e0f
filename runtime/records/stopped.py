"""What a run says that was asked to stop."""

from __future__ import annotations

from dataclasses import dataclass

STOPPED = 75
"""The exit code of a run that stopped because it was asked and goes on with --resume; EX_TEMPFAIL of sysexits(3)."""


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """A run that was asked to stop before its last step."""

    done: int
    """Updates behind which it stopped."""
    saved: int | None
    """Those of its newest checkpoint."""
