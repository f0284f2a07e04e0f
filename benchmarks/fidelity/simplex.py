"""Minimisation without derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

_FIRST_STEP = 0.2
"""Share by which each coordinate of the first simplex is moved."""


def minimise(
    loss: Callable[[NDArray[np.float64]], float], start: Sequence[float], *, rounds: int
) -> tuple[NDArray[np.float64], float]:
    """The best point and its loss after `rounds` steps of a simplex (Nelder and Mead, Computer Journal 7(4), 1965)."""
    first = np.array(start, dtype=float)
    points = [first] + [first + step for step in np.diag(_FIRST_STEP * first)]
    ranked = sorted(((loss(point), point) for point in points), key=lambda pair: pair[0])
    for _ in range(rounds):
        middle = np.mean([point for _, point in ranked[:-1]], axis=0)
        worst = ranked[-1][1]
        mirrored = _tried(loss, 2 * middle - worst)
        if mirrored[0] < ranked[0][0]:
            chosen = min(mirrored, _tried(loss, 3 * middle - 2 * worst), key=lambda pair: pair[0])
        elif mirrored[0] < ranked[-2][0]:
            chosen = mirrored
        else:
            chosen = _tried(loss, (middle + worst) / 2)
        if chosen[0] < ranked[-1][0]:
            ranked[-1] = chosen
        else:
            best = ranked[0][1]
            ranked = [ranked[0]] + [_tried(loss, (best + point) / 2) for _, point in ranked[1:]]
        ranked.sort(key=lambda pair: pair[0])
    return ranked[0][1], ranked[0][0]


def _tried(
    loss: Callable[[NDArray[np.float64]], float], point: NDArray[np.float64]
) -> tuple[float, NDArray[np.float64]]:
    return loss(point), point
