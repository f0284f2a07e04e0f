"""Which blocks of a paged cache each row holds: on the host, the same on every rank of a replica."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.profiles.packing import BLOCK_TOKENS, blocks_of

Numbers = NDArray[np.int64]

_LOOSE = 8
"""Blocks are moved where one of so many has to be: a move takes a few readings, and a gap costs one in every step."""


class BlockTables:
    """Blocks are taken as rows grow, the lowest that are free first, and are free again when no row reads them.

    Those that several rows are to read are taken from the other end, so that those of single rows lie together, or can
    (`compact`). Blocks are counted from 1: block 0 is held by nobody.
    """

    def __init__(self, num_blocks: int, num_rows: int, max_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.table: Numbers = np.zeros((num_rows, blocks_of(max_tokens)), dtype=np.int64)
        """Of each row its blocks, in the order of its tokens; behind the held ones, anything."""
        self._num_held = np.zeros(num_rows, dtype=np.int64)
        self._num_readers = np.zeros(num_blocks + 1, dtype=np.int64)
        self._free = list(range(num_blocks, 0, -1))
        self.are_shared = False
        """Whether any block has several readers."""
        self.num_changes = 0
        """How often a row has let go of blocks, or come to hold those of a list, or others have moved."""
        self._compact_at = -1
        """Changes after which gaps were looked for: rows that grow leave none."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def held(self, row: int) -> Numbers:
        """The blocks of a row, in the order of its tokens."""
        found: Numbers = self.table[row, : self._num_held[row]]
        return found

    def short(self, rows: Numbers, num_tokens: Numbers) -> Numbers:
        """Of `rows`, by their place among them, those that hold too few blocks for so many tokens each."""
        found: Numbers = (self._num_held[rows] * BLOCK_TOKENS < num_tokens).nonzero()[0]
        return found

    def left(self, rows: Numbers, num_tokens: Numbers) -> int:
        """How many more tokens all of `rows` have blocks for, of which so many are held already."""
        return int((self._num_held[rows] * BLOCK_TOKENS - num_tokens).min())

    def take(self, row: int, num_tokens: int, to_share: int = 0) -> bool:
        """Lets a row hold so many tokens; where too few blocks are free nothing changes, and it says so.

        The whole blocks of the first `to_share` tokens are those that other rows are to read.
        """
        held, wanted = int(self._num_held[row]), blocks_of(num_tokens)
        if wanted - held > len(self._free):
            return False
        for index in range(held, wanted):
            block = self._free.pop(0 if index < to_share // BLOCK_TOKENS else -1)
            self.table[row, index] = block
            self._num_readers[block] = 1
        self._num_held[row] = max(held, wanted)
        return True

    def take_all(self, rows: Numbers, num_tokens: Numbers) -> bool:
        """Lets each of `rows` hold so many tokens; where too few blocks are free for all nothing changes, and it says
        so."""
        wanted = -(-num_tokens // BLOCK_TOKENS) - self._num_held[rows]
        if int(np.maximum(wanted, 0).sum()) > len(self._free):
            return False
        for index in (wanted > 0).nonzero()[0].tolist():
            self.take(int(rows[index]), int(num_tokens[index]))
        return True

    def give_back(self, rows: Numbers, num_tokens: Numbers) -> None:
        """Frees the blocks behind so many tokens of each of `rows`, which no other row reads."""
        kept = -(-num_tokens // BLOCK_TOKENS)
        longer = (kept < self._num_held[rows]).nonzero()[0]
        if not len(longer):
            return
        freed = [
            self.table[row, first : self._num_held[row]] for row, first in zip(rows[longer], kept[longer], strict=True)
        ]
        free = np.concatenate(freed)
        self._num_readers[free] = 0
        self._free = sorted([*self._free, *free.tolist()], reverse=True)
        self._num_held[rows[longer]] = kept[longer]
        self._change()

    def share(self, source: int, target: int, num_tokens: int) -> None:
        """Lets a row that holds nothing read the whole blocks of the first `num_tokens` of another."""
        self.restore(target, self.table[source, : num_tokens // BLOCK_TOKENS].tolist())

    def restore(self, row: int, blocks: Sequence[int]) -> None:
        """Lets a row that holds nothing hold just these, which others may read too."""
        self.table[row, : len(blocks)] = blocks
        self._num_held[row] = len(blocks)
        taken = {block for block in blocks if not self._num_readers[block]}
        self._num_readers[list(blocks)] += 1
        if taken:
            self._free = [block for block in self._free if block not in taken]
        self._change()

    def release(self, *rows: int) -> None:
        """The rows have ended, or have to give way."""
        read = np.concatenate([self.held(row) for row in rows])
        np.subtract.at(self._num_readers, read, 1)
        freed = np.unique(read[self._num_readers[read] == 0]).tolist()
        if freed:
            self._free.extend(reversed(freed))
            self._free.sort(reverse=True)
        self._num_held[list(rows)] = 0
        self._change()

    def compact(self) -> tuple[Numbers, Numbers]:
        """Has the blocks that one row reads lie together again, as the lowest, if rows that ended left many gaps: which
        are moved, and where to. Who calls has to move what they hold."""
        if self._compact_at == self.num_changes:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        alone, free = (self._num_readers == 1).nonzero()[0][::-1], (self._num_readers[1:] == 0).nonzero()[0] + 1
        most = min(len(alone), len(free))
        moved, to = alone[:most], free[:most]
        count = int((to < moved).sum())
        if count * _LOOSE < len(alone):
            count = 0
        moved, to = moved[:count].copy(), to[:count]
        if count:
            now_at = np.arange(self.num_blocks + 1)
            now_at[moved] = to
            self.table = now_at[self.table]
            self._num_readers[to], self._num_readers[moved] = 1, 0
            self._free = ((self._num_readers[1:] == 0).nonzero()[0] + 1)[::-1].tolist()
            self._change()
        self._compact_at = self.num_changes
        return moved, to

    def _change(self) -> None:
        self.num_changes += 1
        self.are_shared = bool(self._num_readers.max() > 1)

    def is_shared(self, blocks: Numbers) -> NDArray[np.bool_]:
        """Which of the blocks more than one row reads."""
        found: NDArray[np.bool_] = self._num_readers[blocks] > 1
        return found
