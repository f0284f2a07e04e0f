"""The expected number of sequences that start in a slot in each time step of continuous batching."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Numbers: TypeAlias = NDArray[np.float64]

_EndOf: TypeAlias = Callable[[int, Numbers, Numbers], float]
"""The step in which a period ends, given its number from 1 on, and the cumulative starts and finishes by each step."""

_LIFETIMES = 4
"""Length of the time axis, in longest responses."""

_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class SlotRefills:
    """Expected starts per step [steps] in one slot; `ending[k]` is the probability that a sequence takes k + 1 steps.

    While sequences wait, a free slot is refilled at once. In a slot that is filled at time 0, starts form a renewal
    process: with p the distribution of response lengths, u(t) = sum_n p(n) u(t - n) start in step t, u(0) = 1 (Feller,
    An Introduction to Probability Theory, volume 1, chapter XIII). If a fraction v(t) of the slot is available,
    sequences start with the increments of v, each followed by such a process, so that live(t) = sum_a starts(t - a)
    P(R > a) equals v(t).
    """

    ending: Numbers

    @cached_property
    def alive(self) -> Numbers:
        """The probability that a sequence is alive k steps after its start [k]."""
        survival: Numbers = self.ending[::-1].cumsum()[::-1]
        return survival

    @cached_property
    def always(self) -> Numbers:
        """Starts in each step if sequences always wait."""
        longest = len(self.ending)
        starts = np.zeros(_LIFETIMES * longest)
        starts[0] = 1.0
        for step in range(1, len(starts)):
            previous = starts[max(0, step - longest) : step][::-1]
            starts[step] = previous @ self.ending[: len(previous)]
        return starts

    def alone(self, waiting: float) -> Numbers:
        """Return the starts of `waiting` sequences that wait at time 0, if none arrive later."""
        return self._starts_in(np.ones(len(self.always)), waiting)

    def evenly(self, batch: float, period: float) -> Numbers:
        """Return the starts if a batch waits at time 0 and another arrives every `turn` steps."""
        return self._simulate(batch, batch, lambda number, *_: int(number * period))

    def in_order(self, waiting: float, batch: float, longest: float) -> Numbers:
        """Return the starts if `waiting` sequences wait at time 0 and a batch arrives whenever the oldest is complete.

        A batch is complete `longest` steps after its first sequence has started, or at once if that has passed.
        """

        def end(number: int, starts: Numbers, _: Numbers) -> float:
            first = int(starts.searchsorted((number - 1) * batch + _ROUNDING))
            return first + int(longest) if first < len(starts) else np.inf

        return self._simulate(waiting, batch, end)

    def first_ended(self, waiting: float, batch: float) -> Numbers:
        """Return the starts if `waiting` sequences wait at time 0 and a batch arrives when as many have finished."""

        def end(number: int, _: Numbers, finished: Numbers) -> float:
            step = int(finished.searchsorted(number * batch - _ROUNDING))
            return step if step < len(finished) else np.inf

        return self._simulate(waiting, batch, end)

    def _simulate(self, waiting: float, batch: float, end_of: _EndOf) -> Numbers:
        """Simulate period after period to the end of the time axis."""
        longest, size = len(self.ending), len(self.always)
        starts, finished, live = np.zeros(size), np.zeros(size), np.zeros(size + longest)
        now, number = 0, 1
        while now < size:
            stop = min(size, now + longest)
            starts[now:stop] = self._starts_in(1 - live[now:stop], waiting)
            started = starts[:stop].cumsum()
            live_now = np.convolve(starts[now:stop], self.alive)[: stop - now]
            finished[now:stop] = started[now:] - live[now:stop] - live_now
            end = max(now, end_of(number, started, finished[:stop]))
            is_complete = end <= stop
            if is_complete:
                stop, number = int(end), number + 1
            starts[stop:] = 0.0
            if starts[now:stop].any():
                live[now : stop + longest - 1] += np.convolve(starts[now:stop], self.alive)
            waiting += batch * is_complete - float(starts[now:stop].sum())
            now = stop
        return starts

    def _starts_in(self, available: Numbers, waiting: float) -> Numbers:
        """Starts of `waiting` sequences in a slot whose `available` fraction does not decrease."""
        if waiting < _ROUNDING:
            return np.zeros(len(available))
        starts = np.convolve(np.diff(available, prepend=0.0), self.always[: len(available)])[: len(available)]
        limited: Numbers = np.diff(np.minimum(starts.cumsum(), waiting), prepend=0.0)
        return limited
