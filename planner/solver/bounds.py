"""Which options cannot be part of an answer that ends by a given tick, by arithmetic alone.

For each option: the longest line of tasks with this option and every other call at its fastest, where the stretch
between two tasks also has room for the least work that must lie there, spread over all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.planner.solver.problem import Call, Option, Precedence, Problem, Run
from meshwright.planner.solver.windows import Window, windows


def within(problem: Problem, makespan: int) -> Problem:
    """The problem without the options whose bound is above `makespan`."""
    bound = _Bound(problem)
    calls = tuple(
        Call(call.name, tuple(option for option in call.options if bound.with_option(call.name, option) <= makespan))
        for call in problem.calls
    )
    return problem.with_calls(calls)


def least_makespan(problem: Problem) -> int:
    """A bound on the makespan of every answer; every call has options."""
    bound = _Bound(problem)
    return max(min(bound.with_option(call.name, option) for option in call.options) for call in problem.calls)


class _Bound:
    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._known: dict[tuple[str, int, int, int], int] = {}
        self._call = {task.name: task.call for task in problem.tasks if isinstance(task, Run)}
        self._rest = {call.name: min((_rest(o) for o in call.options), default=0) for call in problem.calls}
        self._fastest = {call.name: min((o.ticks for o in call.options), default=0) for call in problem.calls}
        self._least = {call.name: min((_work(o) for o in call.options), default=0) for call in problem.calls}
        self._windows: dict[str | None, list[Window]] = {}
        for window in windows(problem):
            self._windows.setdefault(window.before, []).append(window)
        self._before: dict[str, list[Precedence]] = {task.name: [] for task in problem.tasks}
        for precedence in problem.precedences:
            self._before[precedence.after].append(precedence)

    def with_option(self, call: str, option: Option) -> int:
        """A bound on the makespan of every answer that picks this option; the same on all pools of one size."""
        key = (call, option.ticks, _rest(option), option.place.num_ranks)
        if key not in self._known:
            ticks, rest = {**self._fastest, call: option.ticks}, {**self._rest, call: _rest(option)}
            self._known[key] = self._makespan(ticks, rest, {**self._least, call: _work(option)})
        return self._known[key]

    def _makespan(self, ticks: Mapping[str, int], rest: Mapping[str, int], work: Mapping[str, int]) -> int:
        """A bound when no call takes less than `ticks`, than `rest` after what streams to it, or less `work` in all."""
        starts: dict[str, int] = {}
        ends: dict[str | None, int] = {None: 0}
        for name in self._problem.order:
            starts[name] = max([0, *(self._closes(window, ends, work) for window in self._windows.get(name, ()))])
            streamed = 0
            for before, _, lag, is_streamed in self._before[name]:
                starts[name] = max(starts[name], starts[before] if is_streamed else ends[before] + lag)
                streamed = max(streamed, ends[before] + lag if is_streamed else 0)
            call = self._call.get(name)
            ends[name] = max(starts[name] + ticks[call], streamed + rest[call]) if call else starts[name]
        last = max(ends.values())
        return max([last, *(self._closes(window, ends, work) for window in self._windows.get(None, ()))])

    def _closes(self, window: Window, ends: Mapping[str | None, int], work: Mapping[str, int]) -> int:
        """When the work inside a window can be done at the earliest."""
        inside = sum(work[self._call[name]] for name in window.between if name in self._call)
        return ends[window.after] + -(-inside // self._problem.num_ranks)


def _rest(option: Option) -> int:
    """Ticks that are left of a run when what streams to it has ended."""
    return option.ticks - option.early_ticks


def _work(option: Option) -> int:
    """Ticks of ranks."""
    return option.ticks * option.place.num_ranks
