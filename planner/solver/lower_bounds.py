"""Lower bounds, by arithmetic alone, on the makespan of every answer that uses a given mode.

The bound of a mode is the longest chain of activities with this mode and every other task at its fastest, where the
time between two activities is also long enough for the minimum work that must lie between them, spread over all ranks.
A transfer to an activity k periods later has to arrive while the chain after that activity still fits into its period:
(k + 1) periods are no shorter than the chain that ends with the sending activity, the transfer, and the chain that
starts with the receiving activity."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial, reduce
from itertools import compress
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.solver.problem import Precedence, Problem, Task


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


@dataclass(frozen=True, kw_only=True)
class LeastAmounts:
    """Lower bounds on what the answers of some kind take; each is a number, or an array with one for each kind.

    By task, `ticks` are durations, `after_stream` the ticks that a run still takes after its producer has ended, and
    `late_delivery` the ticks from the start of a run until its late output is complete. `window_ticks` gives the
    ticks of a window, and `transfer_ticks` those of the transfers that are known to take time. `in_turn` tells of a
    streamed precedence (before, after) whether the two runs are known to have ranks in common, so that they cannot
    overlap.
    """

    ticks: Mapping[str, Amount]
    after_stream: Mapping[str, Amount]
    late_delivery: Mapping[str, Amount]
    window_ticks: Callable[[ActivityWindow], Amount]
    transfer_ticks: Mapping[str, Amount] = field(default_factory=dict)
    in_turn: Mapping[tuple[str, str], NDArray[np.bool_]] = field(default_factory=dict)


def modes_within(problem: Problem, makespan: int) -> Problem:
    """Return the problem without the modes whose bound exceeds `makespan`."""
    bound = MakespanBound(problem)
    return problem.with_tasks(
        tuple(
            Task(task.name, tuple(compress(task.modes, (bound.with_each(task.name) <= makespan).tolist())))
            for task in problem.tasks
        )
    )


def least_makespan(problem: Problem) -> int:
    """Return a lower bound on the makespan of every answer; every task must have modes."""
    bound = MakespanBound(problem)
    return max(int(bound.with_each(task.name).min()) for task in problem.tasks)


class ModeAmounts(NamedTuple):
    """The amounts of several modes of a task, each [modes]: `ticks`, the ticks that a run still takes after the
    activity that streams to it has ended, ticks x ranks, and the ticks until its late output is complete."""

    ticks: Ticks
    after_stream: Ticks
    work: Ticks
    late_delivery: Ticks


def bounds_with(problem: Problem, task: str, amounts: ModeAmounts) -> Ticks:
    """Return a lower bound on the makespan for each of some modes of a task, [modes]; only their amounts are given."""
    return MakespanBound(problem).with_amounts(task, amounts)


class MakespanBound:
    """The minimum amounts of every task of a problem, and the bounds on the makespan that follow from them.

    `task_of` has the task of each run, `min_work` the least ticks x ranks of each task, and `least` the amounts of all
    answers.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.task_of = problem.runs

        self._amounts = {task.name: _amounts_of(task) for task in problem.tasks}

        def least(amount: str) -> dict[str, Amount]:
            columns = {name: getattr(amounts, amount) for name, amounts in self._amounts.items()}
            return {name: int(column.min()) if len(column) else 0 for name, column in columns.items()}

        self.min_work = least("work")
        self.least = LeastAmounts(
            ticks=least("ticks"),
            after_stream=least("after_stream"),
            late_delivery=least("late_delivery"),
            window_ticks=partial(self._spread_ticks, self.min_work),
        )
        self._windows: dict[str | None, list[ActivityWindow]] = {}
        self._windows_to_end: dict[str | None, list[ActivityWindow]] = {}
        for window in windows(problem):
            self._windows.setdefault(window.before, []).append(window)
            if window.before is None:
                self._windows_to_end.setdefault(window.after, []).append(window)
        self._before: dict[str, list[Precedence]] = {activity.name: [] for activity in problem.activities}
        self._after: dict[str, list[Precedence]] = {activity.name: [] for activity in problem.activities}
        for precedence in problem.precedences:
            self._before[precedence.after].append(precedence)
            self._after[precedence.before].append(precedence)

    def with_each(self, task: str) -> Ticks:
        """Return a lower bound on the makespan of the answers with each mode of a task, [modes]."""
        return self.with_amounts(task, self._amounts[task])

    def with_amounts(self, task: str, amounts: ModeAmounts) -> Ticks:
        """Return a lower bound on the makespan of the answers with each of some modes of a task, [modes]."""
        bounds = self.makespan(
            LeastAmounts(
                ticks={**self.least.ticks, task: amounts.ticks},
                after_stream={**self.least.after_stream, task: amounts.after_stream},
                late_delivery={**self.least.late_delivery, task: amounts.late_delivery},
                window_ticks=partial(self._spread_ticks, {**self.min_work, task: amounts.work}),
            )
        )
        return np.broadcast_to(bounds, len(amounts.ticks))

    def makespan(self, amounts: LeastAmounts) -> Amount:
        """Return a lower bound on the makespan of the answers that take at least the given amounts."""
        starts: dict[str, Amount] = {}
        ends: dict[str | None, Amount] = {None: 0}
        for name in self._problem.order:
            starts[name] = _largest(
                0, *(ends[window.after] + amounts.window_ticks(window) for window in self._windows.get(name, ()))
            )
            streamed: Amount = 0
            for before, _, lag, is_streamed, is_late in self._before[name]:
                delivered = ends[before] + lag
                if is_late:
                    delivered = _largest(delivered, starts[before] + amounts.late_delivery[self.task_of[before]] + lag)
                if not is_streamed:
                    starts[name] = _largest(starts[name], delivered)
                    continue
                earliest = starts[before]
                if (before, name) in amounts.in_turn:
                    earliest = np.where(amounts.in_turn[before, name], ends[before], earliest)
                starts[name] = _largest(starts[name], earliest)
                streamed = _largest(streamed, delivered)
            task = self.task_of.get(name)
            if task:
                ends[name] = _largest(starts[name] + amounts.ticks[task], streamed + amounts.after_stream[task])
            else:
                ends[name] = starts[name] + amounts.transfer_ticks.get(name, 0)
        longest = _largest(
            *ends.values(),
            *(ends[window.after] + amounts.window_ticks(window) for window in self._windows.get(None, ())),
        )
        if self._problem.carried:
            chain_after = self._chains_after(amounts)
            for before, after, periods, lag, is_late in self._problem.carried:
                delivered = ends[before] + lag
                if is_late:
                    delivered = _largest(delivered, starts[before] + amounts.late_delivery[self.task_of[before]] + lag)
                longest = _largest(longest, -(-(delivered + chain_after[after]) // (periods + 1)))
        return longest

    def _chains_after(self, amounts: LeastAmounts) -> dict[str, Amount]:
        """Return for each activity a lower bound on the ticks from its start to the end of the period."""
        chain_after: dict[str, Amount] = {}
        for name in reversed(self._problem.order):
            task = self.task_of.get(name)
            duration = amounts.ticks[task] if task else amounts.transfer_ticks.get(name, 0)
            chains = [0, *(amounts.window_ticks(window) for window in self._windows_to_end.get(name, ()))]
            for _, after, lag, is_streamed, _ in self._after[name]:
                after_end = amounts.after_stream[self.task_of[after]] if is_streamed else chain_after[after]
                chains.append(lag + after_end)
            chain_after[name] = duration + _largest(*chains)
            for _, after, _, is_streamed, _ in self._after[name]:
                if is_streamed:
                    chain_after[name] = _largest(chain_after[name], chain_after[after])
        return chain_after

    def _spread_ticks(self, work: Mapping[str, Amount], window: ActivityWindow) -> Amount:
        """Return the ticks in which all ranks together do the work in a window."""
        inside = sum(work[self.task_of[name]] for name in window.between if name in self.task_of)
        return -(-inside // self._problem.num_ranks)


def _largest(*amounts: Amount) -> Amount:
    """Return the elementwise maximum."""
    largest: Amount = reduce(np.maximum, amounts)
    return largest


def _amounts_of(task: Task) -> ModeAmounts:
    rows = [(mode.ticks, mode.early_ticks, mode.late_ticks, mode.resource.num_ranks) for mode in task.modes]
    ticks, early, late, num_ranks = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    return ModeAmounts(ticks, ticks - early, ticks * num_ranks, ticks + late)
