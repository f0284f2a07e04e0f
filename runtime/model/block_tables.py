"""Block tables of a paged KV cache: allocation and sharing of its blocks, on the host and equal on all ranks of a
replica."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.profiles.packing import BLOCK_TOKENS, num_blocks_for

Numbers = NDArray[np.int64]

_COMPACT_SHARE = 8
"""Blocks are compacted if at least one in this many would move: moving a block takes as long as a few reads of it,
whereas a gap costs one more read in every decode step."""


class BlockTables:
    """Allocates blocks as rows grow, lowest numbers first, and frees them when no row reads them any more.

    Blocks that several rows will read are allocated from the highest numbers, so that blocks with one reader are
    contiguous, or can be made so (`compact`). Block numbers start at 1: block 0 is never allocated.
    """

    def __init__(self, num_blocks: int, num_rows: int, max_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.table: Numbers = np.zeros((num_rows, num_blocks_for(max_tokens)), dtype=np.int64)
        """The blocks of each row in the order of its tokens, [rows, blocks]; entries after its blocks are undefined."""
        self._blocks_per_row = np.zeros(num_rows, dtype=np.int64)
        self._num_readers = np.zeros(num_blocks + 1, dtype=np.int64)
        self._free = list(range(num_blocks, 0, -1))
        self.has_shared_blocks = False
        """True if any block has several readers."""
        self.num_changes = 0
        """Number of times that blocks were freed, shared, restored or moved."""
        self._compact_at = -1
        """Value of `num_changes` at the last `compact`; until it changes, rows only grow and there are no new gaps."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_of_row(self, row: int) -> Numbers:
        """The blocks of a row, in the order of its tokens."""
        blocks: Numbers = self.table[row, : self._blocks_per_row[row]]
        return blocks

    def rows_short_of_blocks(self, rows: Numbers, num_tokens: Numbers) -> Numbers:
        """Indices into `rows` of those that have too few blocks for `num_tokens` each."""
        indices: Numbers = (self._blocks_per_row[rows] * BLOCK_TOKENS < num_tokens).nonzero()[0]
        return indices

    def tokens_left(self, rows: Numbers, num_tokens: Numbers) -> int:
        """Number of further tokens that every one of `rows` has blocks for, beyond its `num_tokens`."""
        return int(self.tokens_left_in_each(rows, num_tokens).min())

    def tokens_left_in_each(self, rows: Numbers, num_tokens: Numbers) -> Numbers:
        """Number of further tokens that each of `rows` has blocks for, beyond its `num_tokens`."""
        left: Numbers = self._blocks_per_row[rows] * BLOCK_TOKENS - num_tokens
        return left

    def blocks_missing(self, rows: Numbers, num_tokens: Numbers) -> int:
        """Number of blocks that `rows` need beyond those they hold, for `num_tokens` tokens each."""
        return int(np.maximum(-(-num_tokens // BLOCK_TOKENS) - self._blocks_per_row[rows], 0).sum())

    def allocate(self, row: int, num_tokens: int, shared_tokens: int = 0) -> bool:
        """Allocates blocks for `num_tokens` tokens of a row; returns False, and changes nothing, if too few are free.

        The full blocks of the first `shared_tokens` tokens will be read by other rows too.
        """
        present, needed = int(self._blocks_per_row[row]), num_blocks_for(num_tokens)
        if needed - present > len(self._free):
            return False
        for index in range(present, needed):
            block = self._free.pop(0 if index < shared_tokens // BLOCK_TOKENS else -1)
            self.table[row, index] = block
            self._num_readers[block] = 1
        self._blocks_per_row[row] = max(present, needed)
        return True

    def allocate_all(self, rows: Numbers, num_tokens: Numbers) -> bool:
        """Allocates blocks for `num_tokens` tokens of each of `rows`; returns False, and changes nothing, if too few
        are free for all."""
        if self.blocks_missing(rows, num_tokens) > len(self._free):
            return False
        missing = -(-num_tokens // BLOCK_TOKENS) - self._blocks_per_row[rows]
        for index in (missing > 0).nonzero()[0].tolist():
            self.allocate(int(rows[index]), int(num_tokens[index]))
        return True

    def truncate(self, rows: Numbers, num_tokens: Numbers) -> None:
        """Frees the blocks after the first `num_tokens` tokens of each of `rows`, which no other row may read."""
        num_kept = -(-num_tokens // BLOCK_TOKENS)
        longer = (num_kept < self._blocks_per_row[rows]).nonzero()[0]
        if not len(longer):
            return
        freed_by_row = [
            self.table[row, first : self._blocks_per_row[row]]
            for row, first in zip(rows[longer], num_kept[longer], strict=True)
        ]
        freed = np.concatenate(freed_by_row)
        self._num_readers[freed] = 0
        self._free = sorted([*self._free, *freed.tolist()], reverse=True)
        self._blocks_per_row[rows[longer]] = num_kept[longer]
        self._record_change()

    def share(self, source: int, target: int, num_tokens: int) -> None:
        """Gives a row without blocks the full blocks of the first `num_tokens` tokens of another row, so that both rows
        read them."""
        self.restore(target, self.table[source, : num_tokens // BLOCK_TOKENS].tolist())

    def restore(self, row: int, blocks: Sequence[int]) -> None:
        """Gives a row without blocks exactly these blocks, which other rows may read too."""
        self.table[row, : len(blocks)] = blocks
        self._blocks_per_row[row] = len(blocks)
        allocated = {block for block in blocks if not self._num_readers[block]}
        self._num_readers[list(blocks)] += 1
        if allocated:
            self._free = [block for block in self._free if block not in allocated]
        self._record_change()

    def release(self, *rows: int) -> None:
        """Releases all blocks of rows that have ended or are pre-empted; frees those that no other row reads."""
        released = np.concatenate([self.blocks_of_row(row) for row in rows])
        np.subtract.at(self._num_readers, released, 1)
        freed = np.unique(released[self._num_readers[released] == 0]).tolist()
        if freed:
            self._free.extend(reversed(freed))
            self._free.sort(reverse=True)
        self._blocks_per_row[list(rows)] = 0
        self._record_change()

    def compact(self) -> tuple[Numbers, Numbers]:
        """Moves the blocks with one reader to the lowest numbers, if rows that ended left many gaps.

        Returns the old and the new numbers of the moved blocks; the caller has to move their contents.
        """
        if self._compact_at == self.num_changes:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        single, free = (self._num_readers == 1).nonzero()[0][::-1], (self._num_readers[1:] == 0).nonzero()[0] + 1
        max_count = min(len(single), len(free))
        moved, to = single[:max_count], free[:max_count]
        count = int((to < moved).sum())
        if count * _COMPACT_SHARE < len(single):
            count = 0
        moved, to = moved[:count].copy(), to[:count]
        if count:
            new_numbers = np.arange(self.num_blocks + 1)
            new_numbers[moved] = to
            self.table = new_numbers[self.table]
            self._num_readers[to], self._num_readers[moved] = 1, 0
            self._free = ((self._num_readers[1:] == 0).nonzero()[0] + 1)[::-1].tolist()
            self._record_change()
        self._compact_at = self.num_changes
        return moved, to

    def _record_change(self) -> None:
        self.num_changes += 1
        self.has_shared_blocks = bool(self._num_readers.max() > 1)

    def is_shared(self, blocks: Numbers) -> NDArray[np.bool_]:
        """A mask over `blocks`, true for those that several rows read."""
        mask: NDArray[np.bool_] = self._num_readers[blocks] > 1
        return mask
