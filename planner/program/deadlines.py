"""How long an instruction of a run may take before something hangs, by the plan and by what the run has shown.

An instruction waits for ranks that may do anything else of a turn meanwhile, so what it may take is a multiple of a
whole turn: twenty times the one that the plan predicts and, once turns were measured, five times the longest of them.
It is never less than a minute, which leaves room for a busy machine and a turn of milliseconds, and before a turn was
measured ten minutes, for libraries connect their ranks and compile in the first one.
"""

from __future__ import annotations

from meshwright.planner.plan.plan import Plan

_LEAST_SECONDS, _LEAST_AT_FIRST_SECONDS = 60.0, 600.0
_OF_PREDICTED, _OF_MEASURED = 20.0, 5.0
_PATIENCE_OF_DEADLINE = 2.0


class Deadlines:
    """Of one rank."""

    def __init__(self, plan: Plan) -> None:
        self._predicted, self._measured = plan.period_seconds, 0.0

    def met(self, seconds: float) -> None:
        """A turn took this long."""
        self._measured = max(self._measured, seconds)

    def allowed_seconds(self) -> float:
        """What an instruction may take, its waiting for other ranks included."""
        if self._measured:
            return max(_LEAST_SECONDS, _OF_MEASURED * self._measured)
        return max(_LEAST_AT_FIRST_SECONDS, _OF_PREDICTED * self._predicted)


def patience_seconds(plan: Plan) -> float:
    """How long a collective of the plan waits for its ranks: beyond the deadline of any instruction as it is planned,
    which names what hangs, while a library can only say that it waited in vain."""
    return _PATIENCE_OF_DEADLINE * Deadlines(plan).allowed_seconds()
