"""Which rows share a micro-batch. The runtime deals rows by this law, and the cost models count by it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def deal(lengths: Sequence[int], micro_batch_size: int) -> tuple[tuple[int, ...], ...]:
    """Indices into `lengths`, in as few micro-batches as may be of at most `micro_batch_size` rows each.

    They are packed, so any rows may meet, and those that meet give every micro-batch nearly as many tokens as the
    next: the longest row first, each goes to the one with the fewest tokens that has room (Graham, Bounds on
    multiprocessing timing anomalies, SIAM J. Appl. Math. 17(2), 1969: longest processing time first). Even ones keep
    the stages of a pipeline equally busy.
    """
    number = -(-len(lengths) // micro_batch_size)
    dealt: list[list[int]] = [[] for _ in range(number)]
    with_room = [(0, micro_batch) for micro_batch in range(number)]
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        num_tokens, lightest = with_room[0]
        dealt[lightest].append(index)
        if len(dealt[lightest]) < micro_batch_size:
            heapq.heapreplace(with_room, (num_tokens + lengths[index], lightest))
        else:
            heapq.heappop(with_room)
    return tuple(map(tuple, dealt))
