"""How far stages may work ahead of the training, and how stale what they write then becomes.

In turn n a stage that is a steps ahead works on step n + a. When the turn begins, the actor has seen n updates; what is
generated then is used by update n + a. A sequence that stays in flight for more turns is older by as many.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from meshwright.cost_models.streaming_cost import STREAMING_STAGES
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import STAGE_BY_NAME, STAGES, TRAIN_STAGE

StepsAhead: TypeAlias = Mapping[str, int]
"""Of every stage by its name: the steps by which it works ahead of the training."""

GENERATE = "actor_generate"

_SCORED_AHEAD = ("reward_score", "ref_logprob")
"""Stages whose weights are never trained: what they write of a step does not depend on when they run."""


SYNCHRONOUS: StepsAhead = dict.fromkeys((stage.name for stage in STAGES), 0)
"""No stage works ahead."""


ScopeKey: TypeAlias = tuple[bool, bool, int, bool]
"""What of a scope the choices of one stage depend on."""


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What a search covers beside layouts and pools: how far stages work ahead, whether state is offloaded, and whether
    sequences run on from turn to turn."""

    ahead: StepsAhead
    offload: bool = False
    runs_on: bool = False

    def streams(self, stage: str) -> bool:
        """Whether the stage could read responses while they are generated: if it works on the same step.

        The critic learns between the chunks of a sequence that runs on, so it then waits for whole ones.
        """
        is_trained = STAGE_BY_NAME[stage].role in TRAIN_STAGE
        same_step = self.ahead[stage] == self.ahead[GENERATE]
        return stage in STREAMING_STAGES and same_step and not (is_trained and self.runs_on)

    def of(self, stage: str) -> ScopeKey:
        """What of the scope the choices of a stage depend on: scopes that agree in it offer the stage the same."""
        generates = stage == GENERATE
        return self.offload, self.streams(stage), self.ahead[GENERATE] * generates, self.runs_on and generates


PLAIN = Scope(ahead=SYNCHRONOUS)
"""Synchronous, with nothing offloaded."""


def patterns(staleness: int) -> tuple[StepsAhead, ...]:
    """The patterns that a bound on the staleness allows, the synchronous one first.

    Values and proximal log-probabilities are those of the models just before the update, so their stages never work
    ahead. With generation two steps ahead, untrained stages are one step ahead, and no stage waits for another in its
    turn but the training for these.
    """
    found = [SYNCHRONOUS]
    if staleness >= 1:
        found.append(_ahead(generate=1, scored=0))
    if staleness >= 2:
        found.append(_ahead(generate=2, scored=1))
    return tuple(found)


def scopes(ahead: StepsAhead, staleness: int) -> tuple[Scope, ...]:
    """All that a bound on the staleness allows under this pattern, offload included."""
    whole, running = Scope(ahead=ahead, offload=True), Scope(ahead=ahead, offload=True, runs_on=True)
    if max_deferral(ahead, staleness) == 0:
        return (whole,)
    return (whole, running) if ahead[GENERATE] == 0 else (running,)


def max_deferral(ahead: StepsAhead, bound: int) -> int:
    """Turns beyond its first that a sequence may be in flight under a bound on the staleness."""
    return bound - ahead[GENERATE]


def staleness_of(steps_ahead: int, schedule: Schedule, bound: int) -> int:
    """Most updates between drawing a token and its use, for a generation so many steps ahead, under its schedule."""
    return bound if schedule.overcommit else steps_ahead + schedule.batches_in_flight - 1


def steps_ahead_violations(ahead: StepsAhead) -> tuple[str, ...]:
    """Rules that a pattern breaks on its own; that steps ahead never rise along an edge is checked edge by edge."""
    may_work_ahead = (GENERATE, *_SCORED_AHEAD)
    return tuple(
        f"{stage}: steps_ahead={steps_ahead}, and only {', '.join(may_work_ahead)} may work ahead; use 0."
        for stage, steps_ahead in ahead.items()
        if steps_ahead and stage not in may_work_ahead
    )


def _ahead(*, generate: int, scored: int) -> StepsAhead:
    return {**SYNCHRONOUS, GENERATE: generate, **dict.fromkeys(_SCORED_AHEAD, scored)}
