"""Computes how much time a stage may take if the other stages take their least and the period stays short enough.

A choice that takes more is in no plan with so short a period.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

_ROUNDING = 1e-9
"""Relative difference that may occur between equal sums of seconds."""


class LeastTime(NamedTuple):
    """Lower bounds over the remaining choices of a stage: tail seconds, and tail seconds x ranks."""

    seconds: float
    work: float


@dataclass(frozen=True)
class Allowance:
    """The longest seconds of one stage, and the largest ranks x seconds."""

    seconds: float
    work: float

    def allows(self, num_ranks: int, seconds: float) -> bool:
        """Return True if a choice on this many ranks may be in a short enough period."""
        return seconds <= self.seconds and num_ranks * seconds <= self.work

    def holds(self, other: Allowance) -> bool:
        """Return True if this allowance leaves at least as much as the other."""
        return other.seconds <= self.seconds and other.work <= self.work


@dataclass(frozen=True)
class ShortPeriod:
    """A period of at most `most_seconds` on `num_ranks` ranks.

    `lags` are the seconds of the transfers within it, by producer and consumer; `names` has producers before consumers.
    """

    max_seconds: float
    num_ranks: int
    names: tuple[str, ...]
    lags: Mapping[tuple[str, str], float]

    def allowance_of(self, stage: str, least: Mapping[str, LeastTime]) -> Allowance:
        """Return what is left to a stage beside the known least of the others.

        Both the longest path through the period and the total ranks x seconds limit it.
        """
        others = {name: stage_least for name, stage_least in least.items() if name != stage}
        edges = [
            (self.names.index(producer), self.names.index(consumer), lag)
            for (producer, consumer), lag in self.lags.items()
        ]
        seconds = [others[name].seconds if name in others else 0.0 for name in self.names]
        position, last = self.names.index(stage), len(self.names) - 1
        before = _longest_paths(seconds, edges)[position]
        after = _longest_paths(
            seconds[::-1], [(last - consumer, last - producer, lag) for producer, consumer, lag in edges]
        )[last - position]
        max_seconds = self.max_seconds * (1 + _ROUNDING)
        return Allowance(
            max_seconds - before - after,
            max_seconds * self.num_ranks - sum(stage_least.work for stage_least in others.values()),
        )


def _longest_paths(seconds: list[float], edges: list[tuple[int, int, float]]) -> list[float]:
    """Return for each stage the length in seconds of the longest path that ends before it."""
    starts = [0.0] * len(seconds)
    for position in range(len(seconds)):
        paths = (
            starts[producer] + seconds[producer] + lag for producer, consumer, lag in edges if consumer == position
        )
        starts[position] = max(paths, default=0.0)
    return starts
