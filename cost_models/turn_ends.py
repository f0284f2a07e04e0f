"""When the periods of a generation end, given the rounds in which its sequences start and end.

The rules are those of `planner.simulation.flight`, which observes sequences as they end. Here all ends are known, so
the rules are arithmetic, on arrays with one row for each replica. Sequences take the slot that is free first, in their
order of arrival, as in `play` of `cost_models.turn_cost`, which simulates one replica in more detail.
"""

from __future__ import annotations

import numpy as np

from meshwright.cost_models.rounds import Integers

_BEFORE_ALL = 2**62
"""More than any round; subtracting it sorts a sequence before all others."""


class PeriodEnds:
    """The periods of replicas with equally many sequences; each period delivers `num_rows` of them per replica.

    Without `max_deferral` a period ends when its own batch is complete. With it (overcommit), a period ends when
    `num_rows` undelivered sequences have ended and every sequence that is due has: those that started `max_deferral`
    periods ago or earlier.
    """

    def __init__(self, num_replicas: int, num_rows: int, max_deferral: int | None) -> None:
        self._num_rows, self._max_deferral = num_rows, max_deferral
        self._bounds = [np.zeros(num_replicas, dtype=np.int64)]
        self._start = self._end = np.zeros((num_replicas, 0), dtype=np.int64)
        self._replicas = np.arange(num_replicas)[:, None]

    @property
    def bounds(self) -> Integers:
        """The rounds at which the periods begin and end, [replica, 1 + periods]."""
        return np.stack(self._bounds, axis=1)

    def add(self, start: Integers, end: Integers) -> None:
        """Add admitted sequences in order of arrival, with their first and end rounds: [replica, sequence]."""
        self._start, self._end = (np.concatenate(both, axis=1) for both in ((self._start, start), (self._end, end)))

    def end_period(self) -> Integers:
        """End the current period and deliver its sequences; return the rounds in which it ends, [replica]."""
        ended = self._in_order() if self._max_deferral is None else self._first_ended(self._max_deferral)
        self._bounds.append(np.maximum(self._bounds[-1], ended))
        return self._bounds[-1]

    def _in_order(self) -> Integers:
        """Deliver the sequences that arrived first; return the rounds in which the last of them end."""
        ended: Integers = self._end[:, : self._num_rows].max(axis=1)
        self._start, self._end = self._start[:, self._num_rows :], self._end[:, self._num_rows :]
        return ended

    def _first_ended(self, max_deferral: int) -> Integers:
        """Deliver the sequences that are due and the first others to end.

        Returns the rounds in which enough sequences have ended and all due ones.
        """
        first_allowed = len(self._bounds) - max_deferral
        due = self._start < (self._bounds[first_allowed][:, None] if first_allowed > 0 else 0)
        count_reached = np.partition(self._end, self._num_rows - 1, axis=1)[:, self._num_rows - 1]
        ended: Integers = np.maximum(count_reached, np.where(due, self._end, 0).max(axis=1))
        undelivered = np.argsort(np.where(due, self._end - _BEFORE_ALL, self._end), axis=1, kind="stable")[
            :, self._num_rows :
        ]
        undelivered.sort(axis=1)
        self._start, self._end = self._start[self._replicas, undelivered], self._end[self._replicas, undelivered]
        return ended


def period_bounds(
    responses: Integers, *, num_slots: int, num_rows: int, in_flight: int, num_periods: int, max_deferral: int | None
) -> Integers:
    """Return the rounds at which the periods begin and end, [replica, 1 + num_turns], by the rules of `TurnEnds`.

    `responses` [replica, sequence] arrive in order: `in_flight` of them at the start, `num_rows` in each later
    period.
    """
    num_replicas = len(responses)
    free = np.zeros((num_replicas, num_slots), dtype=np.int64)
    turns = PeriodEnds(num_replicas, num_rows, max_deferral)
    arriving, release = responses[:, :in_flight], np.zeros(num_replicas, dtype=np.int64)
    for turn in range(num_periods):
        start = _admit(free, arriving, release)
        turns.add(start, start + arriving)
        release = turns.end_period()
        arriving = responses[:, in_flight + turn * num_rows : in_flight + (turn + 1) * num_rows]
    return turns.bounds


def _admit(free: Integers, responses: Integers, release: Integers) -> Integers:
    """Return the rounds in which responses start that arrive in round `release` [replica].

    `free` [replica, slot] holds the rounds from which the slots are free; it is updated.
    """
    starts, replicas = np.empty_like(responses), np.arange(len(responses))
    for index in range(responses.shape[1]):
        slots = free.argmin(axis=1)
        starts[:, index] = start = np.maximum(free[replicas, slots], release)
        free[replicas, slots] = start + responses[:, index]
    return starts
