"""How slow a choice may be and still be part of a plan that is not slower than one that is known.

    known      = seconds of some plan, found among a few plain choices
    enough     = seconds of each scope: of what takes longer no plan is worth finding beside the known one
    least      = for each stage on each kind of pool: seconds that no choice is below, by arithmetic, and once its
                 choices are costed those of the fastest
    most       = what a choice may take so that the others, each at its least, still fit beside it

What takes longer is not costed. The bound is the solver's own (`solver.bounds`), on a problem with one option for each
kind of pool, whose transfers take no time.
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
"""In the seconds that are enough."""

_GRID = 256
"""Numbers of seconds that are tried for a choice, evenly up to those that are enough."""

_FAR = 4
"""A choice that takes so many times the seconds that are enough is told apart from no slower one."""

Least: TypeAlias = Mapping[PoolKind, float]
"""Seconds that no choice of a stage on a kind of pool is below."""

Key: TypeAlias = tuple[str, ScopeKey]
"""A stage, and what of a scope its choices depend on."""


@dataclass
class Worth:
    """Of the scopes that are searched with one plan known, with what is `enough_seconds` of each.

    `least` is by stage and by what its choices depend on in a scope; it gets better as stages are costed. Stages that
    are `late` wait for rewards, `late_seconds` at least after a generation of so many seconds.
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
        """What a choice of the stage may take in a plan that is worth finding, of any scope that offers the stage these
        choices; nothing for a kind of pool on which every choice takes more.

        What streams is in a plan only where one that took what remains of it, and streamed nothing, could be.
        """
        found: dict[PoolKind, Most] = {}
        for scope, enough in zip(self.scopes, self.enough_seconds, strict=True):
            if scope.of(self.graph.by_name[stage]) == key:
                streams = scope.streams(self.graph.by_name[stage])
                whole = self._most(stage, scope, enough, streams=streams)
                tails = self._most(stage, scope, enough, streams=False, is_tail=True) if streams else whole
                for kind in whole.keys() & tails.keys():
                    known = found.get(kind, Most(0.0, 0.0))
                    found[kind] = Most(max(known.seconds, whole[kind]), max(known.tail_seconds, tails[kind]))
        return found

    def least_seconds(self, position: int) -> float:
        """Seconds that no plan of a scope is below, by arithmetic; those that are enough where that is less."""
        scope, enough = self.scopes[position], self.enough_seconds[position]
        problem = self._problem(scope, enough)
        if not all(call.options for call in problem.calls):
            return enough
        return min(enough, least_makespan(problem) * enough / _TICKS)

    @property
    def is_enough(self) -> bool:
        """Whether no plan is worth finding beside the known one."""
        return all(self.least_seconds(position) >= enough for position, enough in enumerate(self.enough_seconds))

    def learn(self, stage: str, key: ScopeKey, costed: Frontier) -> None:
        """Of a stage that is costed the fastest choices are the least."""
        self.least[stage, key] = {
            kind: min(candidate.seconds for candidate in candidates)
            for kind, candidates in costed.candidates.items()
            if candidates
        }

    def _most(
        self, name: str, scope: Scope, enough: float, *, streams: bool, is_tail: bool = False
    ) -> dict[PoolKind, float]:
        """The most seconds on each kind of pool, no less than the least unless they are but a tail."""
        stage = self.graph.by_name[name]
        tried = {
            kind: [max(0.0 if is_tail else seconds, enough * step / _GRID) for step in range(_GRID + 1)]
            for kind, seconds in self.least[name, scope.of(stage)].items()
            if seconds <= enough
        }
        options = [self._option(stage, kind, s, streams, enough) for kind, each in tried.items() for s in each]
        if not options:
            return {}
        bounds = iter(bounds_with(self._problem(scope, enough), CallOptions(name, tuple(options))).tolist())
        most = {}
        for kind, each in tried.items():
            possible = [seconds for seconds in each if next(bounds) <= _TICKS]
            if possible:
                most[kind] = max(possible) + enough / _GRID
        return most

    def _problem(self, scope: Scope, enough: float) -> Problem:
        """One turn of a scope: every stage at its least on each kind of pool."""
        return Problem(
            num_ranks=self.num_ranks,
            device_blocks=0,
            calls=tuple(
                CallOptions(
                    stage.name,
                    tuple(
                        self._option(stage, kind, seconds, scope.streams(stage), enough)
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
                enough / _TICKS,
                lambda edge: edge.producer == GENERATE and scope.streams(self.graph.by_name[edge.consumer]),
                late=self.late,
            ),
            carried=carried(self.handovers, scope.ahead, enough / _TICKS, self.late),
        )

    def _option(self, stage: Stage, kind: PoolKind, seconds: float, streams: bool, enough: float) -> Option:
        ticks = math.floor(min(seconds / enough, _FAR) * _TICKS)
        late = self.late_seconds(seconds) if stage.generates and self.late else 0.0
        return Option(
            place=Place(0, kind.num_ranks, f"@{kind.part}"),
            ticks=ticks,
            early_ticks=ticks if streams else 0,
            late_ticks=math.floor(min(late / enough, _FAR) * _TICKS),
        )
