"""Attention of one new token per row over a paged cache, block by block, and the choice of the blocks to read.

The reads are computed on the host once for all layers. Every block is scored against the query of its row, a shared
prefix against those of all its rows, and the partial results are combined: with m the largest score of a row, and l_b
and o_b a block's sums of exp(s - m) and exp(s - m) v, the output is sum_b o_b / sum_b l_b (Dao et al.,
arXiv:2205.14135, section 3.1; split over keys as in Flash-Decoding). The keys and values of a prefix are read once for
all its rows, in one matrix product for each key-value head (Juravsky et al., arXiv:2402.05099, section 3).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshwright.profiles.packing import BLOCK_TOKENS
from meshwright.runtime.model.block_tables import BlockTables, Numbers
from meshwright.runtime.model.kv_cache import PagedCache

_MIN_DENSITY = 0.5
"""If at least this share of the blocks between the first and the last one is read, the whole range is read in place;
otherwise the blocks that are read are copied."""

_CAUSAL_MASKS = np.triu(np.full((BLOCK_TOKENS, BLOCK_TOKENS), -np.inf, dtype=np.float32), 1)
"""Row i masks a block whose last token is its i-th: minus infinity after that token, else 0."""


@dataclass(frozen=True)
class DecodeRows:
    """The rows of a decode step, B of them, and their lengths."""

    rows: Numbers
    """Cache rows, [B]."""
    cached: Numbers
    """Number of cached tokens of each row, [B]; a block for one more token is allocated."""

    @property
    def lengths(self) -> Tensor:
        """Numbers of cached tokens, which are also the positions of the new tokens, [B]."""
        return torch.from_numpy(self.cached)

    @property
    def starts_block(self) -> bool:
        """True if the new token of some row is the first of its block."""
        return not (self.cached % BLOCK_TOKENS).all()

    def tokens_since(self, earlier: DecodeRows) -> int | None:
        """0 for the same step of the same rows as `earlier`, 1 for their next step, None for any other."""
        # For few numbers, comparing bytes takes a tenth of the time of comparing arrays.
        if earlier.rows.tobytes() != self.rows.tobytes():
            return None
        now = self.cached.tobytes()
        if earlier.cached.tobytes() == now:
            return 0
        return 1 if (earlier.cached + 1).tobytes() == now else None


@dataclass(frozen=True)
class SharedPrefixes:
    """Prefixes with equal numbers of blocks, and the rows that read each, padded with the dummy row."""

    blocks: Tensor
    """Blocks of each prefix, [M, n]."""
    readers: Tensor
    """Rows that read each prefix, [M, R]."""


@dataclass(frozen=True)
class BlockReads:
    """The blocks that a decode step of B rows reads, and the rows that they are read for. Row B is a dummy for padding.

    Blocks with one reader make up the window, shared blocks the prefixes. Each read gives a partial result of attention
    for one row; partial results are numbered in the order of the window, then of each prefix for each of its readers.
    """

    step: DecodeRows
    blocks: Tensor
    """Blocks that the new tokens are written to, [B]."""
    window: Tensor
    """Blocks of the window, [N]; contiguous if `first` is not -1."""
    newest: Tensor
    """Indices in the window of the blocks of the new tokens, [B]."""
    window_rows: Tensor
    """The row that each block of the window is read for, [N]; B for a block that only fills a gap."""
    mask: Tensor
    """The mask added to scores, [N, 1, tokens of a block]: minus infinity after the end of a row, else 0."""
    prefixes: tuple[SharedPrefixes, ...]
    """Shared prefixes, grouped by their number of blocks."""
    order: Tensor
    """Numbers of the partial results, ordered by row and without those of the dummy, [E]."""
    offsets: Tensor
    """Offsets of each row in `order`, and the end, [B + 1]."""
    first: int
    """The first block of a window that is read in place; -1 for one that is copied."""

    @property
    def num_shared(self) -> int:
        """Number of blocks of all prefixes."""
        return sum(prefixes.blocks.numel() for prefixes in self.prefixes)


def plan_block_reads(tables: BlockTables, reads: DecodeRows) -> BlockReads:
    """The reads of a decode step from a cache with these block tables."""
    rows, lengths = reads.rows, reads.cached
    num_rows, counts = len(rows), lengths // BLOCK_TOKENS + 1
    ends = np.concatenate([[0], counts.cumsum()])
    row = np.repeat(np.arange(num_rows), counts)
    block = tables.table[rows[row], np.arange(ends[-1]) - ends[row]]
    single, owners, prefixes = block, row, tuple[SharedPrefixes, ...]()
    if tables.has_shared_blocks:
        is_shared = tables.is_shared(block)
        single, owners = block[~is_shared], row[~is_shared]
        prefixes = _prefixes(block[is_shared], row[is_shared], num_rows)

    first, width = int(single.min()), int(single.max()) - int(single.min()) + 1
    if len(single) >= _MIN_DENSITY * width:
        index, window = single - first, np.arange(first, first + width)
    else:
        index, window, first = np.arange(len(single)), single, -1
    owner = np.full(len(window), num_rows)
    owner[index] = owners
    mask = np.zeros((len(window), BLOCK_TOKENS), dtype=np.float32)
    last = np.append(np.flatnonzero(owners[1:] != owners[:-1]), len(owners) - 1)
    mask[index[last]] = _CAUSAL_MASKS[lengths % BLOCK_TOKENS]
    order, offsets = index, ends
    if prefixes:
        readers = np.concatenate([owner, *(group.readers.numpy().ravel() for group in prefixes)])
        order, offsets = _by_row(readers, num_rows)
    tensor = torch.from_numpy
    return BlockReads(
        step=reads,
        blocks=tensor(single[last]),
        window=tensor(window),
        newest=tensor(index[last]),
        window_rows=tensor(owner),
        mask=tensor(mask[:, None]),
        prefixes=prefixes,
        order=tensor(order),
        offsets=tensor(offsets),
        first=first,
    )


def _prefixes(blocks: Numbers, rows: Numbers, num_rows: int) -> tuple[SharedPrefixes, ...]:
    """Groups shared blocks, ordered by the rows that read them and by their tokens, into prefixes.

    Rows that share a block share all blocks before it. So the readers of a row's blocks become fewer along the row, and
    two of its blocks have the same readers if they have equally many.
    """
    if not len(blocks):
        return ()
    unique, first_seen, inverse, counts = np.unique(blocks, return_index=True, return_inverse=True, return_counts=True)
    readers = np.split(rows[np.argsort(inverse, kind="stable")], counts.cumsum()[:-1])
    in_order = np.argsort(first_seen)  # the blocks in the order in which the rows first read them
    ends = np.flatnonzero((np.diff(rows[first_seen[in_order]]) != 0) | (np.diff(counts[in_order]) != 0)) + 1
    by_length: defaultdict[int, list[Numbers]] = defaultdict(list)
    for run in np.split(in_order, ends):
        by_length[len(run)].append(run)
    prefixes = []
    for runs in by_length.values():
        padded = np.full((len(runs), max(counts[run[0]] for run in runs)), num_rows)
        for index, run in enumerate(runs):
            padded[index, : counts[run[0]]] = readers[run[0]]
        prefixes.append(SharedPrefixes(torch.from_numpy(unique[np.stack(runs)]), torch.from_numpy(padded)))
    return tuple(prefixes)


def _by_row(readers: Numbers, num_rows: int) -> tuple[Numbers, Numbers]:
    """The order [E] of partial results by row, without the dummy row's, and the offsets of rows in it [B + 1]."""
    ends = np.concatenate([[0], np.bincount(readers, minlength=num_rows)[:num_rows].cumsum()])
    return np.argsort(readers, kind="stable")[: ends[-1]], ends


class BlockAttention:
    """Attention of a decode step, one new token per row, and of further steps of the same rows in the same blocks."""

    def __init__(self, cache: PagedCache, reads: BlockReads) -> None:
        self._cache, self._reads, self._num_rows = cache, reads, len(reads.step.rows)
        self._step, self._num_changes = reads.step, cache.tables.num_changes
        self._scale, kv_heads = cache.keys.shape[-1] ** -0.5, cache.keys.shape[2]
        offset = reads.step.lengths % BLOCK_TOKENS
        indices = cache.token_indices(reads.blocks, offset).view(-1, kv_heads)
        self._write_indices = torch.stack([indices, indices + cache.keys[0].numel() // cache.keys.shape[-1]], dim=-1)
        self._prefixes = [_PrefixGroup(prefixes, self._num_rows, kv_heads) for prefixes in reads.prefixes]
        self._window_rows = reads.window_rows % self._num_rows
        readers = [reads.window_rows, *(prefixes.readers.flatten() for prefixes in reads.prefixes)]
        self._readers = torch.cat(readers) if reads.prefixes else reads.window_rows
        self._mask = reads.mask.expand(-1, kv_heads, -1).reshape(-1, 1, BLOCK_TOKENS).contiguous()
        mask_indices = (reads.newest[:, None] * kv_heads + torch.arange(kv_heads)) * BLOCK_TOKENS + offset[:, None]
        self._mask_indices = mask_indices.flatten()
        """Indices of the new tokens in the flat mask."""

    def advance_to(self, reads: DecodeRows) -> bool:
        """Advances to `reads` and returns True, if it is the same step or the next step of the same rows in the same
        blocks; otherwise returns False."""
        count = reads.tokens_since(self._step)
        if count is None or self._num_changes != self._cache.tables.num_changes or (count and reads.starts_block):
            return False
        if count:
            self._step = reads
            self._write_indices.add_(1)
            self._mask_indices.add_(1)
            self._mask.view(-1).index_fill_(0, self._mask_indices, 0.0)
        return True

    def attend(self, layer: int, query: Tensor, new: Tensor) -> Tensor:
        """The output [B, heads * D] for new queries [B, kv_heads, heads / kv_heads, D]; writes the new keys and values
        [B, kv_heads, 2, D] to the cache."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        self._cache.store(layer, self._write_indices, new)
        scores = [
            _Scores.of_window(self._window(keys), query.index_select(0, self._window_rows), self._mask, self._scale)
        ]
        for prefixes in self._prefixes:
            queries = query.index_select(0, prefixes.rows)
            scores.append(_Scores.of_prefixes(prefixes.gather(keys), queries, prefixes.num_readers, self._scale))
        highest = torch.segment_reduce(
            self._by_row([part.highest() for part in scores]), "max", offsets=self._reads.offsets, axis=0, unsafe=True
        )
        partials = [scores[0].weighted_sums(highest.index_select(0, self._window_rows), self._window(values))]
        for prefixes, part in zip(self._prefixes, scores[1:], strict=True):
            partials.append(part.weighted_sums(highest.index_select(0, prefixes.rows), prefixes.gather(values)))
        totals, sums = (self._sum_by_row(list(column)) for column in zip(*partials, strict=True))
        return (sums.view(query.shape) / totals.view(*query.shape[:3], 1)).to(query.dtype).flatten(1)

    def _window(self, cache: Tensor) -> Tensor:
        """The window's blocks of a layer's [blocks, kv_heads, tokens, D]."""
        first, window = self._reads.first, self._reads.window
        return cache.index_select(0, window) if first < 0 else cache[first : first + len(window)]

    def _by_row(self, partials: list[Tensor]) -> Tensor:
        """Partial results of the window and of each prefix group, ordered by row [E, ...]."""
        return (partials[0] if len(partials) == 1 else torch.cat(partials)).index_select(0, self._reads.order)

    def _sum_by_row(self, partials: list[Tensor]) -> Tensor:
        """The sum of partial results of each row [B, ...]."""
        joined = partials[0] if len(partials) == 1 else torch.cat(partials)
        sums = joined.new_zeros(self._num_rows + 1, *joined.shape[1:])
        return sums.index_add_(0, self._readers, joined)[: self._num_rows]


class _PrefixGroup:
    """Prefixes with equal numbers of blocks, and the rows that read them."""

    def __init__(self, prefixes: SharedPrefixes, num_rows: int, kv_heads: int) -> None:
        self.rows = prefixes.readers.flatten() % num_rows
        self.num_readers = prefixes.readers.shape[1]
        heads = torch.arange(kv_heads)
        indices = prefixes.blocks[:, None] * kv_heads + heads[:, None]
        self._shape, self._indices = (len(indices), kv_heads, -1), indices.flatten()

    def gather(self, cache: Tensor) -> Tensor:
        """The prefixes' tokens [M, kv_heads, n * tokens, D] from a layer's [blocks, kv_heads, tokens, D]."""
        gathered = cache.flatten(0, 1).index_select(0, self._indices)
        return gathered.view(*self._shape, cache.shape[-1])


class _Scores(NamedTuple):
    """fp32 scores of blocks or prefixes for each of their readers: [N * kv_heads, R * heads / kv_heads, tokens].

    Partial results are in the order of blocks and of their readers: [N * R, heads, ...].
    """

    scores: Tensor
    num_blocks: int
    num_readers: int

    @classmethod
    def of_window(cls, keys: Tensor, queries: Tensor, mask: Tensor, scale: float) -> _Scores:
        """Scores of keys [N, kv_heads, tokens, D] for queries [N, kv_heads, heads / kv_heads, D]."""
        transposed = keys.flatten(0, 1).transpose(1, 2)
        if keys.dtype == torch.float32:
            scores = torch.baddbmm(mask, queries.flatten(0, 1), transposed, alpha=scale)
        else:
            scores = _product(queries.flatten(0, 1), transposed).mul_(scale).add_(mask)
        return cls(scores, len(keys), 1)

    @classmethod
    def of_prefixes(cls, keys: Tensor, queries: Tensor, num_readers: int, scale: float) -> _Scores:
        """Scores of keys [M, kv_heads, tokens, D] for queries [M * R, kv_heads, heads / kv_heads, D]."""
        grouped = queries.unflatten(0, (-1, num_readers)).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        return cls(_product(grouped, keys.flatten(0, 1).transpose(1, 2)).mul_(scale), len(keys), num_readers)

    def highest(self) -> Tensor:
        return self._by_reader(self.scores.amax(-1))

    def weighted_sums(self, highest: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of exponentials, and of the values [N, kv_heads, tokens, D] weighted by them, each by reader.

        `highest` [N * R, heads] are the largest scores of the readers' rows. The scores are overwritten.
        """
        if self.num_readers == 1:
            row_highest = highest.view(*self.scores.shape[:2], 1)
        else:
            row_highest = highest.view(self.num_blocks, self.num_readers, values.shape[1], -1).transpose(1, 2)
            row_highest = row_highest.reshape(*self.scores.shape[:2], 1)
        weights = self.scores.sub_(row_highest).exp_()
        sums = _product(weights.to(values.dtype), values.flatten(0, 1))
        return self._by_reader(weights.sum(-1)), self._by_reader(sums)

    def _by_reader(self, by_block: Tensor) -> Tensor:
        """Reorders [N * kv_heads, R * heads / kv_heads, ...] to [N * R, heads, ...]."""
        if self.num_readers == 1:
            return by_block.view(self.num_blocks, -1, *by_block.shape[2:])
        unflattened = by_block.unflatten(1, (self.num_readers, -1)).unflatten(0, (self.num_blocks, -1))
        return unflattened.transpose(1, 2).flatten(2, 3).flatten(0, 1)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """The batched matrix product [N, A, C] in fp32 of [N, A, B] and [N, B, C]."""
    if left.dtype == torch.float32:
        return torch.bmm(left, right)
    return torch.bmm(left.float(), right.float())
