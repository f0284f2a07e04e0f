"""The blocks of a paged cache that each row of a decode step reads, computed on the host once for all layers.

A block of a single row is read for the query of that row. Blocks that the same rows share, such as those of the samples
of a prompt, form a prefix, which is read once for the queries of all of them (Juravsky et al., arXiv:2402.05099,
section 3).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from meshwright.profiles.packing import BLOCK_TOKENS
from meshwright.runtime.model.cache_blocks import BlockTables, Numbers

_MIN_DENSITY = 0.5
"""Minimum share of read blocks between the first and the last one to read them in place; with less they are copied."""

_CAUSAL_MASKS = np.triu(np.full((BLOCK_TOKENS, BLOCK_TOKENS), -np.inf, dtype=np.float32), 1)
"""The masks of a block's tokens by the index of the last token: minus infinity after it, else 0."""


@dataclass(frozen=True)
class DecodeRows:
    """The rows of a decode step, B of them, and their lengths."""

    rows: Numbers
    """Cache rows, [B]."""
    cached: Numbers
    """Number of cached tokens of each row, [B]; a block for one more token is allocated."""

    @property
    def lengths(self) -> Tensor:
        """Positions of the new tokens, [B]."""
        return torch.from_numpy(self.cached)

    @property
    def starts_block(self) -> bool:
        """True if the new token of some row is the first of its block."""
        return not (self.cached % BLOCK_TOKENS).all()

    def tokens_since(self, earlier: DecodeRows) -> int | None:
        """0 for the same step of the same rows as `earlier`, 1 for their next step, None for any other."""
        # For few numbers comparing bytes takes a tenth of the time.
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
    """The blocks that a decode step of B rows reads, and the rows that they are read for. Row B is a dummy.

    Blocks with one reader are in a window, shared blocks in prefixes. Each read gives a partial result of attention for
    one row; partial results are numbered in the order of the window, then of each prefix for each of its readers.
    """

    step: DecodeRows
    blocks: Tensor
    """Blocks that the new tokens are written to, [B]."""
    window: Tensor
    """Blocks of the window, [N]; contiguous if `first` is not -1."""
    newest: Tensor
    """Indices in the window of the blocks of the new tokens, [B]."""
    window_rows: Tensor
    """The row that each block of the window is read for, [N]."""
    mask: Tensor
    """The mask added to scores, [N, 1, tokens of a block]: minus infinity after the end of a row, else 0."""
    prefixes: tuple[SharedPrefixes, ...]
    """Shared prefixes, grouped by their number of blocks."""
    order: Tensor
    """Partial results ordered by row, [E]."""
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
    hidden = np.zeros((len(window), BLOCK_TOKENS), dtype=np.float32)
    last = np.append(np.flatnonzero(owners[1:] != owners[:-1]), len(owners) - 1)
    hidden[index[last]] = _CAUSAL_MASKS[lengths % BLOCK_TOKENS]
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
        mask=tensor(hidden[:, None]),
        prefixes=prefixes,
        order=tensor(order),
        offsets=tensor(offsets),
        first=first,
    )


def _prefixes(blocks: Numbers, rows: Numbers, num_rows: int) -> tuple[SharedPrefixes, ...]:
    """Groups shared blocks, given in the order of the rows that read them and of their tokens, into prefixes.

    Rows that share a block share all blocks before it. So the readers of a row's blocks become fewer along the row, and
    two of its blocks have the same readers if they have equally many.
    """
    if not len(blocks):
        return ()
    unique, first_seen, inverse, counts = np.unique(blocks, return_index=True, return_inverse=True, return_counts=True)
    readers = np.split(rows[np.argsort(inverse, kind="stable")], counts.cumsum()[:-1])
    in_order = np.argsort(first_seen)  # each block in the row that reads it first
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
