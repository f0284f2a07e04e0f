"""The oracle: the best answer to a small problem by trying every choice and every order.

It shares the problem's own arithmetic (durations, memory) with nobody else's search. Only for a handful of tasks.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from meshwright.planner.solver.problem import Mode, Problem


def best_makespan(problem: Problem) -> int | None:
    """The least ticks in which all activities end, or None when no choice of modes fits in memory."""
    best: int | None = None
    names = [task.name for task in problem.tasks]
    for modes in itertools.product(*(task.modes for task in problem.tasks)):
        picked = dict(zip(names, modes, strict=True))
        if _may_be(modes) and max(problem.memory(picked), default=0) <= problem.device_units:
            shortest = _shortest_turn if problem.carried else _best_order
            found = shortest(problem, picked, best)
            best = found if best is None else min(best, found)
    return best


def least_memory(problem: Problem) -> int | None:
    """The least blocks a device can have so that some choice of modes fits, or None when a task has no mode."""
    names = [task.name for task in problem.tasks]
    return min(
        (
            max(problem.memory(dict(zip(names, modes, strict=True))))
            for modes in itertools.product(*(task.modes for task in problem.tasks))
            if _may_be(modes)
        ),
        default=None,
    )


def _may_be(modes: Sequence[Mode]) -> bool:
    """Whether of two tasks' ranks some of one lie in the other's only if all do."""
    ranks = [frozenset(mode.resource.ranks) for mode in modes]
    return all(not a & b or a <= b or b <= a for a, b in itertools.combinations(ranks, 2))


def _best_order(problem: Problem, picked: Mapping[str, Mode], bound: int | None) -> int:
    """The least makespan over all orders in which activities start; an order that cannot beat `bound` is not
    finished."""
    limit = problem.horizon + 1 if bound is None else bound
    resources = {name: mode.resource for name, mode in picked.items()}
    ticks = {activity.name: problem.duration(activity, picked) for activity in problem.activities}
    ranks = {
        activity.name: problem.occupied(activity, resources) if ticks[activity.name] else frozenset()
        for activity in problem.activities
    }
    early = {activity.name: problem.early(activity, picked) for activity in problem.activities}
    late = {activity.name: problem.late(activity, picked) for activity in problem.activities}
    waits = {name: [p for p in problem.precedences if p.after == name] for name in ticks}
    free = dict.fromkeys(range(problem.num_ranks), 0)
    behind: dict[
        str, int
    ] = {}  # the ticks from the end of an activity to that of the longest line of activities after it
    for name in reversed(problem.order):
        after = (p for p in problem.precedences if p.before == name and not p.streamed)
        behind[name] = max((p.lag + ticks[p.after] + behind[p.after] for p in after), default=0)

    work = [sum(ticks[name] for name, occupied in ranks.items() if rank in occupied) for rank in free]
    if max(work) >= limit:
        return limit

    def extend(ends: dict[str, int], free: dict[int, int], last: int, best: int) -> int:
        if len(ends) == len(ticks):
            return min(best, max(ends.values()))
        for name, duration in ticks.items():
            if name in ends or any(p.before not in ends for p in waits[name]):
                continue
            ready = max(
                (
                    p.earliest(ends[p.before] - ticks[p.before], ends[p.before], early[name], late[p.before])
                    for p in waits[name]
                ),
                default=0,
            )
            start = max(ready, max((free[rank] for rank in ranks[name]), default=0))
            end = start + duration
            if start >= last and end + behind[name] < best:
                best = extend({**ends, name: end}, {**free, **dict.fromkeys(ranks[name], end)}, start, best)
        return best

    return extend({}, free, 0, limit)


def _shortest_turn(problem: Problem, picked: Mapping[str, Mode], bound: int | None) -> int:
    """The least length of a turn over all orders, or `bound` where none is shorter. What has to lie between the starts
    of two activities is one list of waits, whatever says it."""
    ticks = {activity.name: problem.duration(activity, picked) for activity in problem.activities}
    resources = {name: mode.resource for name, mode in picked.items()}
    ranks = {
        activity.name: problem.occupied(activity, resources) if ticks[activity.name] else frozenset()
        for activity in problem.activities
    }
    early = {activity.name: problem.early(activity, picked) for activity in problem.activities}
    late = {activity.name: problem.late(activity, picked) for activity in problem.activities}
    waits: list[_Wait] = []
    for p in problem.precedences:
        lag = ticks[p.before] + p.lag + late[p.before] * p.late
        waits.append((p.before, p.after, lag - early[p.after] if p.streamed else lag, 0))
        if p.streamed:
            waits.append((p.before, p.after, 0, 0))
    waits += [
        (c.before, c.after, ticks[c.before] + c.lag + late[c.before] * c.late, c.periods) for c in problem.carried
    ]
    best = problem.horizon + 1 if bound is None else bound
    least = _best_order(replace(problem, carried=()), picked, best)

    def extend(order: tuple[str, ...], ends: Mapping[str, int], best: int) -> int:
        """The best of the orders that go on so, each activity as early as it can."""
        if len(order) == len(ticks):
            turns = [(a, b, ticks[a], 0) for a, b in itertools.combinations(order, 2) if ranks[a] & ranks[b]]
            return _least_length([*waits, *turns], ticks, best)
        for name, lasts in ticks.items():
            if (
                best == least
                or name in ends
                or any(p.before not in ends for p in problem.precedences if p.after == name)
            ):
                continue
            ready = [ends[b] - ticks[b] + lag for b, after, lag, turns in waits if after == name and not turns]
            free = [ends[one] for one in order if ranks[one] & ranks[name]]
            end = max([0, *ready, *free]) + lasts
            if end < best:
                best = extend((*order, name), {**ends, name: end}, best)
        return best

    return best if least >= best else extend((), {}, best)


def _least_length(waits: Sequence[_Wait], ticks: Mapping[str, int], best: int) -> int:
    """The least length of a turn that keeps the waits, or `best`: what fits into a turn fits into a longer one."""
    if not _is_a_turn(best - 1, ticks, waits):
        return best
    low, high = 0, best - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _is_a_turn(middle, ticks, waits) else (middle + 1, high)
    return low


_Wait: TypeAlias = tuple[str, str, int, int]
"""Two activities, ticks from the start of one to that of the other, and how many turns later the other is."""


def _is_a_turn(length: int, ticks: Mapping[str, int], waits: Sequence[_Wait]) -> bool:
    """Whether all activities fit into a turn of this length and keep their waits (Bellman and Ford)."""
    starts = dict.fromkeys(ticks, 0)
    for _ in range(len(ticks) + 1):
        changed = False
        for before, after, lag, turns in waits:
            earliest = starts[before] + lag - turns * length
            if earliest > starts[after]:
                starts[after], changed = earliest, True
        if any(starts[name] + ticks[name] > length for name in ticks):
            return False
        if not changed:
            return True
    return False
