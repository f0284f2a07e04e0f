"""Which tasks must run between which others: the ground of the bounds on work."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from meshwright.planner.solver.problem import Precedence, Problem


class TaskWindow(NamedTuple):
    """The tasks that start after `after` ended and end before `before` starts; None is the start or end of all."""

    after: str | None
    before: str | None
    between: tuple[str, ...]


def windows(problem: Problem) -> tuple[TaskWindow, ...]:
    """Every window with two tasks or more that is not the sum of two others."""
    return _windows(problem.order, problem.precedences)


@lru_cache(maxsize=8)  # the search asks for the same tasks again and again, with fewer and fewer options
def _windows(order: tuple[str, ...], precedences: tuple[Precedence, ...]) -> tuple[TaskWindow, ...]:
    below = _followers(order, precedences)
    above: dict[str | None, set[str]] = {task: {one for one in order if task in below[one]} for task in order}
    above[None] = set(order)
    found = []
    for after in (None, *order):
        for before in (*order, None):
            between = below[after] & above[before]
            splits = any(between <= below[node] | above[node] | {node} for node in between)
            if len(between) > 1 and not splits:
                found.append(TaskWindow(after, before, tuple(name for name in order if name in between)))
    return tuple(found)


def followers(problem: Problem) -> dict[str | None, set[str]]:
    """For each task those that start after it has ended; all for None."""
    return _followers(problem.order, problem.precedences)


def _followers(order: tuple[str, ...], precedences: tuple[Precedence, ...]) -> dict[str | None, set[str]]:
    """What is streamed to starts after its producer has started and ends after it has ended; no more is counted on."""
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
