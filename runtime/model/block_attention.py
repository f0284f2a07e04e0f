"""Attention of one new token per row over a paged cache, block by block.

Keys and values stay where they lie. Every block meets the query of the row that holds it, and what the blocks of a row
say is joined: with m_b the largest score of a block and l_b and o_b its sums of exp(s - m) and exp(s - m) v, a row's
answer is sum_b o_b / sum_b l_b, all at the row's own m (Dao et al., arXiv:2205.14135, section 3.1; split over keys as
in Flash-Decoding). A block that several rows share is read once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.profiles.packing import BLOCK_TOKENS
from meshwright.runtime.model.cache_blocks import BlockTables, Numbers
from meshwright.runtime.model.kv_cache import PagedCache

_IN_PLACE = 0.5
"""Of the blocks between the first and the last that are read: with fewer, the ones that are read are copied first."""


class StepShape(NamedTuple):
    """What a decode step is rounded up to: its rows, the blocks of the window, those that are shared and the readers
    of each."""

    rows: int
    blocks: int
    shared: int
    readers: int


@dataclass(frozen=True)
class BlockReads:
    """Which blocks a decode step of B rows reads, and for whom. Row B stands for nobody.

    Blocks are read in a window, of which each has one reader, and those that are shared apart from it, with as many
    readers each as the most has. What they say is numbered through: the window's, then that of each shared block for
    each of its readers.
    """

    lengths: Tensor
    """[B]: tokens that are cached, so the positions of the new ones."""
    blocks: Tensor
    """[B]: where the new tokens go."""
    window: Tensor
    """[N]: the blocks; neighbours in their order where `first` is 0 or more."""
    owner: Tensor
    """[N]: the rows."""
    hidden: Tensor
    """[N, 1, tokens of a block]: minus infinity behind the end of a row, else 0."""
    shared: Tensor
    """[M]: blocks."""
    readers: Tensor
    """[M, R]: rows."""
    order: Tensor
    """[E]: of every row, one row after another, what its blocks say."""
    ends: Tensor
    """[B + 1]: where each row begins in `order`, and the end."""
    first: int
    """The first block of a window that is read in place, -1 of one that is copied."""

    def copy_(self, other: BlockReads) -> None:
        """Takes over what another one of the same shape says."""
        for field in fields(self):
            mine = getattr(self, field.name)
            if isinstance(mine, Tensor):
                mine.copy_(getattr(other, field.name))

    def rounded(self, shape: StepShape) -> BlockReads:
        """The same with rows and blocks that nobody asks for, one row at least: each of them reads and writes block 0.

        The window becomes the first blocks of the cache, read in place.
        """
        num_rows, alone = len(self.lengths), len(self.window)
        more, said = shape.rows - num_rows, shape.blocks + shape.shared * shape.readers
        owner = torch.full((shape.blocks,), shape.rows)
        owner[self.window] = torch.where(self.owner == num_rows, shape.rows, self.owner)
        hidden = self.hidden.new_zeros(shape.blocks, *self.hidden.shape[1:])
        hidden[self.window] = self.hidden
        readers = torch.full((shape.shared, shape.readers), shape.rows)
        width = self.readers.shape[1]
        readers[: len(self.shared), :width] = torch.where(self.readers == num_rows, shape.rows, self.readers)
        which, reader = (self.order - alone) // width, (self.order - alone) % width
        of_shared = shape.blocks + which * shape.readers + reader
        own = self.order < alone
        order = torch.zeros(said + shape.rows, dtype=torch.int64)
        order[: len(self.order)] = torch.where(own, self.window[self.order.clamp(max=alone - 1)], of_shared)
        ends = torch.cat([self.ends, self.ends[-1] + torch.arange(1, more + 1)])
        ends[-1] = len(order)
        return BlockReads(
            lengths=F.pad(self.lengths, (0, more)),
            blocks=F.pad(self.blocks, (0, more)),
            window=torch.arange(shape.blocks),
            owner=owner,
            hidden=hidden,
            shared=F.pad(self.shared, (0, shape.shared - len(self.shared))),
            readers=readers,
            order=order,
            ends=ends,
            first=0,
        )

    def to(self, device: torch.device) -> BlockReads:
        """The same on a device."""
        moved: dict[str, Any] = {name: v.to(device) for name, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)


def block_reads(tables: BlockTables, rows: Numbers, lengths: Numbers) -> BlockReads:
    """For one more token of each of `rows` [B], which hold a block for it behind the `lengths` [B] that are cached."""
    num_rows, counts = len(rows), lengths // BLOCK_TOKENS + 1
    ends = np.concatenate([[0], counts.cumsum()])
    row = np.repeat(np.arange(num_rows), counts)
    block = tables.table[rows[row], np.arange(ends[-1]) - ends[row]]
    is_shared = tables.is_shared(block)
    alone, owners = block[~is_shared], row[~is_shared]
    shared, readers, said_by_shared = _shared(block[is_shared], row[is_shared], num_rows)

    first, width = int(alone.min()), int(alone.max()) - int(alone.min()) + 1
    if len(alone) >= _IN_PLACE * width:
        place, window = alone - first, np.arange(first, first + width)
    else:
        place, window, first = np.arange(len(alone)), alone, -1
    owner = np.full(len(window), num_rows)
    owner[place] = owners
    order = np.empty(len(block), dtype=np.int64)
    order[~is_shared], order[is_shared] = place, len(window) + said_by_shared
    last = ends[1:] - 1
    hidden = np.zeros((len(window), BLOCK_TOKENS), dtype=np.float32)
    hidden[order[last]] = np.where(np.arange(BLOCK_TOKENS) > (lengths % BLOCK_TOKENS)[:, None], -np.inf, 0.0)
    tensor = torch.from_numpy
    return BlockReads(
        lengths=tensor(lengths),
        blocks=tensor(block[last]),
        window=tensor(window),
        owner=tensor(owner),
        hidden=tensor(hidden[:, None]),
        shared=tensor(shared),
        readers=tensor(readers),
        order=tensor(order),
        ends=tensor(ends),
        first=first,
    )


def _shared(blocks: Numbers, rows: Numbers, num_rows: int) -> tuple[Numbers, Numbers, Numbers]:
    """The different ones of `blocks`, their readers [M, R] filled up with `num_rows`, and each pair's place in it."""
    if not len(blocks):
        return blocks, np.empty((0, 1), dtype=np.int64), blocks
    different, which, numbers = np.unique(blocks, return_inverse=True, return_counts=True)
    order = np.argsort(which, kind="stable")
    rank = np.empty(len(blocks), dtype=np.int64)
    rank[order] = np.arange(len(blocks)) - np.repeat(numbers.cumsum() - numbers, numbers)
    readers = np.full((len(different), numbers.max()), num_rows)
    readers[which, rank] = rows
    return different, readers, which * readers.shape[1] + rank


class BlockAttention:
    """The cache during a decode step: one new token per row, at the row's own position."""

    def __init__(self, cache: PagedCache, reads: BlockReads) -> None:
        self._cache, self._reads, self._num_rows = cache, reads, len(reads.lengths)
        self._scale, kv_heads = cache.keys.shape[-1] ** -0.5, cache.keys.shape[2]
        self._places = cache.places(reads.blocks, reads.lengths % BLOCK_TOKENS)
        self._asked = reads.owner % self._num_rows
        self._asked_of_shared = reads.readers.flatten() % self._num_rows
        self._readers = torch.cat([reads.owner, reads.readers.flatten()]) if len(reads.shared) else reads.owner
        self._hidden = reads.hidden.repeat_interleave(kv_heads, dim=0)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[B, kv_heads, heads / kv_heads, D] from the new queries of that shape; new keys and values [B, kv_heads, D]
        are kept."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        for cache, new in ((keys, key), (values, value)):
            cache.view(-1, cache.shape[-1]).index_copy_(0, self._places, new.reshape(-1, cache.shape[-1]))
        parts = [_Scored.of_window(self._window(keys), query.index_select(0, self._asked), self._hidden, self._scale)]
        if len(self._reads.shared):
            asked, held = query.index_select(0, self._asked_of_shared), keys.index_select(0, self._reads.shared)
            parts.append(_Scored.of_shared(held, asked, self._reads.readers.shape[1], self._scale))
        highest = torch.segment_reduce(
            self._ordered([part.highest() for part in parts]), "max", offsets=self._reads.ends, axis=0, unsafe=True
        )
        said = [parts[0].said(highest.index_select(0, self._asked), self._window(values))]
        if len(parts) > 1:
            held = values.index_select(0, self._reads.shared)
            said.append(parts[1].said(highest.index_select(0, self._asked_of_shared), held))
        totals, sums = (self._summed(list(column)) for column in zip(*said, strict=True))
        return (sums.view_as(query) / totals.view(*query.shape[:3], 1)).to(query.dtype)

    def _window(self, held: Tensor) -> Tensor:
        """The window's blocks of [blocks, kv_heads, tokens, D]."""
        first, window = self._reads.first, self._reads.window
        return held.index_select(0, window) if first < 0 else held[first : first + len(window)]

    def _ordered(self, parts: list[Tensor]) -> Tensor:
        """What blocks say [N + M * R, ...], row by row in the order of a row's tokens [E, ...]."""
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).index_select(0, self._reads.order)

    def _summed(self, parts: list[Tensor]) -> Tensor:
        """[B, ...] of what blocks say. On a GPU, where additions to one row would come in any order, in a row's own."""
        if parts[0].is_cuda:
            return torch.segment_reduce(self._ordered(parts), "sum", offsets=self._reads.ends, axis=0, unsafe=True)
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        found = whole.new_zeros(self._num_rows + 1, *whole.shape[1:])
        return found.index_add_(0, self._readers, whole)[: self._num_rows]


class _Scored(NamedTuple):
    """Scores in fp32 of blocks, each for its readers: [N * kv_heads, R * heads / kv_heads, tokens of a block].

    What is said of them is in the order of blocks and of their readers: [N * R, heads, ...].
    """

    scores: Tensor
    num_blocks: int
    num_readers: int

    @classmethod
    def of_window(cls, keys: Tensor, queries: Tensor, hidden: Tensor, scale: float) -> _Scored:
        """Of keys [N, kv_heads, tokens, D] for the queries [N, kv_heads, heads / kv_heads, D]."""
        held = keys.flatten(0, 1).transpose(1, 2)
        if keys.dtype == torch.float32:
            scores = torch.baddbmm(hidden, queries.flatten(0, 1), held, alpha=scale)
        else:
            scores = _product(queries.flatten(0, 1), held).mul_(scale).add_(hidden)
        return cls(scores, len(keys), 1)

    @classmethod
    def of_shared(cls, keys: Tensor, queries: Tensor, num_readers: int, scale: float) -> _Scored:
        """Of keys [M, kv_heads, tokens, D] for the queries [M * R, kv_heads, heads / kv_heads, D]."""
        together = queries.unflatten(0, (-1, num_readers)).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        return cls(_product(together, keys.flatten(0, 1).transpose(1, 2)).mul_(scale), len(keys), num_readers)

    def highest(self) -> Tensor:
        return self._by_reader(self.scores.amax(-1))

    def said(self, highest: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of exponentials, and of the values [N, kv_heads, tokens, D] times them; `highest` [N * R, heads] are
        those of the rows."""
        if self.num_readers == 1:
            of_row = highest.view(*self.scores.shape[:2], 1)
        else:
            of_row = highest.view(self.num_blocks, self.num_readers, values.shape[1], -1).transpose(1, 2)
            of_row = of_row.reshape(*self.scores.shape[:2], 1)
        weights = self.scores.sub_(of_row).exp_()
        sums = _product(weights.to(values.dtype), values.flatten(0, 1))
        return self._by_reader(weights.sum(-1)), self._by_reader(sums)

    def _by_reader(self, of_blocks: Tensor) -> Tensor:
        """[N * R, heads, ...] of [N * kv_heads, R * heads / kv_heads, ...]."""
        if self.num_readers == 1:
            return of_blocks.view(self.num_blocks, -1, *of_blocks.shape[2:])
        apart = of_blocks.unflatten(1, (self.num_readers, -1)).unflatten(0, (self.num_blocks, -1))
        return apart.transpose(1, 2).flatten(2, 3).flatten(0, 1)


def _product(one: Tensor, other: Tensor) -> Tensor:
    """[N, A, C] in fp32 of [N, A, B] and [N, B, C]."""
    if one.dtype == torch.float32:
        return torch.bmm(one, other)
    if one.is_cuda:
        return torch.bmm(one, other, out_dtype=torch.float32)
    return torch.bmm(one.float(), other.float())
