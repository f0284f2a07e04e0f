"""The result of a run that stops before its last step, on request or to continue under another plan."""

from __future__ import annotations

from dataclasses import dataclass

STOPPED = 75
"""Exit code of a run that stopped on request and continues with --resume; EX_TEMPFAIL of sysexits(3)."""

NEXT_PLAN = "next_plan.json"
"""File in the directory of a run with the plan for which it has stopped, and under which it continues."""


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """A run that has stopped before its last step."""

    done: int
    """Number of updates after which it stopped."""
    saved: int | None
    """Number of updates in its newest checkpoint."""
    continues: bool = False
    """True if it stopped by itself, to continue under the plan in `NEXT_PLAN`."""
