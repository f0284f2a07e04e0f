"""When the turns of a generation end, from the rounds in which its sequences start and end.

The rules are those by which a flight ends its turns (`planner.simulation.flight`), who meets its sequences as they end;
where all ends are known they are arithmetic, and that of many replicas is that of arrays: they have as many sequences
each, so that their turns are played side by side. Sequences take the slot that is free first in their order of arrival,
as in `play` of `cost_models.turn_cost`, which plays one replica and knows more of it.
"""

from __future__ import annotations

import numpy as np

from meshwright.cost_models.rounds import Integers

_FIRST = 2**62
"""Rounds; so many fewer than any that is counted are before all of them."""


class TurnEnds:
    """The turns of replicas that have as many sequences each, of which a turn delivers `num_rows`.

    Without `max_deferral` a turn ends when its own batch is complete. With it, as for overcommit, a turn ends when so
    many undelivered sequences have ended, and every one that is due: those that started `max_deferral` turns ago or
    earlier.
    """

    def __init__(self, num_replicas: int, num_rows: int, max_deferral: int | None) -> None:
        self._num_rows, self._max_deferral = num_rows, max_deferral
        self._bounds = [np.zeros(num_replicas, dtype=np.int64)]
        self._start = self._end = np.zeros((num_replicas, 0), dtype=np.int64)
        self._replicas = np.arange(num_replicas)[:, None]

    @property
    def bounds(self) -> Integers:
        """The rounds between which the turns lie, [replica, 1 + turns]."""
        return np.stack(self._bounds, axis=1)

    def add(self, start: Integers, end: Integers) -> None:
        """Sequences that were admitted, in the order of their arrival, [replica, sequence]."""
        self._start, self._end = (np.concatenate(both, axis=1) for both in ((self._start, start), (self._end, end)))

    def next(self) -> Integers:
        """Ends the turn that began in the last of `bounds`, and delivers; the rounds in which it ends, [replica]."""
        ended = self._in_order() if self._max_deferral is None else self._first_ended(self._max_deferral)
        self._bounds.append(np.maximum(self._bounds[-1], ended))
        return self._bounds[-1]

    def _in_order(self) -> Integers:
        """Delivers those that came first; the rounds in which the last of them end."""
        ended: Integers = self._end[:, : self._num_rows].max(axis=1)
        self._start, self._end = self._start[:, self._num_rows :], self._end[:, self._num_rows :]
        return ended

    def _first_ended(self, max_deferral: int) -> Integers:
        """Delivers those that are due and the first others to end; the rounds in which so many have ended, and those
        that were due."""
        after = len(self._bounds) - max_deferral
        due = self._start < (self._bounds[after][:, None] if after > 0 else 0)
        enough = np.partition(self._end, self._num_rows - 1, axis=1)[:, self._num_rows - 1]
        ended: Integers = np.maximum(enough, np.where(due, self._end, 0).max(axis=1))
        left = np.argsort(np.where(due, self._end - _FIRST, self._end), axis=1, kind="stable")[:, self._num_rows :]
        left.sort(axis=1)
        self._start, self._end = self._start[self._replicas, left], self._end[self._replicas, left]
        return ended


def bounds_of(
    responses: Integers, *, num_slots: int, num_rows: int, in_flight: int, num_turns: int, max_deferral: int | None
) -> Integers:
    """The rounds between which the turns lie, [replica, 1 + num_turns].

    `responses` [replica, sequence] arrive in their order: `in_flight` of them at the start, `num_rows` with each later
    turn. Turns end as `TurnEnds` ends them.
    """
    num_replicas = len(responses)
    free = np.zeros((num_replicas, num_slots), dtype=np.int64)
    turns = TurnEnds(num_replicas, num_rows, max_deferral)
    arriving, release = responses[:, :in_flight], np.zeros(num_replicas, dtype=np.int64)
    for turn in range(num_turns):
        start = _admitted(free, arriving, release)
        turns.add(start, start + arriving)
        release = turns.next()
        arriving = responses[:, in_flight + turn * num_rows : in_flight + (turn + 1) * num_rows]
    return turns.bounds


def _admitted(free: Integers, responses: Integers, release: Integers) -> Integers:
    """The rounds in which responses start that arrive in round `release` [replica]; `free` [replica, slot] are the
    rounds in which the slots are free, and are brought up to date."""
    starts, replicas = np.empty_like(responses), np.arange(len(responses))
    for index in range(responses.shape[1]):
        slots = free.argmin(axis=1)
        starts[:, index] = start = np.maximum(free[replicas, slots], release)
        free[replicas, slots] = start + responses[:, index]
    return starts
