"""The pruning bound: the longest time that a choice may take in a plan that is worth finding.

    known      = period of a plan that exists already, found among a few default choices
    enough     = for each search case, the longest period that is worth finding, given the known plan
    least      = for each stage and kind of pool, a lower bound on the seconds of every choice: from arithmetic first,
                 and from its fastest choice once the stage is costed
    most       = the longest time of a choice with which the other stages, each at its least, still meet `enough`

Choices that take longer are not costed. The lower bound on the period is the solver's own (`solver.bounds`), for a
problem that has one option per kind of pool and whose transfers take no time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from meshwright.planner.plan.edges import Handover
from meshwright.planner.plan.steps_ahead import Scope, ScopeKey
from meshwright.planner.search.costing import Most
from meshwright.planner.search.formulate import carried, precedences, refits
from meshwright.planner.search.frontier import Frontier, PoolKind
from meshwright.planner.solver.bounds import bounds_with, least_makespan
from meshwright.planner.solver.problem import CallOptions, CallRun, Option, Place, Problem, Transfer
from meshwright.profiles.stages import GENERATE, Stage, StageGraph

_TICKS = 10**6
"""Ticks in the longest period that is worth finding."""

_GRID = 256
"""Number of durations that are tried for a choice, evenly spaced up to the longest period worth finding."""

_CLIP = 4
"""Seconds are clipped at this multiple of the longest period worth finding, so that ticks stay small."""

Least: TypeAlias = Mapping[PoolKind, float]
"""Seconds that every choice of a stage takes at least, by kind of pool."""

Key: TypeAlias = tuple[str, ScopeKey]
"""A stage's name and the properties of a search case that its choices depend on."""


@dataclass
class Worth:
    """The pruning bounds of several search cases; `enough_seconds` has the longest period worth finding in each.

    `least` holds lower bounds in seconds by stage and by the properties of a search case that its choices depend on;
    they become tighter as stages are costed. The `late` stages wait for rewards, which arrive at least
    `late_seconds(generation_seconds)` after the generation.
    """

    graph: StageGraph
    num_ranks: int
    scopes: Sequence[Scope]
    enough_seconds: Sequence[float]
    handovers: Sequence[Handover]
    least: dict[Key, Least]
    late: Collection[str] = ()
    late_seconds: Callable[[float], float] = lambda _: 0.0

    def most(self, stage: str, key: ScopeKey) -> dict[PoolKind, Most]:
        """Return the longest times of the stage's choices on each kind of pool, over all search cases with this key.

        Kinds of pools on which every choice is too slow are absent. A choice that streams can be in a plan only if a
        choice that took its tail seconds and streamed nothing could be.
        """
        most_on: dict[PoolKind, Most] = {}
        for scope, max_seconds in zip(self.scopes, self.enough_seconds, strict=True):
            if scope.of(self.graph.by_name[stage]) == key:
                streams = scope.streams(self.graph.by_name[stage])
                max_seconds_on = self._most(stage, scope, max_seconds, streams=streams)
                max_tail_seconds_on = (
                    self._most(stage, scope, max_seconds, streams=False, is_tail=True) if streams else max_seconds_on
                )
                for kind in max_seconds_on.keys() & max_tail_seconds_on.keys():
                    widest = most_on.get(kind, Most(0.0, 0.0))
                    most_on[kind] = Most(
                        max(widest.seconds, max_seconds_on[kind]), max(widest.tail_seconds, max_tail_seconds_on[kind])
                    )
        return most_on

    def least_seconds(self, position: int) -> float:
        """A lower bound on the period of every plan of a search case, at most its longest period worth finding."""
        scope, max_seconds = self.scopes[position], self.enough_seconds[position]
        problem = self._problem(scope, max_seconds)
        if not all(call.options for call in problem.calls):
            return max_seconds
        return min(max_seconds, least_makespan(problem) * max_seconds / _TICKS)

    @property
    def is_enough(self) -> bool:
        """True if no search case can have a plan worth finding."""
        return all(
            self.least_seconds(position) >= max_seconds for position, max_seconds in enumerate(self.enough_seconds)
        )

    def learn(self, stage: str, key: ScopeKey, costed: Frontier) -> None:
        """Replace the lower bounds of a costed stage by the seconds of its fastest choices."""
        self.least[stage, key] = {
            kind: min(candidate.seconds for candidate in candidates)
            for kind, candidates in costed.candidates.items()
            if candidates
        }

    def _most(
        self, name: str, scope: Scope, max_seconds: float, *, streams: bool, is_tail: bool = False
    ) -> dict[PoolKind, float]:
        """Return the longest seconds on each kind of pool, at least the lower bound unless only a tail is meant."""
        stage = self.graph.by_name[name]
        durations = {
            kind: [max(0.0 if is_tail else seconds, max_seconds * step / _GRID) for step in range(_GRID + 1)]
            for kind, seconds in self.least[name, scope.of(stage)].items()
            if seconds <= max_seconds
        }
        options = [
            self._option(stage, kind, s, streams, max_seconds) for kind, trials in durations.items() for s in trials
        ]
        if not options:
            return {}
        bounds = iter(bounds_with(self._problem(scope, max_seconds), CallOptions(name, tuple(options))).tolist())
        most_on = {}
        for kind, trials in durations.items():
            possible = [seconds for seconds in trials if next(bounds) <= _TICKS]
            if possible:
                most_on[kind] = max(possible) + max_seconds / _GRID
        return most_on

    def _problem(self, scope: Scope, max_seconds: float) -> Problem:
        """Build the problem of one period of a search case, with every stage at its lower bounds."""
        return Problem(
            num_ranks=self.num_ranks,
            device_blocks=0,
            calls=tuple(
                CallOptions(
                    stage.name,
                    tuple(
                        self._option(stage, kind, seconds, scope.streams(stage), max_seconds)
                        for kind, seconds in self.least[stage.name, scope.of(stage)].items()
                    ),
                )
                for stage in self.graph.stages
            ),
            tasks=(
                *(
                    Transfer(name=name, source=s, target=t, occupies="both", ticks={})
                    for name, s, t in refits(self.graph)
                ),
                *(CallRun(name=stage.name, call=stage.name) for stage in self.graph.stages),
            ),
            precedences=precedences(
                self.graph,
                self.handovers,
                scope.ahead,
                max_seconds / _TICKS,
                lambda edge: edge.producer == GENERATE and scope.streams(self.graph.by_name[edge.consumer]),
                late=self.late,
            ),
            carried=carried(self.handovers, scope.ahead, max_seconds / _TICKS, self.late),
        )

    def _option(self, stage: Stage, kind: PoolKind, seconds: float, streams: bool, max_seconds: float) -> Option:
        ticks = math.floor(min(seconds / max_seconds, _CLIP) * _TICKS)
        late = self.late_seconds(seconds) if stage.generates and self.late else 0.0
        return Option(
            place=Place(0, kind.num_ranks, f"@{kind.part}"),
            ticks=ticks,
            early_ticks=ticks if streams else 0,
            late_ticks=math.floor(min(late / max_seconds, _CLIP) * _TICKS),
        )
