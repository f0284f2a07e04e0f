"""Blocks of ranks that can be swapped without changing the problem."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import NamedTuple

from meshwright.planner.solver.problem import CallOptions, Problem


class Swap(NamedTuple):
    """Two neighbouring blocks of equal size that every call has the same options on."""

    left: range
    right: range


def swaps(problem: Problem) -> tuple[Swap, ...]:
    """The swaps of halves of aligned power-of-two blocks that map every call's options to themselves.

    Such blocks are nested or disjoint, so each can be put in order without disturbing the others.
    """
    found = []
    every = [_alike_pools(call) for call in problem.calls]
    size = 1
    while 2 * size <= problem.num_ranks:
        for first in range(0, problem.num_ranks - 2 * size + 1, 2 * size):
            swap = Swap(range(first, first + size), range(first + size, first + 2 * size))
            if all(_is_unchanged(pools, swap) for pools in every):
                found.append(swap)
        size *= 2
    return tuple(found)


def _is_unchanged(pools: Mapping[range, int], swap: Swap) -> bool:
    """Whether a call has the same options after the swap; ranks that straddle a block have no image."""
    return all((there := _image(ranks, swap)) is not None and pools.get(there) == pools[ranks] for ranks in pools)


def _image(ranks: range, swap: Swap) -> range | None:
    size = len(swap.left)
    if ranks.stop <= swap.left.start or swap.right.stop <= ranks.start:
        return ranks
    if ranks.start <= swap.left.start and swap.right.stop <= ranks.stop:
        return ranks
    for block, shift in ((swap.left, size), (swap.right, -size)):
        if block.start <= ranks.start and ranks.stop <= block.stop:
            return range(ranks.start + shift, ranks.stop + shift)
    return None


def _alike_pools(call: CallOptions) -> dict[range, int]:
    """By the ranks of a call's options a number, the same where it has the same options but for their ranks."""
    here: dict[range, Counter[Hashable]] = {}
    for o in call.options:
        rest = (
            o.place.layout,
            o.ticks,
            o.early_ticks,
            o.late_ticks,
            o.resident_blocks,
            o.shared_blocks,
            o.transient_blocks,
        )
        here.setdefault(o.place.ranks, Counter())[rest] += 1
    numbers: dict[Hashable, int] = {}
    return {
        ranks: numbers.setdefault((len(ranks), frozenset(options.items())), len(numbers))
        for ranks, options in here.items()
    }
