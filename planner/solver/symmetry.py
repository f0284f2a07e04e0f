"""Blocks of ranks that can be swapped without changing the problem."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from meshwright.planner.solver.problem import CallOptions, Option, Problem


class Swap(NamedTuple):
    """Two neighbouring blocks of equal size that every call has the same options on."""

    left: range
    right: range


def swaps(problem: Problem) -> tuple[Swap, ...]:
    """The swaps of halves of aligned power-of-two blocks that map every call's options to themselves.

    Such blocks are nested or disjoint, so each can be put in order without disturbing the others.
    """
    found = []
    size = 1
    while 2 * size <= problem.num_ranks:
        for first in range(0, problem.num_ranks - 2 * size + 1, 2 * size):
            swap = Swap(range(first, first + size), range(first + size, first + 2 * size))
            if all(_is_unchanged(call, swap) for call in problem.calls):
                found.append(swap)
        size *= 2
    return tuple(found)


def _is_unchanged(call: CallOptions, swap: Swap) -> bool:
    """Whether the call has the same options after the swap; an option that straddles a block has no image."""
    images = [_image(option, swap) for option in call.options]
    return None not in images and Counter(images) == Counter(call.options)


def _image(option: Option, swap: Swap) -> Option | None:
    ranks, size = option.place.ranks, len(swap.left)
    if ranks.stop <= swap.left.start or swap.right.stop <= ranks.start:
        return option
    if ranks.start <= swap.left.start and swap.right.stop <= ranks.stop:
        return option
    for block, shift in ((swap.left, size), (swap.right, -size)):
        if block.start <= ranks.start and ranks.stop <= block.stop:
            return option.at(ranks.start + shift)
    return None
