"""How long an instruction of a run may take before something hangs, by the plan and by what the run has shown.

An instruction waits for ranks that may do anything else of a turn meanwhile, so what it may take is a multiple of a
whole turn: twenty times the one that the plan predicts and, once turns were measured, five times the longest of them.
It is never less than a minute, which leaves room for a busy machine and a turn of milliseconds, and before a turn was
measured ten minutes, for libraries connect their ranks and compile in the first one. A judge may be away for as long as
the job has it asked again. A rank that waits for what dynamic sampling draws may wait for as many waves as a step may
take.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.planner.environment.rewards import Reward
from meshwright.planner.plan.plan import Plan

LEAST_SECONDS, _LEAST_AT_FIRST_SECONDS = 60.0, 600.0
_OF_PREDICTED, _OF_MEASURED = 20.0, 5.0
_PATIENCE_OF_DEADLINE = 2.0


class Deadlines:
    """Of one rank."""

    def __init__(self, plan: Plan, away_seconds: float = 0.0) -> None:
        """`away_seconds` may pass besides."""
        self._away = away_seconds
        self._predicted, self._measured = plan.period_seconds, 0.0

    def met(self, seconds: float) -> None:
        """A turn took this long."""
        self._measured = max(self._measured, seconds)

    def allowed_seconds(self) -> float:
        """What an instruction may take, its waiting for other ranks included."""
        if self._measured:
            return self._away + max(LEAST_SECONDS, _OF_MEASURED * self._measured)
        return self._away + max(_LEAST_AT_FIRST_SECONDS, _OF_PREDICTED * self._predicted)


def away_seconds(rewards: Sequence[Reward]) -> float:
    """For which rewards on hosts may keep a run waiting before they are given up."""
    return max((one.timeout_seconds + (one.retry_seconds if one.url else 0.0) for one in rewards), default=0.0)


def patience_seconds(plan: Plan, away: float = 0.0) -> float:
    """How long a collective of the plan waits for its ranks: beyond the deadline of any instruction as it is planned,
    which names what hangs, while a library can only say that it waited in vain."""
    return _PATIENCE_OF_DEADLINE * Deadlines(plan, away).allowed_seconds() * waves_beyond(plan)


def waves_beyond(plan: Plan) -> float:
    """How many times the expected waves of a step it may take; 1 without dynamic sampling."""
    workload = plan.facts.workload
    if not (sampling := workload.dynamic_sampling):
        return 1.0
    return sampling.most_waves(workload.num_prompts) / sampling.expected_waves(workload.num_prompts)
