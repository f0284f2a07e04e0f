"""Scores choices of options with greedy schedules, for all changes of one or two calls at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.solver.crossing import Crossing
from meshwright.planner.solver.problem import Option, Problem, TimedPeriod, shortest_period
from meshwright.planner.solver.timetable import Columns, Timetable


class Score(NamedTuple):
    """The score of a choice: memory units above the device, then makespan, then ticks x ranks; smaller is better.

    `excess_blocks` is summed over all atoms. Two calls whose ranks cross count as more units than a device has.
    """

    excess_units: int
    makespan: int
    work: int


Picks = tuple[int, ...]
"""The index of an option for each call, in the order of the calls."""

Neighbours = Sequence[Sequence[int]]
"""Indices of some options for each call."""


Array: TypeAlias = NDArray[np.int64]


class _Table(NamedTuple):
    """The memory units that each option of a call puts on each atom, [options, atoms]."""

    resident: Array
    shared: Array
    transient: Array


class Greedy:
    """Scores choices of one problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._device = problem, problem.device_units
        call = {c.name: index for index, c in enumerate(problem.calls)}
        self.options = [c.options for c in problem.calls]
        self._tasks = [task.name for task in problem.tasks]
        self._owners = [[call[owner] for owner in problem.owners(c.name)] for c in problem.calls]
        self._atoms = np.array([ranks.start for ranks in problem.atoms])
        self._tables = [self._table(options) for options in self.options]
        self._crossing = Crossing(problem)
        self._timetable = Timetable(problem, self._owners, self._crossing)

    def score(self, picks: Picks) -> Score:
        """Return the score of a choice."""
        columns = _columns(picks)
        excess, lasts = self._excess(columns), self._timetable.durations(columns)
        makespan, work = self._timetable.makespans(columns, lasts), self._timetable.work(columns, lasts)
        return Score(int(excess[0]), int(makespan[0]), int(work[0]))

    def best_change(self, picks: Picks, score: Score, calls: Sequence[int], near: Neighbours) -> tuple[Picks, Score]:
        """Return the best change of these calls to options in `near`, and its score; the first of equals.

        The given choice and score are returned if no change is better.
        """
        columns = _columns(picks)
        for call, column in zip(calls, np.meshgrid(*near, indexing="ij"), strict=True):
            columns[call] = column.ravel()
        excess = self._excess(columns)
        least = int(excess.min())
        if least > score.excess_units:
            return picks, score
        columns = _selected(columns, excess == least)
        lasts = self._timetable.durations(columns)
        if least == score.excess_units:
            is_possible = lasts.tails.max(axis=1) <= score.makespan
            if not is_possible.any():
                return picks, score
            columns, lasts = _selected(columns, is_possible), lasts.where(is_possible)
        makespans, work = self._timetable.makespans(columns, lasts), self._timetable.work(columns, lasts)
        best = np.lexsort((work, makespans))[0]
        best_score = Score(least, int(makespans[best]), int(work[best]))
        if best_score >= score:
            return picks, score
        return tuple(int(column[best % len(column)]) for column in columns), best_score

    def timed_period(self, picks: Picks) -> TimedPeriod:
        """Return the shortest period in the order of the greedy schedule."""
        columns = _columns(picks)
        lasts = self._timetable.durations(columns)
        ends = self._timetable.schedule(columns, lasts)
        starts = dict(zip(self._tasks, (ends - lasts.ticks)[0].tolist(), strict=True))
        if not self._problem.carried:
            return TimedPeriod(int(ends.max()), starts)
        position = {name: index for index, name in enumerate(self._problem.order)}
        order = sorted(position, key=lambda name: (starts[name], position[name]))
        picked = {call.name: option for call, option in zip(self._problem.calls, self.picked(picks), strict=True)}
        return shortest_period(self._problem, picked, order)

    def picked(self, picks: Picks) -> tuple[Option, ...]:
        """Return the options of a choice."""
        return tuple(options[index] for options, index in zip(self.options, picks, strict=True))

    def indices(self, options: Sequence[Option]) -> Picks:
        """Return the choice of these options."""
        return tuple(call_options.index(option) for call_options, option in zip(self.options, options, strict=True))

    def _table(self, options: Sequence[Option]) -> _Table:
        start = np.array([option.place.ranks.start for option in options])
        stop = np.array([option.place.ranks.stop for option in options])
        is_covered = (start[:, np.newaxis] <= self._atoms) & (self._atoms < stop[:, np.newaxis])

        def per_atom(amounts: Iterable[int]) -> Array:
            return is_covered * np.array(list(amounts), dtype=np.int64)[:, np.newaxis]

        return _Table(
            resident=per_atom(option.resident_units for option in options),
            shared=per_atom(option.shared_units for option in options),
            transient=per_atom(option.transient_units for option in options),
        )

    def _excess(self, columns: Columns) -> Array:
        """Return the memory units above the device, [choices]."""
        held, peak = (np.zeros((1, len(self._atoms)), dtype=np.int64) for _ in range(2))
        for call, (table, chosen) in enumerate(zip(self._tables, columns, strict=True)):
            held = held + table.resident[chosen]
            peak = np.maximum(peak, table.transient[chosen])
            if self._owners[call]:
                held = held - table.shared[chosen] * self._timetable.shares(call, columns)[:, np.newaxis]
        excess: Array = np.maximum(held + peak - self._device, 0).sum(axis=-1)
        return excess + self._crossing.count(columns) * (self._device + 1)


def _columns(picks: Picks) -> list[Array]:
    return [np.array([index], dtype=np.int64) for index in picks]


def _selected(columns: Columns, mask: NDArray[np.bool_]) -> list[Array]:
    """Select some of the choices; a column that is the same for all choices stays."""
    return [column[mask] if len(column) == len(mask) else column for column in columns]
