"""Which options are on ranks that cross: that have some ranks in common while each has others. No answer has such."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.solver.problem import Problem

Array: TypeAlias = NDArray[np.int64]


class Crossing:
    """Of one problem: `numbers` has for each call, in their order, the numbers of its options' ranks, [options];
    `common` has of every two numbers how many ranks they have in common, and `crosses` whether they cross,
    [numbers, numbers]."""

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
        """How many pairs of calls cross in each choice of options; each call's are [choices], or [1] where all choices
        have the same."""
        found = np.zeros(max(map(len, columns)), dtype=np.int64)
        if self._is_possible:
            on = [numbers[chosen] for numbers, chosen in zip(self.numbers, columns, strict=True)]
            for one, other in combinations(on, 2):
                found += self.crosses[one, other]
        return found
