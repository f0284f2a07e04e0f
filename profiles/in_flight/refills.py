"""How many sequences begin in a slot, step by step: at once while some wait, and else as batches arrive.

While sequences wait, a slot is taken by one after another. From a slot that is taken at 0 they begin as in a renewal
process: with p the probabilities of response lengths, u(t) = sum_n p(n) u(t - n) in step t, u(0) = 1 (Feller, An
Introduction to Probability Theory, volume 1, chapter XIII). Where v(t) is free for them they begin with the increments
of v, each followed by such a process, so that live(t) = sum_a begun(t - a) P(R > a) fills it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Numbers: TypeAlias = NDArray[np.float64]

_EndOf: TypeAlias = Callable[[int, Numbers, Numbers], float]
"""The step in which a turn ends, by its number from 1 on and what has begun and ended by each step."""

_LIFETIMES = 4
"""Longest responses that steps are counted over."""

_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class Refills:
    """Of one slot in expectation; `ending` has the probability that a sequence takes k + 1 steps."""

    ending: Numbers

    @cached_property
    def alive(self) -> Numbers:
        """The probability that a sequence is not over after so many steps."""
        found: Numbers = self.ending[::-1].cumsum()[::-1]
        return found

    @cached_property
    def always(self) -> Numbers:
        """Sequences that begin in each step where there are always some that wait."""
        longest = len(self.ending)
        begun = np.zeros(_LIFETIMES * longest)
        begun[0] = 1.0
        for step in range(1, len(begun)):
            before = begun[max(0, step - longest) : step][::-1]
            begun[step] = before @ self.ending[: len(before)]
        return begun

    def alone(self, waiting: float) -> Numbers:
        """Of so many that wait at the start, behind which none arrive."""
        return self._until(np.ones(len(self.always)), waiting)

    def evenly(self, batch: float, turn: float) -> Numbers:
        """Of a batch that waits at the start and one more after each so many steps."""
        return self._played(batch, batch, lambda number, *_: int(number * turn))

    def in_order(self, waiting: float, batch: float, longest: float) -> Numbers:
        """Of so many that wait at the start, and a batch that arrives whenever the first one is complete: `longest`
        steps after it began, or at once if it was before."""

        def end(number: int, begun: Numbers, _: Numbers) -> float:
            first = int(begun.searchsorted((number - 1) * batch + _ROUNDING))
            return first + int(longest) if first < len(begun) else np.inf

        return self._played(waiting, batch, end)

    def first_ended(self, waiting: float, batch: float) -> Numbers:
        """Of so many that wait at the start, and a batch that arrives whenever as many have ended."""

        def end(number: int, _: Numbers, ended: Numbers) -> float:
            step = int(ended.searchsorted(number * batch - _ROUNDING))
            return step if step < len(ended) else np.inf

        return self._played(waiting, batch, end)

    def _played(self, waiting: float, batch: float, end_of: _EndOf) -> Numbers:
        """Turn after turn, as far as steps are counted."""
        longest, size = len(self.ending), len(self.always)
        begun, ended, live = np.zeros(size), np.zeros(size), np.zeros(size + longest)
        now, number = 0, 1
        while now < size:
            until = min(size, now + longest)
            begun[now:until] = self._until(1 - live[now:until], waiting)
            begun_by = begun[:until].cumsum()
            here = np.convolve(begun[now:until], self.alive)[: until - now]
            ended[now:until] = begun_by[now:] - live[now:until] - here
            end = max(now, end_of(number, begun_by, ended[:until]))
            arrived = end <= until
            if arrived:
                until, number = int(end), number + 1
            begun[until:] = 0.0
            if begun[now:until].any():
                live[now : until + longest - 1] += np.convolve(begun[now:until], self.alive)
            waiting += batch * arrived - float(begun[now:until].sum())
            now = until
        return begun

    def _until(self, room: Numbers, waiting: float) -> Numbers:
        """What begins where `room` is free for as many as wait, which grows."""
        if waiting < _ROUNDING:
            return np.zeros(len(room))
        begun = np.convolve(np.diff(room, prepend=0.0), self.always[: len(room)])[: len(room)]
        found: Numbers = np.diff(np.minimum(begun.cumsum(), waiting), prepend=0.0)
        return found
