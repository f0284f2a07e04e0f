"""Prunes the search by the period of a first plan, which limits how long a choice may take in a plan worth finding.

    known      = period of a plan that exists already, found among a few default choices
    maximum    = for each search case, the longest period that is worth finding, given the known plan
    minimum    = for each stage and kind of pool, a lower bound on the seconds of every choice: from arithmetic first,
                 and from its fastest choice once the stage is costed
    limit      = the longest time of a choice with which the other stages, each at its minimum, still meet the maximum

Choices that take longer are not costed. The lower bound on the period is the solver's own, for a problem that has one
mode per kind of pool and whose transfers take no time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TypeAlias

import numpy as np

from meshwright.planner.plan.cost_queries import StageTransfer
from meshwright.planner.plan.steps_ahead import SearchCase, SearchCaseKey
from meshwright.planner.search.choice_costs import NO_TIME_LIMIT, TimeLimit
from meshwright.planner.search.formulate import carried_precedences, formulate, precedences, refits
from meshwright.planner.search.frontiers import Frontier, PoolKind, StageCosts
from meshwright.planner.search.search_case import SolvedCase
from meshwright.planner.solver.lower_bounds import ModeAmounts, bounds_with, least_makespan
from meshwright.planner.solver.problem import Mode, Problem, Resource, Run, Task, Transfer
from meshwright.planner.solver.result import Effort, Limits
from meshwright.planner.solver.transfer_ticks import TransferTicks
from meshwright.profiles.elementwise import FloatArray, IntArray
from meshwright.profiles.errors import nearest
from meshwright.profiles.stages import GENERATE, Stage, StageGraph

_PARTS = (1, 2, 4)
"""Divisors of the number of ranks: pools of about the resulting sizes are used in a first plan."""


def default_frontiers(costs: StageCosts, case: SearchCase, *, begun: Callable[[int], None]) -> list[Frontier]:
    """Cost the default choices of every stage on about all, half or a quarter of the ranks.

    `begun` is called with the position of each stage when its costing starts.
    """
    num_ranks = costs.facts.cluster.num_ranks

    def cost(stage: Stage) -> Frontier:
        kinds = costs.kinds[stage.name]
        numbers = [kind.num_ranks for kind in kinds]
        sizes = {nearest(num_ranks // part, numbers) for part in _PARTS if numbers}
        large = {kind: NO_TIME_LIMIT for kind in kinds if kind.num_ranks in sizes}
        return costs.frontier(stage, case, large, is_plain=True)

    return costs.in_parallel(cost, costs.facts.graph.stages, prepare=load_solver, on_start=begun)


def first_plan(
    costs: StageCosts,
    case: SearchCase,
    frontiers: Sequence[Frontier],
    *,
    edges: tuple[StageTransfer, ...],
    limits: Limits,
    effort: Effort,
) -> SolvedCase | None:
    """Return the best plan of the choices in `frontiers`, one per stage; None if the solver finds none quickly."""
    if not all(any(frontier.candidates.values()) for frontier in frontiers):
        return None
    formulation = formulate(costs.facts, costs.model, frontiers, edges, case.ahead)
    from meshwright.planner.solver.solve import first_answer  # already loaded by `load_solver`

    result = first_answer(formulation.problem, limits, effort)
    if result is None:
        return None
    return SolvedCase(search_case=case, edges=edges, formulation=formulation, result=result)


def load_solver() -> None:
    """Import the solver.

    Importing OR-Tools takes about as long as costing a stage, and the other process costs stages meanwhile.
    """
    import_module("meshwright.planner.solver.solve")


_TICKS = 10**6
"""Ticks in the longest period that is worth finding."""

_GRID = 256
"""Number of durations that are tried for a choice, evenly spaced up to the longest period worth finding."""

_CLIP = 4
"""Seconds are clipped at this multiple of the longest period worth finding, so that ticks stay small."""

LowerBounds: TypeAlias = Mapping[PoolKind, float]
"""Seconds that every choice of a stage takes at least, by kind of pool."""

StageKey: TypeAlias = tuple[str, SearchCaseKey]
"""A stage's name and the properties of a search case that its choices depend on."""


@dataclass
class PruningBound:
    """The pruning bounds of several search cases; `max_period_seconds` has the longest period worth finding in each.

    `lower_bounds` holds lower bounds in seconds by stage and by the properties of a search case that its choices
    depend on; they become tighter as stages are costed. The `late` stages wait for rewards, which arrive at least
    `late_seconds(generation_seconds)` after the generation.
    """

    graph: StageGraph
    num_ranks: int
    search_cases: Sequence[SearchCase]
    max_period_seconds: Sequence[float]
    transfers: Sequence[StageTransfer]
    lower_bounds: dict[StageKey, LowerBounds]
    late: Collection[str] = ()
    late_seconds: Callable[[float], float] = lambda _: 0.0

    def time_limits(self, stage: str, key: SearchCaseKey) -> dict[PoolKind, TimeLimit]:
        """Return the longest times of the stage's choices on each kind of pool, over all search cases with this key.

        Kinds of pools on which every choice is too slow are absent. A choice that streams can be in a plan only if a
        choice that took its tail seconds and streamed nothing could be.
        """
        limits: dict[PoolKind, TimeLimit] = {}
        for case, max_seconds in zip(self.search_cases, self.max_period_seconds, strict=True):
            if case.key_for(self.graph.by_name[stage]) == key:
                streams = case.streams(self.graph.by_name[stage])
                max_seconds_on = self._max_seconds(stage, case, max_seconds, streams=streams)
                max_tail_seconds_on = (
                    self._max_seconds(stage, case, max_seconds, streams=False, is_tail=True)
                    if streams
                    else max_seconds_on
                )
                for kind in max_seconds_on.keys() & max_tail_seconds_on.keys():
                    widest = limits.get(kind, TimeLimit(0.0, 0.0))
                    limits[kind] = TimeLimit(
                        max(widest.seconds, max_seconds_on[kind]), max(widest.tail_seconds, max_tail_seconds_on[kind])
                    )
        return limits

    def lower_bound_seconds(self, position: int) -> float:
        """A lower bound on the period of every plan of a search case, at most its longest period worth finding."""
        case, max_seconds = self.search_cases[position], self.max_period_seconds[position]
        problem = self._problem(case, max_seconds)
        if not all(task.modes for task in problem.tasks):
            return max_seconds
        return min(max_seconds, least_makespan(problem) * max_seconds / _TICKS)

    @property
    def excludes_all_plans(self) -> bool:
        """True if no search case can have a plan worth finding."""
        return all(
            self.lower_bound_seconds(position) >= max_seconds
            for position, max_seconds in enumerate(self.max_period_seconds)
        )

    def tighten(self, stage: str, key: SearchCaseKey, costed: Frontier) -> None:
        """Replace the lower bounds of a costed stage by the seconds of its fastest choices."""
        self.lower_bounds[stage, key] = {
            kind: min(candidate.seconds for candidate in candidates)
            for kind, candidates in costed.candidates.items()
            if candidates
        }

    def _max_seconds(
        self, name: str, case: SearchCase, max_seconds: float, *, streams: bool, is_tail: bool = False
    ) -> dict[PoolKind, float]:
        """Return the longest seconds on each kind of pool; with `is_tail` the longest tail seconds, which may be less
        than the lower bound of the stage."""
        stage = self.graph.by_name[name]
        fastest = {
            kind: seconds
            for kind, seconds in self.lower_bounds[name, case.key_for(stage)].items()
            if seconds <= max_seconds
        }
        if not fastest:
            return {}
        least = np.zeros(len(fastest)) if is_tail else np.array(list(fastest.values()))
        trials = np.maximum(least[:, np.newaxis], max_seconds * np.arange(_GRID + 1) / _GRID)  # [kinds, durations]
        num_ranks = np.repeat([kind.num_ranks for kind in fastest], _GRID + 1)
        amounts = self._amounts(stage, num_ranks, trials.ravel(), max_seconds, streams=streams)
        bounds = bounds_with(self._problem(case, max_seconds), name, amounts).reshape(trials.shape)
        longest = np.where(bounds <= _TICKS, trials, -math.inf).max(axis=1).tolist()
        return {
            kind: seconds + max_seconds / _GRID
            for kind, seconds in zip(fastest, longest, strict=True)
            if seconds > -math.inf
        }

    def _amounts(
        self, stage: Stage, num_ranks: IntArray, seconds: FloatArray, max_seconds: float, *, streams: bool
    ) -> ModeAmounts:
        """Return what choices of a stage that take these seconds on these numbers of ranks, each [choices], take."""
        ticks = _ticks(seconds, max_seconds)
        late_ticks = 0 * ticks
        if stage.generates and self.late:
            distinct, position = np.unique(seconds, return_inverse=True)
            late_seconds = np.array([self.late_seconds(one) for one in distinct.tolist()])
            late_ticks = _ticks(late_seconds, max_seconds)[position]
        return ModeAmounts(ticks, 0 * ticks if streams else ticks, ticks * num_ranks, ticks + late_ticks)

    def _problem(self, case: SearchCase, max_seconds: float) -> Problem:
        """Build the problem of one period of a search case, with every stage at its lower bounds."""
        return Problem(
            num_ranks=self.num_ranks,
            device_units=0,
            tasks=tuple(
                Task(
                    stage.name,
                    tuple(
                        self._option(stage, kind, seconds, case.streams(stage), max_seconds)
                        for kind, seconds in self.lower_bounds[stage.name, case.key_for(stage)].items()
                    ),
                )
                for stage in self.graph.stages
            ),
            activities=(
                *(
                    Transfer(name=name, source=s, target=t, occupies="both", ticks=TransferTicks())
                    for name, s, t in refits(self.graph)
                ),
                *(Run(name=stage.name, task=stage.name) for stage in self.graph.stages),
            ),
            precedences=precedences(
                self.graph,
                self.transfers,
                case.ahead,
                max_seconds / _TICKS,
                lambda edge: edge.producer == GENERATE and case.streams(self.graph.by_name[edge.consumer]),
                late=self.late,
            ),
            carried=carried_precedences(self.transfers, case.ahead, max_seconds / _TICKS, self.late),
        )

    def _option(self, stage: Stage, kind: PoolKind, seconds: float, streams: bool, max_seconds: float) -> Mode:
        late = self.late_seconds(seconds) if stage.generates and self.late else 0.0
        ticks, late_ticks = _ticks(np.array([seconds, late]), max_seconds).tolist()
        return Mode(
            resource=Resource(0, kind.num_ranks, f"@{kind.part}"),
            ticks=ticks,
            early_ticks=ticks if streams else 0,
            late_ticks=late_ticks,
        )


def _ticks(seconds: FloatArray, max_seconds: float) -> IntArray:
    """Return durations in ticks, rounded down."""
    ticks: IntArray = np.floor(np.minimum(seconds / max_seconds, _CLIP) * _TICKS).astype(np.int64)
    return ticks
