"""Assignment of rows (sequences of a batch) to replicas, micro-batches and prefill passes, and of tokens to KV blocks.

A run and its rehearsal call `generation_rows`, `assigned_rows` and `micro_batches` with the rows of a batch.
`cost_models.micro_batches` calls the functions that these use, with expected lengths; for many batches at once it has
the rule of tokens in arrays (`_split_together`).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import accumulate, count, pairwise
from typing import NamedTuple

from meshwright.profiles.model_parts.hf_config import SlidingWindow
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.schedule import Schedule

BLOCK_TOKENS = 32
"""Tokens of a KV block. Smaller ones waste less at the end of a row but slow attention: 16 by a third on a CPU core."""

PREFILL_TOKENS = 16384
"""Maximum number of tokens in one prefill pass; it bounds the working set of many rows."""


def rows_per_replica(num_rows: int, num_replicas: int) -> tuple[int, ...]:
    """Split rows evenly over replicas; if the split has a remainder, the first replicas have one row more."""
    each, remainder = divmod(num_rows, num_replicas)
    return (each + 1,) * remainder + (each,) * (num_replicas - remainder)


def generation_rows(
    rows: Sequence[int], lengths: Mapping[int, int], replica: int, num_replicas: int, group_size: int = 1
) -> tuple[int, ...]:
    """Return the rows that one replica generates, in the order of their prompt lengths."""
    ordered = sorted(rows, key=lambda row: (lengths[row], row))
    return tuple(ordered[index] for index in replica_rows(len(rows), group_size, replica, num_replicas))


def replica_rows(num_rows: int, group_size: int, replica: int, num_replicas: int) -> tuple[int, ...]:
    """Return the indices of the rows that one replica generates.

    Rows are ordered by prompt, with those of a group together. A replica has every `num_replicas`-th group, or every
    `num_replicas`-th row if the replicas do not divide the groups.
    """
    size = rows_per_prompt(num_rows, group_size, num_replicas)
    firsts = range(replica * size, num_rows, num_replicas * size)
    return tuple(first + index for first in firsts for index in range(size))


def rows_per_prompt(num_rows: int, group_size: int, num_replicas: int) -> int:
    """Return how many rows of a replica share a prompt: a whole group if the replicas divide the groups, else 1."""
    return 1 if num_rows // group_size % num_replicas else group_size


def micro_batches(rows: Sequence[int], lengths: Mapping[int, int], schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Split rows into micro-batches within the schedule's limit on tokens, or on rows, of a micro-batch."""
    row_lengths, max_tokens = [lengths[row] for row in rows], schedule.micro_batch_tokens
    batches = (
        micro_batches_by_tokens(row_lengths, max_tokens)
        if max_tokens
        else micro_batches_by_rows(row_lengths, schedule.micro_batch_size)
    )
    return tuple(tuple(rows[index] for index in indices) for indices in batches)


def micro_batches_by_rows(lengths: Sequence[int], micro_batch_size: int) -> tuple[tuple[int, ...], ...]:
    """Assign rows to as few micro-batches of `micro_batch_size` rows as possible; return indices into `lengths`.

    Rows are packed without padding, so any rows may share a micro-batch; the numbers of tokens are balanced, which
    keeps pipeline stages equally busy.
    """
    return _assign(lengths, [micro_batch_size] * -(-len(lengths) // micro_batch_size))


def micro_batches_by_tokens(lengths: Sequence[int], max_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Assign rows to micro-batches of at most `max_tokens` tokens; return indices into `lengths`.

    No length may be above `max_tokens`. The number of micro-batches is the smallest, counting up from a lower bound,
    for which longest-first assignment to the micro-batch with the fewest tokens keeps the cap. The lower bound counts
    rows of more than half the cap, no two of which fit together.
    """
    num_long = sum(1 for length in lengths if 2 * length > max_tokens)
    lower_bound = max(num_long, -(-sum(lengths) // max_tokens), min(1, len(lengths)))
    for number in count(lower_bound):
        micro_batches = _assign(lengths, [len(lengths)] * number)
        if all(sum(lengths[index] for index in indices) <= max_tokens for indices in micro_batches):
            return micro_batches
    raise AssertionError("one row per micro-batch keeps the cap")


class ReplicaAssignment(NamedTuple):
    """The rule by which the rows of a stage of `model` are assigned to its replicas.

    `replicas` has the number of replicas on each kind of nodes. With several kinds, `rows` has the number of rows for
    the replicas of each kind together; other batch sizes are split in the same proportion, and so is the work. With one
    kind, replicas have equally many rows, unless `any_number` is set, which balances the work alone.
    """

    model: ModelSpec
    replicas: tuple[int, ...]
    rows: tuple[int, ...] = ()
    any_number: bool = False

    def assign(self, lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Assign rows to replicas so that their work is balanced; return indices into `lengths` for each replica."""
        return assign_to_replicas(row_work(self.model, lengths), self.replicas, self.rows, any_number=self.any_number)


def assigned_rows(
    rows: Sequence[int], lengths: Mapping[int, int], replica: int, split: ReplicaAssignment
) -> tuple[int, ...]:
    """Return the rows of one replica, with nearly as much work as every other's.

    Every rank that has the lengths computes the same split.
    """
    return tuple(rows[index] for index in split.assign([lengths[row] for row in rows])[replica])


def row_work(model: ModelSpec, lengths: Sequence[int]) -> list[int]:
    """Return the multiply-adds of a forward pass over a row of each of these lengths.

    Each token passes the active weights of layers and head once. Each pair of a token and one that it attends to,
    including itself, takes a dot product of query and key and a product with the value in every head (Chowdhery et al.,
    PaLM, arXiv:2204.02311, appendix B, but only the causal half of the pairs). An indexer scores all pairs, and a token
    attends to those that it selects. A backward pass takes twice as many.
    """
    weights = sum(model.active_layer_params) + model.active_head_params
    pair_work, window_layers = model.num_heads * (model.head_dim + model.value_dim), model.num_window_layers

    indexer = model.latent.indexer if model.latent else None
    selected = SlidingWindow(num_tokens=indexer.num_tokens if indexer else 1)
    index_work = indexer.num_heads * indexer.head_dim if indexer else 0

    def work(length: int) -> int:
        pairs = all_pairs = model.num_full_layers * (length * (length + 1) // 2)
        if indexer:
            pairs = model.num_full_layers * round(length * selected.attended_tokens(length, 0))
        if model.window:
            pairs += window_layers * round(length * model.window.attended_tokens(length, 0))
        return length * weights + pair_work * pairs + index_work * all_pairs

    work_of_length = {length: work(length) for length in set(lengths)}
    return [work_of_length[length] for length in lengths]


def assign_to_replicas(
    work: Sequence[int], replicas: Sequence[int], rows: Sequence[int] = (), *, any_number: bool = False
) -> tuple[tuple[int, ...], ...]:
    """Assign rows to replicas as described in `ReplicaAssignment`; return indices into `work` for each replica."""
    if len(replicas) == 1:
        num_replicas = replicas[0]
        return _assign(work, [len(work)] * num_replicas if any_number else rows_per_replica(len(work), num_replicas))
    ends = [len(work) * end // sum(rows) for end in accumulate(rows, initial=0)]
    capacities, speeds = list[int](), list[float]()
    for number, rows_of_kind, (first, last) in zip(replicas, rows, pairwise(ends), strict=True):
        capacities += rows_per_replica(last - first, number)
        speeds += [rows_of_kind / number] * number
    return _assign(work, capacities, speeds if len(set(speeds)) > 1 else None)


def _assign(
    sizes: Sequence[int], capacities: Sequence[int], speeds: Sequence[float] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Assign rows to bins of at most `capacities` rows; return indices into `sizes` for each bin.

    Longest processing time first: rows in descending size (tokens or work) go to the bin with the least load that has
    capacity left; with `speeds`, load is in units of time (Graham, Bounds on multiprocessing timing anomalies, SIAM J.
    Appl. Math. 17(2), 1969).
    """
    assigned: list[list[int]] = [[] for _ in capacities]
    open_bins: list[tuple[float, int]] = [(0, index) for index, capacity in enumerate(capacities) if capacity]
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        load, lightest = open_bins[0]
        assigned[lightest].append(index)
        if len(assigned[lightest]) < capacities[lightest]:
            added = sizes[index] / speeds[lightest] if speeds else sizes[index]
            heapq.heapreplace(open_bins, (load + added, lightest))
        else:
            heapq.heappop(open_bins)
    return tuple(map(tuple, assigned))


def num_blocks_for(num_tokens: int) -> int:
    """Return the number of KV blocks that `num_tokens` tokens of one row take."""
    return -(-num_tokens // BLOCK_TOKENS)


def max_prefill_tokens(rows_at_a_time: int, longest_prompt: int) -> int:
    """Return the maximum number of tokens of one prefill pass if up to `rows_at_a_time` rows are admitted together."""
    return min(PREFILL_TOKENS, rows_at_a_time * max(1, longest_prompt))
