"""How far stages may work ahead of the training, and how stale what they write then becomes.

In turn n a stage that is a steps ahead works on step n + a. When the turn begins, the actor has seen n updates; what is
generated then is used by update n + a. A sequence that stays in flight for more turns is older by as many.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import GENERATE, Stage, StageGraph

StepsAhead: TypeAlias = Mapping[str, int]
"""Of every stage by its name: the steps by which it works ahead of the training."""

ScopeKey: TypeAlias = tuple[bool, bool, int, bool]
"""What of a scope the choices of one stage depend on."""


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What a search covers beside layouts and pools: how far stages work ahead, whether state is offloaded, and whether
    sequences run on from turn to turn."""

    ahead: StepsAhead
    offload: bool = False
    runs_on: bool = False

    def streams(self, stage: Stage) -> bool:
        """Whether the stage could read responses while they are generated: if it works on the same step.

        A model that is trained learns between the chunks of a sequence that runs on, so it then waits for whole ones.
        """
        same_step = self.ahead[stage.name] == self.ahead[GENERATE]
        return stage.may_stream and same_step and not (stage.is_trained and self.runs_on)

    def of(self, stage: Stage) -> ScopeKey:
        """What of the scope the choices of a stage depend on: scopes that agree in it offer the stage the same."""
        generates = stage.generates
        return self.offload, self.streams(stage), self.ahead[GENERATE] * generates, self.runs_on and generates


def synchronous(graph: StageGraph) -> StepsAhead:
    """No stage works ahead."""
    return dict.fromkeys(graph.names, 0)


def plain(graph: StageGraph) -> Scope:
    """Synchronous, with nothing offloaded."""
    return Scope(ahead=synchronous(graph))


def patterns(graph: StageGraph, staleness: int) -> tuple[StepsAhead, ...]:
    """The patterns that a bound on the staleness allows, the synchronous one first.

    Values and proximal log-probabilities are those of the models just before the update, so their stages never work
    ahead. With generation two steps ahead, untrained stages are one step ahead, and no stage waits for another in its
    turn but the training for these.
    """
    found = [synchronous(graph)]
    if staleness >= 1:
        found.append(_ahead(graph, generate=1, scored=0))
    if staleness >= 2:
        found.append(_ahead(graph, generate=2, scored=1))
    return tuple(found)


def pattern_ahead(graph: StageGraph, steps: int) -> StepsAhead:
    """The pattern in which generation works so many steps ahead, at most two."""
    return next(pattern for pattern in patterns(graph, steps) if pattern[GENERATE] == steps)


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


def steps_ahead_violations(graph: StageGraph, ahead: StepsAhead) -> tuple[str, ...]:
    """Rules that a pattern breaks on its own; that steps ahead never rise along an edge is checked edge by edge."""
    may_work_ahead = (GENERATE, *_scored_ahead(graph))
    return tuple(
        f"{stage}: steps_ahead={steps_ahead}, and only {', '.join(may_work_ahead)} may work ahead; use 0."
        for stage, steps_ahead in ahead.items()
        if steps_ahead and stage not in may_work_ahead
    )


def _ahead(graph: StageGraph, *, generate: int, scored: int) -> StepsAhead:
    return {**synchronous(graph), GENERATE: generate, **dict.fromkeys(_scored_ahead(graph), scored)}


def _scored_ahead(graph: StageGraph) -> tuple[str, ...]:
    """Stages whose weights are never trained, and that read of no others than these and the generation: what they write
    of a step does not depend on when they run."""
    found: list[str] = []
    for stage in graph.stages:
        if not stage.is_trained and {graph.writer[field] for field in stage.reads} <= {GENERATE, *found}:
            found.append(stage.name)
    return tuple(found)
