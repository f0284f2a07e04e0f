"""Greedy schedules of many choices of options at once: always the task that can start first, of several the one with
the longest line behind it, of these the first.

A choice has a column for each call: the indices of its options, [choices], or [1] where all choices have the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations, product
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.solver.crossing import Crossing
from meshwright.planner.solver.problem import CallRun, Problem, Transfer
from meshwright.planner.solver.windows import followers

Array: TypeAlias = NDArray[np.int64]
Columns: TypeAlias = Sequence[Array]

_FAR = 2**62
"""Behind every tick."""

_NEVER = -(2**61)
"""A lag to what does not wait: a sum with it is before every tick."""


class Lasts(NamedTuple):
    """Of some choices, [choices, tasks]: ticks of each task, those by which it may start before the end of what streams
    to it, those after its end until it has all that it hands over late, and those from its start to the end of the
    longest line of tasks behind it."""

    ticks: Array
    early: Array
    late: Array
    tails: Array

    def where(self, kept: NDArray[np.bool_]) -> Lasts:
        """Those of some of the choices."""
        return Lasts(*(amounts[kept] for amounts in self))


class Timetable:
    """The greedy schedules of one problem; `owners` has for each call the positions of those whose copy it shares."""

    def __init__(self, problem: Problem, owners: Sequence[Sequence[int]], crossing: Crossing) -> None:
        call = {one.name: index for index, one in enumerate(problem.calls)}
        task = {one.name: index for index, one in enumerate(problem.tasks)}
        self._owners, self._crossing = owners, crossing
        self._places = _place_numbers(problem)
        self._distinct = [list(dict.fromkeys(option.place for option in one.options)) for one in problem.calls]
        self._at = [_numbered([option.place for option in one.options]) for one in problem.calls]
        self._ticks = [_column([option.ticks for option in one.options]) for one in problem.calls]
        self._early = [_column([option.early_ticks for option in one.options]) for one in problem.calls]
        self._late = [_column([option.late_ticks for option in one.options]) for one in problem.calls]
        self._tasks = problem.tasks
        self._ends = [
            (call[t.call], call[t.call]) if isinstance(t, CallRun) else (call[t.source], call[t.target])
            for t in problem.tasks
        ]
        self._like = [task[problem.lasts_like[one.name]] for one in problem.tasks]
        self._order = [task[name] for name in problem.order]
        self._waits = [(task[p.before], task[p.after], p.lag, p.streamed, p.late) for p in problem.precedences]
        self._carried = [(task[p.before], task[p.after], p.turns, p.lag, p.late) for p in problem.carried]
        self._unordered = self._pairs(problem)
        self._moved: dict[int, Array] = {}
        shape = len(task), len(task)
        self._counts = np.zeros(shape, dtype=np.int64)
        self._lags = {streamed: np.full(shape, _NEVER, dtype=np.int64) for streamed in (False, True)}
        self._late_lags = np.full(shape, _NEVER, dtype=np.int64)
        for before, after, lag, streamed, late in self._waits:
            self._counts[before, after] += 1
            self._lags[streamed][before, after] = max(lag, self._lags[streamed][before, after])
            if late:
                self._late_lags[before, after] = max(lag, self._late_lags[before, after])
        self._streams = self._lags[True] > _NEVER
        self._is_late = bool((self._late_lags > _NEVER).any())

    def _pairs(self, problem: Problem) -> list[tuple[int, int, list[tuple[int, int]]]]:
        """The pairs of tasks none of which starts after the other has ended, with the pairs of calls on whose ranks
        they would meet."""
        behind = followers(problem)
        numbered = combinations(enumerate(task.name for task in problem.tasks), 2)
        return [
            (one, other, list(product(self._occupants(one), self._occupants(other))))
            for (one, here), (other, there) in numbered
            if there not in behind[here] and here not in behind[there]
        ]

    def shares(self, call: int, columns: Columns) -> NDArray[np.bool_]:
        """Whether a call uses an earlier one's copy, [choices]."""
        mine = self._places[call][columns[call]]
        found = np.zeros(1, dtype=bool)
        for owner in self._owners[call]:
            found = found | (self._places[owner][columns[owner]] == mine)
        return found

    def lasts(self, columns: Columns) -> Lasts:
        """How long tasks take."""
        ticks: list[Array] = []
        for task, like in enumerate(self._like):
            ticks.append(ticks[like] if like < task else self._lasts(task, columns))
        runs = [isinstance(task, CallRun) for task in self._tasks]
        early, late = (
            [
                amounts[call][columns[call]] if is_run else np.zeros(1, dtype=np.int64)
                for is_run, (call, _) in zip(runs, self._ends, strict=True)
            ]
            for amounts in (self._early, self._late)
        )
        tails = list(ticks)
        for task in reversed(self._order):
            for before, after, lag, streamed, is_late in self._waits:
                if before == task:
                    wait = ticks[task] + lag + late[task] * is_late
                    wait = np.maximum(0, wait - early[after]) if streamed else wait
                    tails[task] = np.maximum(tails[task], wait + tails[after])
        size = max(len(column) for column in columns)
        return Lasts(*(_side_by_side(amounts, size) for amounts in (ticks, early, late, tails)))

    def schedule(self, columns: Columns, lasts: Lasts) -> Array:
        """When each task ends, [choices, tasks]."""
        choices, meets = np.arange(len(lasts.ticks)), self._meet(columns, lasts)
        begins, ends = np.zeros_like(lasts.ticks), np.zeros_like(lasts.ticks)
        waits = np.tile(self._counts.sum(axis=0), (len(choices), 1))
        for _ in self._tasks:
            ready = np.where(waits == 0, begins, _FAR)
            start = ready.min(axis=1)
            task = np.where(ready == start[:, np.newaxis], lasts.tails, -1).argmax(axis=1)
            end = start + lasts.ticks[choices, task]
            ends[choices, task] = end
            waits -= self._counts[task]
            waits[choices, task] = -1
            start, end = start[:, np.newaxis], end[:, np.newaxis]
            begins = np.maximum(begins, np.where(meets[choices, task], end, 0))
            begins = np.maximum(begins, end + self._lags[False][task])
            if self._is_late:
                begins = np.maximum(begins, end + lasts.late[choices, task][:, np.newaxis] + self._late_lags[task])
            if self._streams.any():
                streamed = np.maximum(start, end + self._lags[True][task] - lasts.early)
                begins = np.maximum(begins, np.where(self._streams[task], streamed, 0))
        return ends

    def makespans(self, columns: Columns, lasts: Lasts) -> Array:
        """How long turns are with the greedy schedules, [choices]: where what is carried to later turns would be late,
        as long as they would be if the line behind its reader could move to the end of the turn, or at least if the
        reader comes before it on the same ranks."""
        ends = self.schedule(columns, lasts)
        found: Array = ends.max(axis=1)
        for before, after, turns, lag, is_late in self._carried:
            handed = ends[:, before] + lag + lasts.late[:, before] * is_late
            moved = -(-(handed + lasts.tails[:, after]) // (turns + 1))
            starts = ends[:, after] - lasts.ticks[:, after]
            is_first = self._share_ranks(columns, before, after) & (ends[:, after] <= ends[:, before])
            found = np.maximum(found, np.where(is_first, -(-(handed - starts) // turns), moved))
        return found

    def _share_ranks(self, columns: Columns, one: int, other: int) -> NDArray[np.bool_]:
        """Whether two tasks have a rank in common, [choices]."""
        on = [self._crossing.numbers[call][column] for call, column in enumerate(columns)]
        pairs = product(self._occupants(one), self._occupants(other))
        return np.asarray(sum(self._crossing.common[on[here], on[there]] for here, there in pairs) > 0)

    def work(self, columns: Columns, lasts: Lasts) -> Array:
        """Ticks of ranks, [choices]."""
        return sum(
            (lasts.ticks[:, task] * self._num_ranks(task, columns) for task in range(len(self._tasks))),
            start=np.zeros(len(lasts.ticks), dtype=np.int64),
        )

    def _lasts(self, task: int, columns: Columns) -> Array:
        """Ticks of a task, [choices]."""
        source, target = self._ends[task]
        if isinstance(self._tasks[task], CallRun):
            return self._ticks[source][columns[source]]
        return np.where(self.shares(target, columns), 0, self._moves(task, columns[source], columns[target]))

    def _moves(self, task: int, sources: Array, targets: Array) -> Array:
        """Ticks of a transfer by the places of its ends, each asked for when it is first needed."""
        transfer, ends = self._tasks[task], self._ends[task]
        assert isinstance(transfer, Transfer)
        at = [self._at[call][chosen] for call, chosen in zip(ends, (sources, targets), strict=True)]
        here, there = (self._distinct[call] for call in ends)
        known = self._moved.setdefault(task, np.full((len(here), len(there)), -1, dtype=np.int64))
        missing = known[*at] < 0
        if missing.any():
            pairs = np.stack(np.broadcast_arrays(*at))[:, missing]
            for one, other in np.unique(pairs, axis=1).T.tolist():
                known[one, other] = transfer.ticks_between(here[one], there[other], here[one].overlap(there[other]))
        found: Array = known[*at]
        return found

    def _occupants(self, task: int) -> tuple[int, ...]:
        """The calls whose ranks a task occupies."""
        one, (source, target) = self._tasks[task], self._ends[task]
        if isinstance(one, CallRun) or one.occupies == "source":
            return (source,)
        return (target,) if one.occupies == "target" else (source, target)

    def _meet(self, columns: Columns, lasts: Lasts) -> NDArray[np.bool_]:
        """Whether two tasks that may overlap take turns, [choices, tasks, tasks]; what takes no time occupies
        nothing."""
        num_tasks, happens = len(self._tasks), lasts.ticks > 0
        found = np.zeros((len(lasts.ticks), num_tasks, num_tasks), dtype=bool)
        on = [self._crossing.numbers[call][column] for call, column in enumerate(columns)]
        for one, other, ends in self._unordered:
            common = sum(self._crossing.common[on[here], on[there]] for here, there in ends)
            found[:, one, other] = found[:, other, one] = happens[:, one] & happens[:, other] & (common > 0)
        return found

    def _num_ranks(self, task: int, columns: Columns) -> Array:
        """The ranks that a task occupies, [choices]."""
        one, *other = [self._crossing.numbers[call][columns[call]] for call in self._occupants(task)]
        common = self._crossing.common
        ranks: Array = common[one, one]
        return ranks + common[other[0], other[0]] - common[one, other[0]] if other else ranks


def _side_by_side(amounts: Sequence[Array], size: int) -> Array:
    return np.stack([np.broadcast_to(one, size) for one in amounts], axis=1)


def _column(amounts: Sequence[int]) -> Array:
    return np.array(amounts, dtype=np.int64)


def _place_numbers(problem: Problem) -> list[Array]:
    """The same number for options of all calls at the same place."""
    numbers: dict[Hashable, int] = {}
    return [_numbered([option.place for option in call.options], numbers) for call in problem.calls]


def _numbered(names: Iterable[Hashable], numbers: dict[Hashable, int] | None = None) -> Array:
    """The same number for equal ones, from 0 on in their order; `numbers` are those that are known, and grow."""
    known = {} if numbers is None else numbers
    return _column([known.setdefault(name, len(known)) for name in names])
