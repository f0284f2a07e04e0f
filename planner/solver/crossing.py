"""Which options are on ranks that cross: that have some ranks in common while each has others. No answer has such."""

from __future__ import annotations

from itertools import combinations
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.solver.problem import Problem

Array: TypeAlias = NDArray[np.int64]


class Crossing:
    """Of one problem: `numbers` has for each call, in their order, the numbers of its options' ranks, [options];
    `crosses` says of every two numbers whether they cross, [numbers, numbers]."""

    def __init__(self, problem: Problem) -> None:
        ranks: dict[range, int] = {}
        self.numbers: list[Array] = [
            np.array([ranks.setdefault(option.place.ranks, len(ranks)) for option in call.options], dtype=np.int64)
            for call in problem.calls
        ]
        start, stop = (np.array(ends, dtype=np.int64) for ends in ([r.start for r in ranks], [r.stop for r in ranks]))
        common = np.minimum.outer(stop, stop) - np.maximum.outer(start, start)
        self.crosses: NDArray[np.bool_] = (common > 0) & (common < np.minimum.outer(stop - start, stop - start))
        self._is_possible = bool(self.crosses.any())

    def count(self, rows: Array) -> Array:
        """How many pairs of calls cross in each choice of options, from [choices, calls] to [choices]."""
        found = np.zeros(len(rows), dtype=np.int64)
        if self._is_possible:
            on = [numbers[rows[:, call]] for call, numbers in enumerate(self.numbers)]
            for one, other in combinations(on, 2):
                found += self.crosses[one, other]
        return found
