"""Axes: the positions of values along a picture, in percent of its width, and their ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_MAX_TICKS = 8
"""The most intervals between ticks, so that neighbouring labels fit on a narrow page."""

_LOG_RATIO = 4.0
"""The ratio of the largest to the smallest value from which an axis is logarithmic."""


@dataclass(frozen=True)
class Axis:
    """An axis from `low` to `high` over the whole width, linear or logarithmic."""

    low: float
    high: float
    ticks: tuple[float, ...]
    logarithmic: bool = False

    def percent(self, value: float) -> float:
        low, high, position = (math.log(v) if self.logarithmic else v for v in (self.low, self.high, value))
        return 100 * (position - low) / (high - low)

    def x(self, value: float) -> str:
        return f"{self.percent(value):.4g}%"


def linear(low: float, high: float) -> Axis:
    """Return a linear axis from `low` to `high` with ticks at round numbers."""
    high = high if high > low else low + 1.0
    rough = (high - low) / _MAX_TICKS
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(magnitude * m for m in (1, 2, 5, 10) if magnitude * m >= rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Axis(low, high, tuple(step * n for n in range(first, last + 1)))


def at_values(values: Sequence[float]) -> Axis:
    """Return an axis with ticks at the values and a margin around them; logarithmic for a wide range."""
    ticks = tuple(sorted(set(values)))
    low, high = ticks[0], ticks[-1]
    if low == high:
        return Axis(low - 1, high + 1, ticks)
    if low > 0 and high / low >= _LOG_RATIO:
        room = (high / low) ** 0.08
        return Axis(low / room, high * room, ticks, logarithmic=True)
    room = 0.08 * (high - low)
    return Axis(low - room, high + room, ticks)
