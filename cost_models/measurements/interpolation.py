"""Piecewise-linear curves and surfaces through measured points.

Beyond the points the nearest piece is extended; the result is marked as extrapolated and is never negative.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from meshwright.cost_models.cost import Source, least_trusted


class Curve:
    """Seconds as a function of one size; a single point scales in proportion to the size."""

    def __init__(self, points: Mapping[float, float]) -> None:
        self._sizes = sorted(points)
        self._seconds = [points[size] for size in self._sizes]

    def at(self, size: float) -> tuple[float, Source]:
        """Return the seconds at a size, and their source."""
        return _line(self._sizes, self._seconds, size)


class Surface:
    """Seconds as a function of rows and a length: a curve over rows for each measured length, interpolated linearly."""

    def __init__(self, points: Mapping[tuple[float, float], float]) -> None:
        self._lengths = sorted({length for _, length in points})
        self._curves = [
            Curve({rows: seconds for (rows, other), seconds in points.items() if other == length})
            for length in self._lengths
        ]

    def at(self, rows: float, length: float) -> tuple[float, Source]:
        """Return the seconds at a number of rows and a length, and their source."""
        values = [curve.at(rows) for curve in self._curves]
        seconds, source = _line(self._lengths, [value for value, _ in values], length)
        if source is Source.MEASURED:
            return values[self._lengths.index(length)]
        return seconds, least_trusted([source, *(source_of_curve for _, source_of_curve in values)])


def _line(sizes: Sequence[float], seconds: Sequence[float], size: float) -> tuple[float, Source]:
    index = bisect_left(sizes, size)
    if index < len(sizes) and sizes[index] == size:
        return seconds[index], Source.MEASURED
    if len(sizes) == 1:
        return seconds[0] * size / sizes[0], Source.EXTRAPOLATED
    left = min(max(index - 1, 0), len(sizes) - 2)
    slope = (seconds[left + 1] - seconds[left]) / (sizes[left + 1] - sizes[left])
    value = max(0.0, seconds[left] + slope * (size - sizes[left]))
    return value, Source.INTERPOLATED if 0 < index < len(sizes) else Source.EXTRAPOLATED
