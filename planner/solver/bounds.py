"""Which options cannot be part of an answer that ends by a given tick, by arithmetic alone.

For each option: the longest line of tasks with this option and every other call at its fastest, where the stretch
between two tasks also has room for the least work that must lie there, spread over all ranks. What a task hands over
k turns later is read when the line behind its reader still fits into the turn: (k + 1) turns are no shorter than the
line that ends with the task, its hand-over, and the line that its reader begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from itertools import compress
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.solver.problem import CallOptions, Option, Precedence, Problem
from meshwright.planner.solver.windows import TaskWindow, windows

Ticks: TypeAlias = NDArray[np.int64]
Amount: TypeAlias = int | Ticks
"""The same for every option of a call, or one for each."""


def within(problem: Problem, makespan: int) -> Problem:
    """The problem without the options whose bound is above `makespan`."""
    bound = _Bound(problem)
    return problem.with_calls(
        tuple(
            CallOptions(call.name, tuple(compress(call.options, (bound.with_each(call) <= makespan).tolist())))
            for call in problem.calls
        )
    )


def least_makespan(problem: Problem) -> int:
    """A bound on the makespan of every answer; every call has options."""
    bound = _Bound(problem)
    return max(int(bound.with_each(call).min()) for call in problem.calls)


def bounds_with(problem: Problem, call: CallOptions) -> Ticks:
    """For each of other options of a call a bound on the makespan of every answer that picks it, [options]."""
    return _Bound(problem).with_each(call)


class _Bound:
    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._call = problem.runs
        self._rest = {call.name: min((_rest(o) for o in call.options), default=0) for call in problem.calls}
        self._arrive = {call.name: min((_arrives(o) for o in call.options), default=0) for call in problem.calls}
        self._fastest = {call.name: min((o.ticks for o in call.options), default=0) for call in problem.calls}
        self._least = {call.name: min((_work(o) for o in call.options), default=0) for call in problem.calls}
        self._windows: dict[str | None, list[TaskWindow]] = {}
        self._behind: dict[str | None, list[TaskWindow]] = {}
        for window in windows(problem):
            self._windows.setdefault(window.before, []).append(window)
            if window.before is None:
                self._behind.setdefault(window.after, []).append(window)
        self._before: dict[str, list[Precedence]] = {task.name: [] for task in problem.tasks}
        for precedence in problem.precedences:
            self._before[precedence.after].append(precedence)
        self._after: dict[str, list[Precedence]] = {task.name: [] for task in problem.tasks}
        for precedence in problem.precedences:
            self._after[precedence.before].append(precedence)

    def with_each(self, call: CallOptions) -> Ticks:
        """For each option of a call a bound on the makespan of every answer that picks it, [options]."""
        ticks, rest, work, arrive = (
            np.array([of(option) for option in call.options], dtype=np.int64) for of in (_ticks, _rest, _work, _arrives)
        )
        found = self._makespan(
            {**self._fastest, call.name: ticks},
            {**self._rest, call.name: rest},
            {**self._least, call.name: work},
            {**self._arrive, call.name: arrive},
        )
        return np.broadcast_to(found, len(ticks))

    def _makespan(
        self,
        ticks: Mapping[str, Amount],
        rest: Mapping[str, Amount],
        work: Mapping[str, Amount],
        arrive: Mapping[str, Amount],
    ) -> Amount:
        """A bound when no call takes less than `ticks`, than `rest` after what streams to it, or less `work` in all, or
        has what it hands over late in less than `arrive`."""
        starts: dict[str, Amount] = {}
        ends: dict[str | None, Amount] = {None: 0}
        for name in self._problem.order:
            starts[name] = _most(0, *(self._closes(window, ends, work) for window in self._windows.get(name, ())))
            streamed: Amount = 0
            for before, _, lag, is_streamed, is_late in self._before[name]:
                handed = ends[before] + lag
                if is_late:
                    handed = _most(handed, starts[before] + arrive[self._call[before]] + lag)
                starts[name] = _most(starts[name], starts[before] if is_streamed else handed)
                streamed = _most(streamed, handed if is_streamed else 0)
            call = self._call.get(name)
            ends[name] = _most(starts[name] + ticks[call], streamed + rest[call]) if call else starts[name]
        found = _most(*ends.values(), *(self._closes(window, ends, work) for window in self._windows.get(None, ())))
        if self._problem.carried:
            behind = self._lines_behind(ticks, rest, work)
            for before, after, turns, lag, is_late in self._problem.carried:
                handed = ends[before] + lag
                if is_late:
                    handed = _most(handed, starts[before] + arrive[self._call[before]] + lag)
                found = _most(found, -(-(handed + behind[after]) // (turns + 1)))
        return found

    def _lines_behind(
        self, ticks: Mapping[str, Amount], rest: Mapping[str, Amount], work: Mapping[str, Amount]
    ) -> dict[str, Amount]:
        """Of each task the ticks from its start to the end of the turn, at least."""
        found: dict[str, Amount] = {}
        for name in reversed(self._problem.order):
            lasts = ticks[self._call[name]] if name in self._call else 0
            behind = [0, *(self._inside(window, work) for window in self._behind.get(name, ()))]
            for _, after, lag, is_streamed, _ in self._after[name]:
                behind.append(lag + rest[self._call[after]] if is_streamed else lag + found[after])
            found[name] = lasts + _most(*behind)
            for _, after, _, is_streamed, _ in self._after[name]:
                if is_streamed:
                    found[name] = _most(found[name], found[after])
        return found

    def _closes(self, window: TaskWindow, ends: Mapping[str | None, Amount], work: Mapping[str, Amount]) -> Amount:
        """When the work inside a window can be done at the earliest."""
        return ends[window.after] + self._inside(window, work)

    def _inside(self, window: TaskWindow, work: Mapping[str, Amount]) -> Amount:
        """Ticks of all ranks for the work inside a window."""
        inside = sum(work[self._call[name]] for name in window.between if name in self._call)
        return -(-inside // self._problem.num_ranks)


def _most(*amounts: Amount) -> Amount:
    """The largest, option by option."""
    found: Amount = reduce(np.maximum, amounts)
    return found


def _ticks(option: Option) -> int:
    return option.ticks


def _rest(option: Option) -> int:
    """Ticks that are left of a run when what streams to it has ended."""
    return option.ticks - option.early_ticks


def _arrives(option: Option) -> int:
    """Ticks from the start of a run until it has all that it hands over late."""
    return option.ticks + option.late_ticks


def _work(option: Option) -> int:
    """Ticks of ranks."""
    return option.ticks * option.place.num_ranks
