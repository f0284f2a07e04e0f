"""How far stages may work ahead of the training, and how stale what they write then becomes.

In turn n a stage with lead l works on step n + l. When the turn begins, the actor has seen n updates; what is generated
then is used by update n + l. A sequence that stays in flight for more turns is older by as many.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from meshwright.cost_models.streaming_cost import STREAMING_STAGES
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import STAGE_BY_NAME, STAGES, TRAIN_STAGE

Leads: TypeAlias = Mapping[str, int]
"""The lead of every stage by its name."""

GENERATE = "actor_generate"

_SCORED_AHEAD = ("reward_score", "ref_logprob")
"""Stages whose weights are never trained: what they write of a step does not depend on when they run."""


SYNCHRONOUS: Leads = dict.fromkeys((stage.name for stage in STAGES), 0)
"""No stage works ahead."""


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What a search covers beside layouts and pools: how far stages work ahead, whether state is offloaded, and whether
    sequences run on from turn to turn."""

    leads: Leads
    offload: bool = False
    runs_on: bool = False

    def streams(self, stage: str) -> bool:
        """Whether the stage could read responses while they are generated: if it works on the same step.

        The critic learns between the chunks of a sequence that runs on, so it then waits for whole ones.
        """
        is_trained = STAGE_BY_NAME[stage].role in TRAIN_STAGE
        same_step = self.leads[stage] == self.leads[GENERATE]
        return stage in STREAMING_STAGES and same_step and not (is_trained and self.runs_on)

    def of(self, stage: str) -> tuple[bool, bool, int, bool]:
        """What of the scope the choices of a stage depend on: scopes that agree in it offer the stage the same."""
        generates = stage == GENERATE
        return self.offload, self.streams(stage), self.leads[GENERATE] * generates, self.runs_on and generates


PLAIN = Scope(leads=SYNCHRONOUS)
"""Synchronous, with nothing offloaded."""


def patterns(staleness: int) -> tuple[Leads, ...]:
    """The leads that a bound on the staleness allows, the synchronous ones first.

    Values and proximal log-probabilities are those of the models just before the update, so their stages never lead.
    With generation two steps ahead, untrained stages are one step ahead, and no stage waits for another in its turn
    but the training for these.
    """
    found = [SYNCHRONOUS]
    if staleness >= 1:
        found.append(_leads(generate=1, scored=0))
    if staleness >= 2:
        found.append(_leads(generate=2, scored=1))
    return tuple(found)


def scopes(leads: Leads, staleness: int) -> tuple[Scope, ...]:
    """All that a bound on the staleness allows under these leads, offload included."""
    whole, running = Scope(leads=leads, offload=True), Scope(leads=leads, offload=True, runs_on=True)
    if max_deferral(leads, staleness) == 0:
        return (whole,)
    return (whole, running) if leads[GENERATE] == 0 else (running,)


def max_deferral(leads: Leads, bound: int) -> int:
    """Turns beyond its first that a sequence may be in flight under a bound on the staleness."""
    return bound - leads[GENERATE]


def staleness_of(lead: int, schedule: Schedule, bound: int) -> int:
    """Most updates between drawing a token and its use, for a generation of this lead and schedule."""
    return bound if schedule.overcommit else lead + schedule.batches_in_flight - 1


def lead_violations(leads: Leads) -> tuple[str, ...]:
    """Rules that leads break on their own; that they never rise along an edge is checked edge by edge."""
    may_lead = (GENERATE, *_SCORED_AHEAD)
    return tuple(
        f"{stage}: lead={lead}, and only {', '.join(may_lead)} may work ahead; use 0."
        for stage, lead in leads.items()
        if lead and stage not in may_lead
    )


def _leads(*, generate: int, scored: int) -> Leads:
    return {**SYNCHRONOUS, GENERATE: generate, **dict.fromkeys(_SCORED_AHEAD, scored)}
