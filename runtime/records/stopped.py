"""What a run says that stops before its last step: because it was asked, or to go on under another plan."""

from __future__ import annotations

from dataclasses import dataclass

STOPPED = 75
"""The exit code of a run that stopped because it was asked and goes on with --resume; EX_TEMPFAIL of sysexits(3)."""

NEXT_PLAN = "next_plan.json"
"""In the directory of a run: the plan under which one goes on that has stopped for it."""


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """A run that has stopped before its last step."""

    done: int
    """Updates behind which it stopped."""
    saved: int | None
    """Those of its newest checkpoint."""
    goes_on: bool = False
    """Under the plan that it has left behind: nobody has asked it to stop."""
