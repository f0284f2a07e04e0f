"""How slow a choice may be and still be part of a plan that is not slower than one that is known.

    known      = seconds of some plan, found among a few plain choices
    least      = for each stage on each kind of pool: seconds that no choice is below, by arithmetic, and once its
                 choices are costed those of the fastest
    most       = what a choice may take so that the others, each at its least, still fit beside it

What takes longer is not costed. The bound is the solver's own (`solver.bounds`), on a problem with one option for each
kind of pool, whose transfers take no time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from meshwright.planner.plan.edges import Handover
from meshwright.planner.plan.steps_ahead import Scope, ScopeKey
from meshwright.planner.search.formulate import precedences, refits
from meshwright.planner.search.frontier import Frontier, PoolKind
from meshwright.planner.solver.bounds import bounds_with, least_makespan
from meshwright.planner.solver.problem import CallOptions, CallRun, Option, Place, Problem, Transfer
from meshwright.profiles.stages import GENERATE, StageGraph

_TICKS = 10**6
"""In the seconds that are known."""

_GRID = 256
"""Numbers of seconds that are tried for a choice, evenly up to those that are known."""

_FAR = 4
"""A choice that takes so many times the seconds that are known is told apart from no slower one."""

Least: TypeAlias = Mapping[PoolKind, float]
"""Seconds that no choice of a stage on a kind of pool is below."""

Key: TypeAlias = tuple[str, ScopeKey]
"""A stage, and what of a scope its choices depend on."""


@dataclass
class Worth:
    """Of the scopes that are searched with one plan known.

    `least` is by stage and by what its choices depend on in a scope; it gets better as stages are costed.
    """

    graph: StageGraph
    num_ranks: int
    known_seconds: float
    scopes: Sequence[Scope]
    handovers: Sequence[Handover]
    least: dict[Key, Least]

    def most_seconds(self, stage: str, key: ScopeKey) -> dict[PoolKind, float]:
        """Seconds above which a choice of the stage is in no plan that takes no longer than the known one, of any scope
        that offers the stage these choices; nothing for a kind of pool on which every choice is."""
        found: dict[PoolKind, float] = {}
        for scope in self.scopes:
            if scope.of(self.graph.by_name[stage]) == key:
                for kind, seconds in self._most(stage, scope).items():
                    found[kind] = max(found.get(kind, 0.0), seconds)
        return found

    def least_seconds(self, scope: Scope) -> float:
        """Seconds that no plan of the scope is below, by arithmetic; those that are known where that is less."""
        tick = self.known_seconds / _TICKS
        problem = self._problem(scope, tick)
        if not all(call.options for call in problem.calls):
            return self.known_seconds
        return min(self.known_seconds, least_makespan(problem) * tick)

    def learn(self, stage: str, key: ScopeKey, costed: Frontier) -> None:
        """Of a stage that is costed the fastest choices are the least."""
        self.least[stage, key] = {
            kind: min(candidate.seconds.total for candidate in candidates)
            for kind, candidates in costed.candidates.items()
            if candidates
        }

    def _most(self, stage: str, scope: Scope) -> dict[PoolKind, float]:
        tick, kind_of_stage = self.known_seconds / _TICKS, self.graph.by_name[stage]
        tried = {
            kind: [max(seconds, self.known_seconds * step / _GRID) for step in range(_GRID + 1)]
            for kind, seconds in self.least[stage, scope.of(kind_of_stage)].items()
            if seconds <= self.known_seconds
        }
        streams = scope.streams(kind_of_stage)
        options = [self._option(kind, s, streams, tick) for kind, each in tried.items() for s in each]
        if not options:
            return {}
        bounds = iter(bounds_with(self._problem(scope, tick), CallOptions(stage, tuple(options))).tolist())
        most = {}
        for kind, each in tried.items():
            possible = [seconds for seconds in each if next(bounds) <= _TICKS]
            if possible:
                most[kind] = max(possible) + self.known_seconds / _GRID
        return most

    def _problem(self, scope: Scope, tick: float) -> Problem:
        """One turn of a scope: every stage at its least on each kind of pool."""
        return Problem(
            num_ranks=self.num_ranks,
            device_blocks=0,
            calls=tuple(
                CallOptions(
                    stage.name,
                    tuple(
                        self._option(kind, seconds, scope.streams(stage), tick)
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
                tick,
                lambda edge: edge.producer == GENERATE and scope.streams(self.graph.by_name[edge.consumer]),
            ),
        )

    def _option(self, kind: PoolKind, seconds: float, streams: bool, tick: float) -> Option:
        ticks = math.floor(min(seconds, _FAR * self.known_seconds) / tick)
        return Option(place=Place(0, kind.num_ranks, f"@{kind.part}"), ticks=ticks, early_ticks=ticks if streams else 0)
