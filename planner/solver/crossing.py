"""Finds options on ranks that cross, that is, intersect without being nested; no answer has two such options."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.solver.problem import Problem

Array: TypeAlias = NDArray[np.int64]


class Crossing:
    """The rank ranges of one problem's options, numbered, and which of them cross.

    `numbers` has for each call the number of each option's range, [options]; `common` has the number of common ranks of
    every two ranges, and `crosses` whether they cross, both [ranges, ranges].
    """

    def __init__(self, problem: Problem) -> None:
        ranks: dict[range, int] = {}
        self.numbers: list[Array] = [
            np.array([ranks.setdefault(option.place.ranks, len(ranks)) for option in call.options], dtype=np.int64)
            for call in problem.calls
        ]
        start, stop = (np.array(ends, dtype=np.int64) for ends in ([r.start for r in ranks], [r.stop for r in ranks]))
        self.common: Array = np.maximum(0, np.minimum.outer(stop, stop) - np.maximum.outer(start, start))
        smaller = np.minimum.outer(stop - start, stop - start)
        self.crosses: NDArray[np.bool_] = (self.common > 0) & (self.common < smaller)
        self._is_possible = bool(self.crosses.any())

    def count(self, columns: Sequence[Array]) -> Array:
        """Return the number of pairs of calls that cross, [choices].

        `columns` has for each call its option index in each choice, [choices], or [1] if all choices have the same.
        """
        num_crossing = np.zeros(max(map(len, columns)), dtype=np.int64)
        if self._is_possible:
            range_numbers = [numbers[chosen] for numbers, chosen in zip(self.numbers, columns, strict=True)]
            for one, other in combinations(range_numbers, 2):
                num_crossing += self.crosses[one, other]
        return num_crossing
