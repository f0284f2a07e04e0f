"""Relations between the rank ranges of modes with fixed ranks: which cross, and which can be swapped.

Two ranges cross if they intersect without being nested; no answer has two such modes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.solver.problem import Problem, Task

Array: TypeAlias = NDArray[np.int64]


class Crossing:
    """The rank ranges of one problem's modes, numbered, and which of them cross.

    `numbers` has for each task the number of each mode's range, [modes]; `common` has the number of common ranks of
    every two ranges, and `crosses` whether they cross, both [ranges, ranges].
    """

    def __init__(self, problem: Problem) -> None:
        ranks: dict[range, int] = {}
        self.numbers: list[Array] = [
            np.array([ranks.setdefault(mode.resource.ranks, len(ranks)) for mode in task.modes], dtype=np.int64)
            for task in problem.tasks
        ]
        start, stop = (np.array(ends, dtype=np.int64) for ends in ([r.start for r in ranks], [r.stop for r in ranks]))
        self.common: Array = np.maximum(0, np.minimum.outer(stop, stop) - np.maximum.outer(start, start))
        smaller = np.minimum.outer(stop - start, stop - start)
        self.crosses: NDArray[np.bool_] = (self.common > 0) & (self.common < smaller)
        self._is_possible = bool(self.crosses.any())

    def count(self, columns: Sequence[Array]) -> Array:
        """Return the number of pairs of tasks that cross, [choices].

        `columns` has for each task its mode index in each choice, [choices], or [1] if all choices have the same.
        """
        num_crossing = np.zeros(max(map(len, columns)), dtype=np.int64)
        if self._is_possible:
            range_numbers = [numbers[chosen] for numbers, chosen in zip(self.numbers, columns, strict=True)]
            for one, other in combinations(range_numbers, 2):
                num_crossing += self.crosses[one, other]
        return num_crossing


class Swap(NamedTuple):
    """Two neighbouring rank ranges of equal size on which every task has the same modes."""

    left: range
    right: range


def swaps(problem: Problem) -> tuple[Swap, ...]:
    """Return the swaps of halves of aligned power-of-two ranges that map every task's modes to themselves.

    Such ranges are nested or disjoint, so the symmetry of each swap can be broken independently of the others.
    """
    all_swaps = []
    pools_by_task = [_equivalent_pools(task) for task in problem.tasks]
    size = 1
    while 2 * size <= problem.num_ranks:
        for first in range(0, problem.num_ranks - 2 * size + 1, 2 * size):
            swap = Swap(range(first, first + size), range(first + size, first + 2 * size))
            if all(_is_unchanged(pools, swap) for pools in pools_by_task):
                all_swaps.append(swap)
        size *= 2
    return tuple(all_swaps)


def _is_unchanged(pools: Mapping[range, int], swap: Swap) -> bool:
    """True if a task has the same modes after the swap; False if some of its pools have no image (`_image`)."""
    return all((image := _image(ranks, swap)) is not None and pools.get(image) == pools[ranks] for ranks in pools)


def _image(ranks: range, swap: Swap) -> range | None:
    """Return the ranks after the swap; None if they overlap its ranges without containing both or lying in one."""
    size = len(swap.left)
    if ranks.stop <= swap.left.start or swap.right.stop <= ranks.start:
        return ranks
    if ranks.start <= swap.left.start and swap.right.stop <= ranks.stop:
        return ranks
    for half, shift in ((swap.left, size), (swap.right, -size)):
        if half.start <= ranks.start and ranks.stop <= half.stop:
            return range(ranks.start + shift, ranks.stop + shift)
    return None


def _equivalent_pools(task: Task) -> dict[range, int]:
    """Return for each pool of a task a number that is equal for pools with the same modes except for their ranks."""
    modes_on: dict[range, Counter[Hashable]] = {}
    for o in task.modes:
        amounts = (
            o.resource.layout,
            o.ticks,
            o.early_ticks,
            o.late_ticks,
            o.resident_units,
            o.shared_units,
            o.transient_units,
        )
        modes_on.setdefault(o.resource.ranks, Counter())[amounts] += 1
    numbers: dict[Hashable, int] = {}
    return {
        ranks: numbers.setdefault((len(ranks), frozenset(modes.items())), len(numbers))
        for ranks, modes in modes_on.items()
    }
