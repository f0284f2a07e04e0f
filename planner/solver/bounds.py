"""Which options cannot be part of an answer that ends by a given tick, by arithmetic alone.

For each option: the longest line of tasks with this option and every other call at its fastest, where the stretch
between two tasks also has room for the least work that must lie there, spread over all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.planner.solver.problem import Call, Option, Problem, Run
from meshwright.planner.solver.windows import Window, windows


def within(problem: Problem, makespan: int) -> Problem:
    """The problem without the options whose bound is above `makespan`."""
    bound = _Bound(problem)
    calls = tuple(
        Call(call.name, tuple(option for option in call.options if bound.with_option(call.name, option) <= makespan))
        for call in problem.calls
    )
    return problem.with_calls(calls)


class _Bound:
    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._known: dict[tuple[str, int, int], int] = {}
        self._call = {task.name: task.call for task in problem.tasks if isinstance(task, Run)}
        self._fastest = {call.name: min((o.ticks for o in call.options), default=0) for call in problem.calls}
        self._least = {call.name: min((_work(o) for o in call.options), default=0) for call in problem.calls}
        self._windows: dict[str | None, list[Window]] = {}
        for window in windows(problem):
            self._windows.setdefault(window.before, []).append(window)
        self._before: dict[str, list[tuple[str, int]]] = {task.name: [] for task in problem.tasks}
        for before, after, lag in problem.precedences:
            self._before[after].append((before, lag))

    def with_option(self, call: str, option: Option) -> int:
        """A bound on the makespan of every answer that picks this option; the same on all pools of one size."""
        key = (call, option.ticks, option.place.num_ranks)
        if key not in self._known:
            ticks = {**self._fastest, call: option.ticks}
            self._known[key] = self._makespan(ticks, {**self._least, call: _work(option)})
        return self._known[key]

    def _makespan(self, ticks: Mapping[str, int], work: Mapping[str, int]) -> int:
        """A bound when no call is faster than `ticks` and none has less work than `work`."""
        ends: dict[str | None, int] = {None: 0}
        for name in self._problem.order:
            earliest = max((ends[before] + lag for before, lag in self._before[name]), default=0)
            earliest = max([earliest, *(self._closes(window, ends, work) for window in self._windows.get(name, ()))])
            ends[name] = earliest + (ticks[self._call[name]] if name in self._call else 0)
        last = max(ends.values())
        return max([last, *(self._closes(window, ends, work) for window in self._windows.get(None, ()))])

    def _closes(self, window: Window, ends: Mapping[str | None, int], work: Mapping[str, int]) -> int:
        """When the work inside a window can be done at the earliest."""
        inside = sum(work[self._call[name]] for name in window.between if name in self._call)
        return ends[window.after] + -(-inside // self._problem.num_ranks)


def _work(option: Option) -> int:
    """Ticks of ranks."""
    return option.ticks * option.place.num_ranks
