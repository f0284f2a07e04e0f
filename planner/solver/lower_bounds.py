"""Lower bounds, by arithmetic alone, on the makespan of every answer that uses a given option.

The bound of an option is the longest chain of tasks with this option and every other call at its fastest, where the
time between two tasks is also long enough for the minimum work that must lie between them, spread over all ranks. A
transfer to a task k periods later has to arrive while the chain after that task still fits into its period: (k + 1)
periods are no shorter than the chain that ends with the sending task, the transfer, and the chain that starts with the
receiving task.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, reduce
from itertools import compress
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.solver.problem import CallOptions, Option, Precedence, Problem


class TaskWindow(NamedTuple):
    """The tasks after the end of `after` and before the start of `before`; None is an end of the period."""

    after: str | None
    before: str | None
    between: tuple[str, ...]


def windows(problem: Problem) -> tuple[TaskWindow, ...]:
    """Return every window with at least two tasks that is not the concatenation of two others."""
    return _windows(problem.order, problem.precedences)


@lru_cache(maxsize=8)  # a search asks for the same tasks many times, with fewer and fewer options
def _windows(order: tuple[str, ...], precedences: tuple[Precedence, ...]) -> tuple[TaskWindow, ...]:
    following = _followers(order, precedences)
    preceding: dict[str | None, set[str]] = {
        task: {other for other in order if task in following[other]} for task in order
    }
    preceding[None] = set(order)
    all_windows = []
    for after in (None, *order):
        for before in (*order, None):
            between = following[after] & preceding[before]
            is_split = any(between <= following[node] | preceding[node] | {node} for node in between)
            if len(between) > 1 and not is_split:
                all_windows.append(TaskWindow(after, before, tuple(name for name in order if name in between)))
    return tuple(all_windows)


def followers(problem: Problem) -> dict[str | None, set[str]]:
    """Return for each task the tasks that start after it has ended; for None all tasks."""
    return _followers(problem.order, problem.precedences)


def _followers(order: tuple[str, ...], precedences: tuple[Precedence, ...]) -> dict[str | None, set[str]]:
    """Return the followers of each task.

    A task that is streamed to is only known to start after its producer has started and to end after it has ended.
    """
    since_start: dict[str, set[str]] = {}
    since_end: dict[str | None, set[str]] = {None: set(order)}
    after: dict[str, list[Precedence]] = {task: [] for task in order}
    for precedence in precedences:
        after[precedence.before].append(precedence)
    for task in reversed(order):
        ended: set[str] = set()
        started: set[str] = set()
        for precedence in after[task]:
            follower = precedence.after
            if precedence.streamed:
                started |= {follower} | since_start[follower]
                ended |= since_end[follower]
            else:
                ended |= {follower} | since_start[follower]
        since_end[task], since_start[task] = ended, started | ended
    return since_end


Ticks: TypeAlias = NDArray[np.int64]
Amount: TypeAlias = int | Ticks
"""An amount that is the same for every option of a call, or an array with one for each."""


def options_within(problem: Problem, makespan: int) -> Problem:
    """Return the problem without the options whose bound exceeds `makespan`."""
    bound = _Bound(problem)
    return problem.with_calls(
        tuple(
            CallOptions(call.name, tuple(compress(call.options, (bound.with_each(call) <= makespan).tolist())))
            for call in problem.calls
        )
    )


def least_makespan(problem: Problem) -> int:
    """Return a lower bound on the makespan of every answer; every call must have options."""
    bound = _Bound(problem)
    return max(int(bound.with_each(call).min()) for call in problem.calls)


def bounds_with(problem: Problem, call: CallOptions) -> Ticks:
    """Return a lower bound on the makespan for each of the given options of a call, [options]."""
    return _Bound(problem).with_each(call)


class _Bound:
    """The minimum amounts of every call of a problem, and the bounds that follow from them."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._call_of = problem.runs
        self._ticks_after_stream = {
            call.name: min((_ticks_after_stream(o) for o in call.options), default=0) for call in problem.calls
        }
        self._late_delivery = {
            call.name: min((_ticks_to_late_delivery(o) for o in call.options), default=0) for call in problem.calls
        }
        self._fastest = {call.name: min((o.ticks for o in call.options), default=0) for call in problem.calls}
        self._min_work = {call.name: min((_work(o) for o in call.options), default=0) for call in problem.calls}
        self._windows: dict[str | None, list[TaskWindow]] = {}
        self._windows_to_end: dict[str | None, list[TaskWindow]] = {}
        for window in windows(problem):
            self._windows.setdefault(window.before, []).append(window)
            if window.before is None:
                self._windows_to_end.setdefault(window.after, []).append(window)
        self._before: dict[str, list[Precedence]] = {task.name: [] for task in problem.tasks}
        for precedence in problem.precedences:
            self._before[precedence.after].append(precedence)
        self._after: dict[str, list[Precedence]] = {task.name: [] for task in problem.tasks}
        for precedence in problem.precedences:
            self._after[precedence.before].append(precedence)

    def with_each(self, call: CallOptions) -> Ticks:
        """Return a lower bound on the makespan of the answers with each option of a call, [options]."""
        ticks, after_stream, work, late_delivery = (
            np.array([amount_of(option) for option in call.options], dtype=np.int64)
            for amount_of in (_ticks, _ticks_after_stream, _work, _ticks_to_late_delivery)
        )
        bounds = self._makespan(
            {**self._fastest, call.name: ticks},
            {**self._ticks_after_stream, call.name: after_stream},
            {**self._min_work, call.name: work},
            {**self._late_delivery, call.name: late_delivery},
        )
        return np.broadcast_to(bounds, len(ticks))

    def _makespan(
        self,
        ticks: Mapping[str, Amount],
        after_stream: Mapping[str, Amount],
        work: Mapping[str, Amount],
        late_delivery: Mapping[str, Amount],
    ) -> Amount:
        """Return a lower bound on the makespan if every call takes at least the given amounts.

        `ticks` are durations, `after_stream` the ticks that a run still takes after its producer has ended, `work`
        the ticks x ranks, and `late_delivery` the ticks from the start of a run until its late delivery.
        """
        starts: dict[str, Amount] = {}
        ends: dict[str | None, Amount] = {None: 0}
        for name in self._problem.order:
            starts[name] = _largest(0, *(self._work_end(window, ends, work) for window in self._windows.get(name, ())))
            streamed: Amount = 0
            for before, _, lag, is_streamed, is_late in self._before[name]:
                delivered = ends[before] + lag
                if is_late:
                    delivered = _largest(delivered, starts[before] + late_delivery[self._call_of[before]] + lag)
                starts[name] = _largest(starts[name], starts[before] if is_streamed else delivered)
                streamed = _largest(streamed, delivered if is_streamed else 0)
            call = self._call_of.get(name)
            ends[name] = _largest(starts[name] + ticks[call], streamed + after_stream[call]) if call else starts[name]
        longest = _largest(
            *ends.values(), *(self._work_end(window, ends, work) for window in self._windows.get(None, ()))
        )
        if self._problem.carried:
            chain_after = self._chains_after(ticks, after_stream, work)
            for before, after, periods, lag, is_late in self._problem.carried:
                delivered = ends[before] + lag
                if is_late:
                    delivered = _largest(delivered, starts[before] + late_delivery[self._call_of[before]] + lag)
                longest = _largest(longest, -(-(delivered + chain_after[after]) // (periods + 1)))
        return longest

    def _chains_after(
        self, ticks: Mapping[str, Amount], after_stream: Mapping[str, Amount], work: Mapping[str, Amount]
    ) -> dict[str, Amount]:
        """Return for each task a lower bound on the ticks from its start to the end of the period."""
        chain_after: dict[str, Amount] = {}
        for name in reversed(self._problem.order):
            duration = ticks[self._call_of[name]] if name in self._call_of else 0
            chains = [0, *(self._work_ticks(window, work) for window in self._windows_to_end.get(name, ()))]
            for _, after, lag, is_streamed, _ in self._after[name]:
                chains.append(lag + after_stream[self._call_of[after]] if is_streamed else lag + chain_after[after])
            chain_after[name] = duration + _largest(*chains)
            for _, after, _, is_streamed, _ in self._after[name]:
                if is_streamed:
                    chain_after[name] = _largest(chain_after[name], chain_after[after])
        return chain_after

    def _work_end(self, window: TaskWindow, ends: Mapping[str | None, Amount], work: Mapping[str, Amount]) -> Amount:
        """Return a lower bound on the tick at which the work in a window is done."""
        return ends[window.after] + self._work_ticks(window, work)

    def _work_ticks(self, window: TaskWindow, work: Mapping[str, Amount]) -> Amount:
        """Return the ticks in which all ranks together do the work in a window."""
        inside = sum(work[self._call_of[name]] for name in window.between if name in self._call_of)
        return -(-inside // self._problem.num_ranks)


def _largest(*amounts: Amount) -> Amount:
    """Return the elementwise maximum."""
    largest: Amount = reduce(np.maximum, amounts)
    return largest


def _ticks(option: Option) -> int:
    return option.ticks


def _ticks_after_stream(option: Option) -> int:
    """Return the ticks that a run still takes after the task that streams to it has ended."""
    return option.ticks - option.early_ticks


def _ticks_to_late_delivery(option: Option) -> int:
    """Return the ticks from the start of a run until it has everything that it delivers late."""
    return option.ticks + option.late_ticks


def _work(option: Option) -> int:
    """Return ticks x ranks."""
    return option.ticks * option.place.num_ranks
