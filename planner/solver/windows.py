"""Finds the tasks that must run between two others, on which the bounds by work are based."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from meshwright.planner.solver.problem import Precedence, Problem


class TaskWindow(NamedTuple):
    """The tasks after the end of `after` and before the start of `before`; None is an end of the period."""

    after: str | None
    before: str | None
    between: tuple[str, ...]


def windows(problem: Problem) -> tuple[TaskWindow, ...]:
    """Return every window with at least two tasks that is not the concatenation of two others."""
    return _windows(problem.order, problem.precedences)


@lru_cache(maxsize=8)  # the search asks for the same tasks again and again, with fewer and fewer options
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
            splits = any(between <= following[node] | preceding[node] | {node} for node in between)
            if len(between) > 1 and not splits:
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
