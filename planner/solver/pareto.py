"""Finds the Pareto-optimal rows of a table of amounts, all of which are better when smaller."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def undominated(amounts: Sequence[Sequence[float]]) -> list[int]:
    """Return the indices of the rows that no other row dominates, sorted by their amounts.

    Of equal rows the first is kept.
    """
    if len(amounts) < 2:
        return list(range(len(amounts)))
    table = np.array(amounts)
    kept = np.empty_like(table)
    indices: list[int] = []
    for index in np.lexsort(table.T[::-1]).tolist():  # a row comes after every row that dominates it
        row = table[index]
        if not (kept[: len(indices)] <= row).all(axis=1).any():
            kept[len(indices)] = row
            indices.append(index)
    return indices


def is_dominated(row: Sequence[float], table: npt.NDArray[np.float64]) -> bool:
    """Return True if some row of the table is nowhere larger than `row`."""
    return bool((table <= np.array(row)).all(axis=1).any())
