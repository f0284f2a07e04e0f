"""Which of several rows of amounts, all of them better when smaller, no other row beats."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def undominated(amounts: Sequence[Sequence[float]]) -> list[int]:
    """The indices of the rows that no other beats, by their amounts from the first on; of equals the first stays."""
    if len(amounts) < 2:
        return list(range(len(amounts)))
    table = np.array(amounts)
    kept = np.empty_like(table)
    found: list[int] = []
    for index in np.lexsort(table.T[::-1]).tolist():  # whatever beats a row comes before it
        row = table[index]
        if not (kept[: len(found)] <= row).all(axis=1).any():
            kept[len(found)] = row
            found.append(index)
    return found


def beaten(row: Sequence[float], table: npt.NDArray[np.float64]) -> bool:
    """Whether a row of the table is nowhere larger."""
    return bool((table <= np.array(row)).all(axis=1).any())
