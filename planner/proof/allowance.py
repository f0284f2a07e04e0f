"""What a turn leaves to one stage beside the least of the others: a choice that takes more is in no plan so fast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

_ROUNDING = 1e-9
"""Relative: sums of seconds that are equal may differ by this."""


class Least(NamedTuple):
    """Of all choices of a stage that are left: the least seconds that remain when what they stream has ended, and the
    least of these times the ranks."""

    seconds: float
    work: float


@dataclass(frozen=True)
class Allowance:
    """The most seconds of one stage, and the most ranks x seconds."""

    seconds: float
    work: float

    def allows(self, num_ranks: int, seconds: float) -> bool:
        """Whether a choice on so many ranks is in a turn that is short enough, as far as is known."""
        return seconds <= self.seconds and num_ranks * seconds <= self.work

    def holds(self, other: Allowance) -> bool:
        """Whether it leaves as much as another, or more."""
        return other.seconds <= self.seconds and other.work <= self.work


@dataclass(frozen=True)
class ShortTurn:
    """A turn of at most so many seconds on so many ranks.

    `lags` are the seconds of what is handed over within it, by producer and consumer; `names` has producers before
    consumers.
    """

    most_seconds: float
    num_ranks: int
    names: tuple[str, ...]
    lags: Mapping[tuple[str, str], float]

    def left_to(self, stage: str, least: Mapping[str, Least]) -> Allowance:
        """What is left to a stage beside the least of others that are known: along the longest way through the turn,
        and of the seconds of all ranks."""
        others = {name: found for name, found in least.items() if name != stage}
        edges = [(self.names.index(one), self.names.index(other), lag) for (one, other), lag in self.lags.items()]
        own = [others[name].seconds if name in others else 0.0 for name in self.names]
        place, last = self.names.index(stage), len(self.names) - 1
        before = _longest(own, edges)[place]
        behind = _longest(own[::-1], [(last - other, last - one, lag) for one, other, lag in edges])[last - place]
        room = self.most_seconds * (1 + _ROUNDING)
        return Allowance(room - before - behind, room * self.num_ranks - sum(found.work for found in others.values()))


def _longest(seconds: list[float], edges: list[tuple[int, int, float]]) -> list[float]:
    """Of each place the seconds of the longest way that leads to it."""
    starts = [0.0] * len(seconds)
    for place in range(len(seconds)):
        ways = (starts[one] + seconds[one] + lag for one, other, lag in edges if other == place)
        starts[place] = max(ways, default=0.0)
    return starts
