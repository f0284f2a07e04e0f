"""Lower bounds, by arithmetic alone, on the makespan of every answer that uses a given mode.

The bound of a mode is the longest chain of activities with this mode and every other task at its fastest, where the
time between two activities is also long enough for the minimum work that must lie between them, spread over all ranks.
A transfer to an activity k periods later has to arrive while the chain after that activity still fits into its period:
(k + 1) periods are no shorter than the chain that ends with the sending activity, the transfer, and the chain that
starts with the receiving activity."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, reduce
from itertools import compress
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.solver.problem import Mode, Precedence, Problem, Task


class ActivityWindow(NamedTuple):
    """The activities after the end of `after` and before the start of `before`; None is an end of the period."""

    after: str | None
    before: str | None
    between: tuple[str, ...]


def windows(problem: Problem) -> tuple[ActivityWindow, ...]:
    """Return every window with at least two activities that is not the concatenation of two others."""
    return _windows(problem.order, problem.precedences)


@lru_cache(maxsize=8)  # a search asks for the same activities many times, with fewer and fewer modes
def _windows(order: tuple[str, ...], precedences: tuple[Precedence, ...]) -> tuple[ActivityWindow, ...]:
    following = _followers(order, precedences)
    preceding: dict[str | None, set[str]] = {
        activity: {other for other in order if activity in following[other]} for activity in order
    }
    preceding[None] = set(order)
    all_windows = []
    for after in (None, *order):
        for before in (*order, None):
            between = following[after] & preceding[before]
            is_split = any(between <= following[node] | preceding[node] | {node} for node in between)
            if len(between) > 1 and not is_split:
                all_windows.append(ActivityWindow(after, before, tuple(name for name in order if name in between)))
    return tuple(all_windows)


def followers(problem: Problem) -> dict[str | None, set[str]]:
    """Return for each activity the activities that start after it has ended; for None all activities."""
    return _followers(problem.order, problem.precedences)


def _followers(order: tuple[str, ...], precedences: tuple[Precedence, ...]) -> dict[str | None, set[str]]:
    """Return the followers of each activity.

    An activity that is streamed to is only known to start after its producer has started and to end after it has ended.
    """
    since_start: dict[str, set[str]] = {}
    since_end: dict[str | None, set[str]] = {None: set(order)}
    after: dict[str, list[Precedence]] = {activity: [] for activity in order}
    for precedence in precedences:
        after[precedence.before].append(precedence)
    for activity in reversed(order):
        ended: set[str] = set()
        started: set[str] = set()
        for precedence in after[activity]:
            follower = precedence.after
            if precedence.streamed:
                started |= {follower} | since_start[follower]
                ended |= since_end[follower]
            else:
                ended |= {follower} | since_start[follower]
        since_end[activity], since_start[activity] = ended, started | ended
    return since_end


Ticks: TypeAlias = NDArray[np.int64]
Amount: TypeAlias = int | Ticks
"""An amount that is the same for every mode of a task, or an array with one for each."""


def modes_within(problem: Problem, makespan: int) -> Problem:
    """Return the problem without the modes whose bound exceeds `makespan`."""
    bound = _Bound(problem)
    return problem.with_tasks(
        tuple(
            Task(task.name, tuple(compress(task.modes, (bound.with_each(task) <= makespan).tolist())))
            for task in problem.tasks
        )
    )


def least_makespan(problem: Problem) -> int:
    """Return a lower bound on the makespan of every answer; every task must have modes."""
    bound = _Bound(problem)
    return max(int(bound.with_each(task).min()) for task in problem.tasks)


def bounds_with(problem: Problem, task: Task) -> Ticks:
    """Return a lower bound on the makespan for each of the given modes of a task, [modes]."""
    return _Bound(problem).with_each(task)


class _Bound:
    """The minimum amounts of every task of a problem, and the bounds that follow from them."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._task_of = problem.runs
        self._ticks_after_stream = {
            task.name: min((_ticks_after_stream(o) for o in task.modes), default=0) for task in problem.tasks
        }
        self._late_delivery = {
            task.name: min((_ticks_to_late_delivery(o) for o in task.modes), default=0) for task in problem.tasks
        }
        self._fastest = {task.name: min((o.ticks for o in task.modes), default=0) for task in problem.tasks}
        self._min_work = {task.name: min((_work(o) for o in task.modes), default=0) for task in problem.tasks}
        self._windows: dict[str | None, list[ActivityWindow]] = {}
        self._windows_to_end: dict[str | None, list[ActivityWindow]] = {}
        for window in windows(problem):
            self._windows.setdefault(window.before, []).append(window)
            if window.before is None:
                self._windows_to_end.setdefault(window.after, []).append(window)
        self._before: dict[str, list[Precedence]] = {activity.name: [] for activity in problem.activities}
        for precedence in problem.precedences:
            self._before[precedence.after].append(precedence)
        self._after: dict[str, list[Precedence]] = {activity.name: [] for activity in problem.activities}
        for precedence in problem.precedences:
            self._after[precedence.before].append(precedence)

    def with_each(self, task: Task) -> Ticks:
        """Return a lower bound on the makespan of the answers with each mode of a task, [modes]."""
        ticks, after_stream, work, late_delivery = (
            np.array([amount_of(mode) for mode in task.modes], dtype=np.int64)
            for amount_of in (_ticks, _ticks_after_stream, _work, _ticks_to_late_delivery)
        )
        bounds = self._makespan(
            {**self._fastest, task.name: ticks},
            {**self._ticks_after_stream, task.name: after_stream},
            {**self._min_work, task.name: work},
            {**self._late_delivery, task.name: late_delivery},
        )
        return np.broadcast_to(bounds, len(ticks))

    def _makespan(
        self,
        ticks: Mapping[str, Amount],
        after_stream: Mapping[str, Amount],
        work: Mapping[str, Amount],
        late_delivery: Mapping[str, Amount],
    ) -> Amount:
        """Return a lower bound on the makespan if every task takes at least the given amounts.

        `ticks` are durations, `after_stream` the ticks that a run still takes after its producer has ended, `work`
        the ticks x ranks, and `late_delivery` the ticks from the start of a run until its late output is complete.
        """
        starts: dict[str, Amount] = {}
        ends: dict[str | None, Amount] = {None: 0}
        for name in self._problem.order:
            starts[name] = _largest(0, *(self._work_end(window, ends, work) for window in self._windows.get(name, ())))
            streamed: Amount = 0
            for before, _, lag, is_streamed, is_late in self._before[name]:
                delivered = ends[before] + lag
                if is_late:
                    delivered = _largest(delivered, starts[before] + late_delivery[self._task_of[before]] + lag)
                starts[name] = _largest(starts[name], starts[before] if is_streamed else delivered)
                streamed = _largest(streamed, delivered if is_streamed else 0)
            task = self._task_of.get(name)
            ends[name] = _largest(starts[name] + ticks[task], streamed + after_stream[task]) if task else starts[name]
        longest = _largest(
            *ends.values(), *(self._work_end(window, ends, work) for window in self._windows.get(None, ()))
        )
        if self._problem.carried:
            chain_after = self._chains_after(ticks, after_stream, work)
            for before, after, periods, lag, is_late in self._problem.carried:
                delivered = ends[before] + lag
                if is_late:
                    delivered = _largest(delivered, starts[before] + late_delivery[self._task_of[before]] + lag)
                longest = _largest(longest, -(-(delivered + chain_after[after]) // (periods + 1)))
        return longest

    def _chains_after(
        self, ticks: Mapping[str, Amount], after_stream: Mapping[str, Amount], work: Mapping[str, Amount]
    ) -> dict[str, Amount]:
        """Return for each activity a lower bound on the ticks from its start to the end of the period."""
        chain_after: dict[str, Amount] = {}
        for name in reversed(self._problem.order):
            duration = ticks[self._task_of[name]] if name in self._task_of else 0
            chains = [0, *(self._work_ticks(window, work) for window in self._windows_to_end.get(name, ()))]
            for _, after, lag, is_streamed, _ in self._after[name]:
                chains.append(lag + after_stream[self._task_of[after]] if is_streamed else lag + chain_after[after])
            chain_after[name] = duration + _largest(*chains)
            for _, after, _, is_streamed, _ in self._after[name]:
                if is_streamed:
                    chain_after[name] = _largest(chain_after[name], chain_after[after])
        return chain_after

    def _work_end(
        self, window: ActivityWindow, ends: Mapping[str | None, Amount], work: Mapping[str, Amount]
    ) -> Amount:
        """Return a lower bound on the tick at which the work in a window is done."""
        return ends[window.after] + self._work_ticks(window, work)

    def _work_ticks(self, window: ActivityWindow, work: Mapping[str, Amount]) -> Amount:
        """Return the ticks in which all ranks together do the work in a window."""
        inside = sum(work[self._task_of[name]] for name in window.between if name in self._task_of)
        return -(-inside // self._problem.num_ranks)


def _largest(*amounts: Amount) -> Amount:
    """Return the elementwise maximum."""
    largest: Amount = reduce(np.maximum, amounts)
    return largest


def _ticks(mode: Mode) -> int:
    return mode.ticks


def _ticks_after_stream(mode: Mode) -> int:
    """Return the ticks that a run still takes after the activity that streams to it has ended."""
    return mode.ticks - mode.early_ticks


def _ticks_to_late_delivery(mode: Mode) -> int:
    """Return the ticks from the start of a run until its late output is complete."""
    return mode.ticks + mode.late_ticks


def _work(mode: Mode) -> int:
    """Return ticks x ranks."""
    return mode.ticks * mode.resource.num_ranks
