"""Which rows share a replica, a micro-batch or a pass, and in which blocks a cache holds their tokens.

The runtime deals rows by these laws, the cost models count by them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate, count, pairwise
from typing import NamedTuple

from meshwright.profiles.model_shape import ModelSpec

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


class ReplicaDeal(NamedTuple):
    """How the rows of a stage of `model` are dealt to so many `replicas` on each kind of nodes.

    On several kinds, those of each take what `rows` says of as many rows as these are, and its share of others; and as
    great a share of the work. On one, with `any_number` work alone decides; else all take as many as the next.
    """

    model: ModelSpec
    replicas: tuple[int, ...]
    rows: tuple[int, ...] = ()
    any_number: bool = False

    def of(self, lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Indices into `lengths` for each replica, with nearly as much work."""
        return deal_to_replicas(work_of_rows(self.model, lengths), self.replicas, self.rows, any_number=self.any_number)


def work_of_rows(model: ModelSpec, lengths: Sequence[int]) -> list[int]:
    """Products and sums of a forward pass over a row of each of these lengths.

    Each token passes the weights of layers and head once, and each pair of a token and one that it sees, itself among
    them, takes a product of their query and key and one with a value in every head (Chowdhery et al., PaLM,
    arXiv:2204.02311, appendix B, with the half of the pairs that is causal). Backward passes take twice of each.
    """
    weights = sum(model.passed_layer_params) + model.passed_head_params
    value_dim = model.latent.value_dim if model.latent else model.head_dim
    of_pair, with_window = model.num_heads * (model.head_dim + value_dim), model.num_window_layers

    def work(length: int) -> int:
        pairs = (model.num_layers - with_window) * (length * (length + 1) // 2)
        if model.window:
            pairs += with_window * round(length * model.window.seen(length, 0))
        return length * weights + of_pair * pairs

    known = {length: work(length) for length in set(lengths)}
    return [known[length] for length in lengths]


def deal_to_replicas(
    work: Sequence[int], replicas: Sequence[int], rows: Sequence[int] = (), *, any_number: bool = False
) -> tuple[tuple[int, ...], ...]:
    """Indices into the `work` of rows for each replica: see `ReplicaDeal`."""
    if len(replicas) == 1:
        num_replicas = replicas[0]
        return _deal(work, [len(work)] * num_replicas if any_number else rows_of_replicas(len(work), num_replicas))
    ends = [len(work) * end // sum(rows) for end in accumulate(rows, initial=0)]
    rooms, speeds = list[int](), list[float]()
    for number, rows_here, (first, last) in zip(replicas, rows, pairwise(ends), strict=True):
        rooms += rows_of_replicas(last - first, number)
        speeds += [rows_here / number] * number
    return _deal(work, rooms, speeds if len(set(speeds)) > 1 else None)


def _deal(
    sizes: Sequence[int], rooms: Sequence[int], speeds: Sequence[float] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Indices into the `sizes` of rows, their tokens or their work, for each of the rooms, which hold so many at most:
    the greatest first, each goes to the one that has room and the least, or where it would be done with it first
    (Graham, Bounds on multiprocessing timing anomalies, SIAM J. Appl. Math. 17(2), 1969: longest processing time
    first)."""
    dealt: list[list[int]] = [[] for _ in rooms]
    with_room: list[tuple[float, int]] = [(0, index) for index, room in enumerate(rooms) if room]
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        busy, lightest = with_room[0]
        dealt[lightest].append(index)
        if len(dealt[lightest]) < rooms[lightest]:
            more = sizes[index] / speeds[lightest] if speeds else sizes[index]
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
