"""Which blocks of a paged cache a decode step reads, and for whom: on the host, once for all layers.

A block that one row holds meets the query of that row. Blocks that the same rows share, as the samples of a prompt do,
are joined to a prefix, which meets the queries of all of them at once (Juravsky et al., arXiv:2402.05099, section 3).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from meshwright.profiles.packing import BLOCK_TOKENS
from meshwright.runtime.model.cache_blocks import BlockTables, Numbers

_IN_PLACE = 0.5
"""Of the blocks between the first and the last that are read: with fewer, the ones that are read are copied first."""

_HIDDEN = np.triu(np.full((BLOCK_TOKENS, BLOCK_TOKENS), -np.inf, dtype=np.float32), 1)
"""Of the tokens of a block, by the last that is seen: minus infinity behind it, else 0."""


@dataclass(frozen=True)
class RowReads:
    """A decode step of B rows."""

    rows: Numbers
    """[B]"""
    cached: Numbers
    """[B]: tokens of each that are cached. For one more it holds a block."""

    @property
    def lengths(self) -> Tensor:
        """[B]: the positions of the new tokens."""
        return torch.from_numpy(self.cached)

    @property
    def begins_block(self) -> bool:
        """Whether some row has nothing yet in the block of its new token."""
        return not (self.cached % BLOCK_TOKENS).all()

    def tokens_since(self, earlier: RowReads) -> int | None:
        """0 at the same step of the same rows and 1 at their next, None at any other."""
        # Of few numbers to compare bytes is a tenth of the work.
        if earlier.rows.tobytes() != self.rows.tobytes():
            return None
        now = self.cached.tobytes()
        if earlier.cached.tobytes() == now:
            return 0
        return 1 if (earlier.cached + 1).tobytes() == now else None


@dataclass(frozen=True)
class Prefixes:
    """Runs of equally many blocks, and for each the rows that read it, filled up with the row that is nobody's."""

    blocks: Tensor
    """[M, n]"""
    readers: Tensor
    """[M, R]"""


@dataclass(frozen=True)
class BlockReads:
    """Which blocks a decode step of B rows reads, and for whom. Row B stands for nobody.

    Blocks are read in a window, of which each has one reader, and those that are shared apart from it, by prefixes.
    What they say is numbered through: the window's, then that of each prefix for each of its readers.
    """

    of: RowReads
    blocks: Tensor
    """[B]: where the new tokens go."""
    window: Tensor
    """[N]: the blocks; neighbours in their order where `first` is 0 or more."""
    last: Tensor
    """[B]: those of the new tokens, by their places in the window."""
    owner: Tensor
    """[N]: the rows."""
    hidden: Tensor
    """[N, 1, tokens of a block]: minus infinity behind the end of a row, else 0."""
    prefixes: tuple[Prefixes, ...]
    """Of each length those that are so long."""
    order: Tensor
    """[E]: of every row, one row after another, what its blocks say."""
    ends: Tensor
    """[B + 1]: where each row begins in `order`, and the end."""
    first: int
    """The first block of a window that is read in place, -1 of one that is copied."""

    @property
    def num_shared(self) -> int:
        """Blocks of all prefixes."""
        return sum(one.blocks.numel() for one in self.prefixes)


def block_reads(tables: BlockTables, reads: RowReads) -> BlockReads:
    """Of a cache with these tables."""
    rows, lengths = reads.rows, reads.cached
    num_rows, counts = len(rows), lengths // BLOCK_TOKENS + 1
    ends = np.concatenate([[0], counts.cumsum()])
    row = np.repeat(np.arange(num_rows), counts)
    block = tables.table[rows[row], np.arange(ends[-1]) - ends[row]]
    alone, owners, prefixes = block, row, tuple[Prefixes, ...]()
    if tables.are_shared:
        is_shared = tables.is_shared(block)
        alone, owners = block[~is_shared], row[~is_shared]
        prefixes = _prefixes(block[is_shared], row[is_shared], num_rows)

    first, width = int(alone.min()), int(alone.max()) - int(alone.min()) + 1
    if len(alone) >= _IN_PLACE * width:
        place, window = alone - first, np.arange(first, first + width)
    else:
        place, window, first = np.arange(len(alone)), alone, -1
    owner = np.full(len(window), num_rows)
    owner[place] = owners
    hidden = np.zeros((len(window), BLOCK_TOKENS), dtype=np.float32)
    last = np.append(np.flatnonzero(owners[1:] != owners[:-1]), len(owners) - 1)
    hidden[place[last]] = _HIDDEN[lengths % BLOCK_TOKENS]
    order, ends_said = place, ends
    if prefixes:
        readers = np.concatenate([owner, *(one.readers.numpy().ravel() for one in prefixes)])
        order, ends_said = _by_row(readers, num_rows)
    tensor = torch.from_numpy
    return BlockReads(
        of=reads,
        blocks=tensor(alone[last]),
        window=tensor(window),
        last=tensor(place[last]),
        owner=tensor(owner),
        hidden=tensor(hidden[:, None]),
        prefixes=prefixes,
        order=tensor(order),
        ends=tensor(ends_said),
        first=first,
    )


def _prefixes(blocks: Numbers, rows: Numbers, num_rows: int) -> tuple[Prefixes, ...]:
    """Of blocks that are shared, in the order of the rows that read them and of their tokens.

    Rows that share a block share those before it too. So the readers of one row's blocks become fewer along it, and
    those of two are the same where they are as many.
    """
    if not len(blocks):
        return ()
    different, met, which, numbers = np.unique(blocks, return_index=True, return_inverse=True, return_counts=True)
    readers = np.split(rows[np.argsort(which, kind="stable")], numbers.cumsum()[:-1])
    along = np.argsort(met)  # each block in the row that reads it first
    cuts = np.flatnonzero((np.diff(rows[met[along]]) != 0) | (np.diff(numbers[along]) != 0)) + 1
    by_length: defaultdict[int, list[Numbers]] = defaultdict(list)
    for run in np.split(along, cuts):
        by_length[len(run)].append(run)
    found = []
    for runs in by_length.values():
        read = np.full((len(runs), max(numbers[run[0]] for run in runs)), num_rows)
        for index, run in enumerate(runs):
            read[index, : numbers[run[0]]] = readers[run[0]]
        found.append(Prefixes(torch.from_numpy(different[np.stack(runs)]), torch.from_numpy(read)))
    return tuple(found)


def _by_row(readers: Numbers, num_rows: int) -> tuple[Numbers, Numbers]:
    """Of what is said to these rows [said], all that is said to somebody, row by row, and where each row begins in it
    and the end [B + 1]."""
    ends = np.concatenate([[0], np.bincount(readers, minlength=num_rows)[:num_rows].cumsum()])
    return np.argsort(readers, kind="stable")[: ends[-1]], ends
