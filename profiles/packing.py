"""Which rows share a replica, a micro-batch or a pass, and in which blocks a cache holds their tokens.

The runtime deals rows by these laws, the cost models count by them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate, count, pairwise

BLOCK_TOKENS = 32
"""Tokens of a block. Fewer waste less at the end of a row, and attention takes longer: of 16, a third on a CPU core."""

PREFILL_TOKENS = 16384
"""That go through the model in one pass of a prefill at most; it bounds the working set of many rows."""


def rows_of_replicas(num_rows: int, num_replicas: int) -> tuple[int, ...]:
    """How many rows each replica has: as many as the next, and where they do not come out even the first ones have one
    more."""
    each, left = divmod(num_rows, num_replicas)
    return (each + 1,) * left + (each,) * (num_replicas - left)


def share_in_order(num_rows: int, group_size: int, replica: int, num_replicas: int) -> tuple[int, ...]:
    """The positions that one replica generates, of rows in order of their prompts with the rows of a group together:
    every `num_replicas`-th group, or row where groups do not come out even."""
    size = rows_per_prompt(num_rows, group_size, num_replicas)
    firsts = range(replica * size, num_rows, num_replicas * size)
    return tuple(first + index for first in firsts for index in range(size))


def rows_per_prompt(num_rows: int, group_size: int, num_replicas: int) -> int:
    """The rows of a replica that have one prompt: a whole group where every replica generates as many groups as the
    others, else 1."""
    return 1 if num_rows // group_size % num_replicas else group_size


def deal(lengths: Sequence[int], micro_batch_size: int) -> tuple[tuple[int, ...], ...]:
    """Indices into `lengths`, in as few micro-batches as may be of at most `micro_batch_size` rows each.

    They are packed, so any rows may meet, and those that meet give every micro-batch nearly as many tokens as the
    next. Even ones keep the stages of a pipeline equally busy.
    """
    return _deal(lengths, [micro_batch_size] * -(-len(lengths) // micro_batch_size))


def deal_by_tokens(lengths: Sequence[int], most_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Indices into `lengths`, none of which is above `most_tokens`, in micro-batches of at most so many tokens each.

    They are as few as give every one nearly as many tokens as the next: of the numbers from a lower bound on, the first
    for which the longest row first, to the one with the fewest tokens, keeps the cap. No two rows of more than half
    the cap may meet.
    """
    num_long = sum(1 for length in lengths if 2 * length > most_tokens)
    least = max(num_long, -(-sum(lengths) // most_tokens), min(1, len(lengths)))
    for number in count(least):
        dealt = _deal(lengths, [len(lengths)] * number)
        if all(sum(lengths[index] for index in indices) <= most_tokens for indices in dealt):
            return dealt
    raise AssertionError("each row alone keeps the cap")


def deal_to_replicas(
    lengths: Sequence[int], replicas: Sequence[int], rows: Sequence[int] = ()
) -> tuple[tuple[int, ...], ...]:
    """Indices into `lengths` for each replica, so many as `rows_of_replicas` has, with nearly as many tokens.

    On several kinds of nodes, which have so many `replicas` each, those of each kind take what `rows` says of as many
    lengths as these are, and its share of others; and as great a share of the tokens.
    """
    if len(replicas) == 1:
        return _deal(lengths, rows_of_replicas(len(lengths), replicas[0]))
    ends = [len(lengths) * end // sum(rows) for end in accumulate(rows, initial=0)]
    rooms, speeds = list[int](), list[float]()
    for number, rows_here, (first, last) in zip(replicas, rows, pairwise(ends), strict=True):
        rooms += rows_of_replicas(last - first, number)
        speeds += [rows_here / number] * number
    return _deal(lengths, rooms, speeds)


def _deal(
    lengths: Sequence[int], rooms: Sequence[int], speeds: Sequence[float] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Indices for each of the rooms, which hold so many at most: the longest row first, each goes to the one that has
    room and the fewest tokens, or where it would be done with them first (Graham, Bounds on multiprocessing timing
    anomalies, SIAM J. Appl. Math. 17(2), 1969: longest processing time first)."""
    dealt: list[list[int]] = [[] for _ in rooms]
    with_room: list[tuple[float, int]] = [(0, index) for index, room in enumerate(rooms) if room]
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        busy, lightest = with_room[0]
        dealt[lightest].append(index)
        if len(dealt[lightest]) < rooms[lightest]:
            more = lengths[index] / speeds[lightest] if speeds else lengths[index]
            heapq.heapreplace(with_room, (busy + more, lightest))
        else:
            heapq.heappop(with_room)
    return tuple(map(tuple, dealt))


def blocks_of(num_tokens: int) -> int:
    """Blocks that so many tokens of one row take."""
    return -(-num_tokens // BLOCK_TOKENS)


def most_packed(rows_at_a_time: int, longest_prompt: int) -> int:
    """Tokens of one pass of a prefill at most, where so many rows may be admitted together."""
    return min(PREFILL_TOKENS, rows_at_a_time * max(1, longest_prompt))
