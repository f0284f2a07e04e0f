"""Many replicas' turns of a generation, played side by side: when each turn of each replica ends.

The rules are those of `play` in `cost_models.turn_cost`, which plays one replica and knows more of it: sequences take
the slot that is free first in their order of arrival, and a turn ends by what it delivers. All replicas have as many
sequences, so that a turn of all of them is one of arrays.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


def bounds_of(
    responses: Integers, *, num_slots: int, num_rows: int, in_flight: int, num_turns: int, max_deferral: int | None
) -> Integers:
    """The rounds between which the turns lie, [replica, 1 + num_turns].

    `responses` [replica, sequence] arrive in their order: `in_flight` of them at the start, `num_rows` with each later
    turn. Without `max_deferral` a turn ends when its own batch is complete; with it, as for overcommit, when so many
    undelivered sequences have ended, and every one that is due.
    """
    num_replicas = len(responses)
    free = np.zeros((num_replicas, num_slots), dtype=np.int64)
    bounds = np.zeros((num_replicas, 1 + num_turns), dtype=np.int64)
    start = _admitted(free, responses[:, :in_flight], bounds[:, 0])
    waiting = _Waiting(start, start + responses[:, :in_flight])
    for turn in range(num_turns):
        if max_deferral is None:
            bounds[:, turn + 1] = np.maximum(bounds[:, turn], waiting.first(num_rows))
        else:
            last_due = turn + 1 - max_deferral
            before = bounds[:, last_due] if last_due > 0 else np.zeros(num_replicas, dtype=np.int64)
            bounds[:, turn + 1] = np.maximum(bounds[:, turn], waiting.first_ended(num_rows, before))
        arriving = responses[:, in_flight + turn * num_rows : in_flight + (turn + 1) * num_rows]
        start = _admitted(free, arriving, bounds[:, turn + 1])
        waiting.add(start, start + arriving)
    return bounds


def _admitted(free: Integers, responses: Integers, release: Integers) -> Integers:
    """The rounds in which responses start that arrive in round `release` [replica]; `free` [replica, slot] are the
    rounds in which the slots are free, and are brought up to date."""
    starts, replicas = np.empty_like(responses), np.arange(len(responses))
    for index in range(responses.shape[1]):
        slots = free.argmin(axis=1)
        starts[:, index] = start = np.maximum(free[replicas, slots], release)
        free[replicas, slots] = start + responses[:, index]
    return starts


class _Waiting:
    """What is not delivered yet: the rounds in which each sequence starts and ends, [replica, sequence]."""

    def __init__(self, start: Integers, end: Integers) -> None:
        self._start, self._end = start, end

    def add(self, start: Integers, end: Integers) -> None:
        self._start, self._end = np.hstack([self._start, start]), np.hstack([self._end, end])

    def first(self, count: int) -> Integers:
        """Delivers the `count` that came first; the rounds in which the last of them end."""
        ended: Integers = self._end[:, :count].max(axis=1)
        self._start, self._end = self._start[:, count:], self._end[:, count:]
        return ended

    def first_ended(self, count: int, due_before: Integers) -> Integers:
        """Delivers those that started before `due_before` [replica] and the first others to end, `count` in all; the
        rounds in which `count` have ended, and those that were due."""
        due = self._start < due_before[:, None]
        enough = np.partition(self._end, count - 1, axis=1)[:, count - 1]
        ended: Integers = np.maximum(enough, np.where(due, self._end, 0).max(axis=1))
        left = np.lexsort((self._end, ~due), axis=1)[:, count:]
        left.sort(axis=1)
        self._start, self._end = (np.take_along_axis(times, left, axis=1) for times in (self._start, self._end))
        return ended
