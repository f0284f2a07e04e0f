"""Where values lie along a picture, in percent of its width, and which of them are marked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_MOST_TICKS = 8
"""Of an axis, one more at most where both ends are round: labels beside each other have room on a narrow page."""

_RATIO = 4.0
"""From this ratio between the largest and the smallest, values are spread by their logarithm."""


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high` over the whole width."""

    low: float
    high: float
    ticks: tuple[float, ...]
    logarithmic: bool = False

    def percent(self, value: float) -> float:
        low, high, here = (math.log(v) if self.logarithmic else v for v in (self.low, self.high, value))
        return 100 * (here - low) / (high - low)

    def x(self, value: float) -> str:
        return f"{self.percent(value):.4g}%"


def linear(low: float, high: float) -> Axis:
    """From `low` to `high`, ticks at round numbers in between."""
    high = high if high > low else low + 1.0
    rough = (high - low) / _MOST_TICKS
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(magnitude * m for m in (1, 2, 5, 10) if magnitude * m >= rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Axis(low, high, tuple(step * n for n in range(first, last + 1)))


def at_values(values: Sequence[float]) -> Axis:
    """Ticks at the values themselves, with room beside the outer ones; far apart they are spread by logarithm."""
    ticks = tuple(sorted(set(values)))
    low, high = ticks[0], ticks[-1]
    if low == high:
        return Axis(low - 1, high + 1, ticks)
    if low > 0 and high / low >= _RATIO:
        room = (high / low) ** 0.08
        return Axis(low / room, high * room, ticks, logarithmic=True)
    room = 0.08 * (high - low)
    return Axis(low - room, high + room, ticks)
