"""Bounds on many choices of options at once: no schedule of such a choice is shorter, in whatever order.

Choices are rows of indices of options, [choices, calls]. A task ends no earlier than the longest line of tasks before
it, and between two tasks every atom has time for all the work that must lie there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.solver.problem import CallRun, Option, Problem, Transfer
from meshwright.planner.solver.windows import windows

Amounts: TypeAlias = NDArray[np.float64]
"""Whole numbers; sums of a problem's ticks stay far below what a float holds exactly."""

Rows: TypeAlias = NDArray[np.int64]


class _Kind(NamedTuple):
    """Tasks that last equally long on the same ranks, whatever is picked: the first of them, and its calls."""

    task: CallRun | Transfer
    source: int
    target: int


class _Wait(NamedTuple):
    """A task that waits for another, and how."""

    after: int
    lag: int
    streamed: bool


class Prospects:
    """The bounds of one problem's choices."""

    def __init__(self, problem: Problem, owners: Sequence[Sequence[int]]) -> None:
        call = {one.name: index for index, one in enumerate(problem.calls)}
        task = {one.name: index for index, one in enumerate(problem.tasks)}
        self._options = [one.options for one in problem.calls]
        self._owners = owners
        self._covers = [_covers(problem, one.options) for one in problem.calls]
        self._ticks = [_column([option.ticks for option in one.options]) for one in problem.calls]
        self._early = [_column([option.early_ticks for option in one.options]) for one in problem.calls]
        self._places = _place_numbers(problem)
        kinds: dict[tuple[str, str], int] = {}
        self._kinds: list[_Kind] = []
        self._kind: list[int] = []
        for one in problem.tasks:
            ends = (one.call, one.call) if isinstance(one, CallRun) else (one.source, one.target)
            key = problem.lasts_like[one.name], "" if isinstance(one, CallRun) else one.occupies
            if key not in kinds:
                kinds[key] = len(self._kinds)
                self._kinds.append(_Kind(one, call[ends[0]], call[ends[1]]))
            self._kind.append(kinds[key])
        self._moved: dict[int, Amounts] = {}
        self._order = [task[name] for name in reversed(problem.order)]
        self._waits: list[list[_Wait]] = [[] for _ in problem.tasks]
        for before, after, lag, streamed in problem.precedences:
            self._waits[task[before]].append(_Wait(task[after], lag, streamed))
        self._set_windows(problem, task)

    def _set_windows(self, problem: Problem, task: Mapping[str, int]) -> None:
        """Windows by the task they open after, each with what it closes before and what lies between, kind by kind."""
        self._between: list[Counter[int]] = []
        self._opened: dict[int | None, list[tuple[int, int | None]]] = {}
        for after, before, between in windows(problem):
            counts = Counter(self._kind[task[name]] for name in between)
            if counts not in self._between:
                self._between.append(counts)
            opens, closes = (None if name is None else task[name] for name in (after, before))
            self._opened.setdefault(opens, []).append((self._between.index(counts), closes))

    def makespans(self, rows: Rows) -> Amounts:
        """A bound on the makespan of each choice, [choices]."""
        lasts = [self._lasts(index, rows) for index in range(len(self._kinds))]
        loads = [self._load(index, rows, ticks) for index, ticks in enumerate(lasts)]
        work = [_most_work(counts, loads) for counts in self._between]
        early = [self._early[call][rows[:, call]] for call in range(rows.shape[1])]
        tails: list[Amounts] = [np.zeros(len(rows))] * len(self._kind)

        def behind(task: int | None) -> Amounts | int:
            """Ticks from the end of a task, or from the beginning, to the end of all."""
            most: Amounts | int = 0
            for window, before in self._opened.get(task, ()):
                most = np.maximum(most, work[window] + (0 if before is None else tails[before]))
            return most

        for task in self._order:
            ticks, rest = lasts[self._kind[task]], behind(task)
            tail = ticks + rest
            for after, lag, streamed in self._waits[task]:
                wait = ticks + lag
                if streamed:
                    wait = np.maximum(0, wait - early[self._kinds[self._kind[after]].source])
                tail = np.maximum(tail, wait + tails[after])
            tails[task] = tail
        most: Amounts = np.maximum(np.max(tails, axis=0), behind(None))
        return most

    def _lasts(self, kind: int, rows: Rows) -> Amounts:
        """Ticks of the tasks of a kind, [choices]."""
        task, source, target = self._kinds[kind]
        if isinstance(task, CallRun):
            return self._ticks[source][rows[:, source]]
        ticks = self._moves(kind, rows[:, source], rows[:, target])
        for owner in self._owners[target]:
            shares = self._places[owner][rows[:, owner]] == self._places[target][rows[:, target]]
            ticks = np.where(shares, 0, ticks)
        return ticks

    def _moves(self, kind: int, sources: Rows, targets: Rows) -> Amounts:
        task, source, target = self._kinds[kind]
        assert isinstance(task, Transfer)
        here, there = self._options[source], self._options[target]
        if kind not in self._moved:
            self._moved[kind] = np.full((len(here), len(there)), -1.0)
        known = self._moved[kind]
        missing = np.unique(np.stack([sources, targets])[:, known[sources, targets] < 0], axis=1)
        for one, other in missing.T.tolist():
            places = here[one].place, there[other].place
            known[one, other] = task.ticks_between(*places, places[0].overlap(places[1]))
        found: Amounts = known[sources, targets]
        return found

    def _load(self, kind: int, rows: Rows, ticks: Amounts) -> Amounts:
        """Ticks of one task of a kind on each atom, [choices, atoms]."""
        task, source, target = self._kinds[kind]
        covered = self._covers[source][rows[:, source]]
        if isinstance(task, Transfer):
            other = self._covers[target][rows[:, target]]
            covered = {"source": covered, "target": other, "both": np.maximum(covered, other)}[task.occupies]
        load: Amounts = covered * ticks[:, np.newaxis]
        return load


def _most_work(counts: Mapping[int, int], loads: Sequence[Amounts]) -> Amounts:
    """Ticks of so many tasks of each kind on the atom that has most, [choices]."""
    work: Amounts = np.sum([number * loads[kind] for kind, number in counts.items()], axis=0)
    most: Amounts = work.max(axis=-1)
    return most


def _covers(problem: Problem, options: Sequence[Option]) -> Amounts:
    """1 where an option covers an atom, [options, atoms]."""
    return np.array([[float(atom.start in option.place.ranks) for atom in problem.atoms] for option in options])


def _column(amounts: Sequence[int]) -> Amounts:
    return np.array(amounts, dtype=np.float64)


def _place_numbers(problem: Problem) -> list[Rows]:
    """The same number for options of all calls at the same place."""
    numbers: dict[object, int] = {}
    return [
        np.array([numbers.setdefault(option.place, len(numbers)) for option in call.options], dtype=np.int64)
        for call in problem.calls
    ]
