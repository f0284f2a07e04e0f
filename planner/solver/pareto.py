"""Finds the Pareto-optimal rows of a table of amounts, all of which are better when smaller."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_AT_ONCE = 256
"""Number of rows up to which all pairs are compared at once; beyond it, each row is compared with those kept so far."""


def undominated(amounts: Sequence[Sequence[float]] | npt.NDArray[np.float64]) -> list[int]:
    """Return the indices of the rows that no other row dominates, sorted by their amounts.

    Of equal rows the first is kept.
    """
    if len(amounts) < 2:
        return list(range(len(amounts)))
    table = np.asarray(amounts)
    order = np.lexsort(table.T[::-1])  # a row comes after every row that dominates it
    if len(order) <= _AT_ONCE:
        ordered = table[order].T
        is_no_larger = np.triu(np.ones((len(order), len(order)), dtype=np.bool_), 1)
        for column in ordered:
            is_no_larger &= column[:, np.newaxis] <= column
        kept_rows: list[int] = order[~is_no_larger.any(axis=0)].tolist()
        return kept_rows
    kept = np.empty_like(table)
    indices: list[int] = []
    for index in order.tolist():
        row = table[index]
        if not (kept[: len(indices)] <= row).all(axis=1).any():
            kept[len(indices)] = row
            indices.append(index)
    return indices
