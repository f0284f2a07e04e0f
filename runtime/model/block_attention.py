"""Attention of one new token per row over a paged cache, block by block.

Keys and values stay where they lie. Every block meets the query of the row that holds it, a prefix that several rows
share those of all of them, and what they say is joined: with m_b the largest score of a block and l_b and o_b its sums
of exp(s - m) and exp(s - m) v, a row's answer is sum_b o_b / sum_b l_b, all at the row's own m (Dao et al.,
arXiv:2205.14135, section 3.1; split over keys as in Flash-Decoding). The keys and values of a prefix are read once for
all its rows, in one product of matrices for each key-value head (Juravsky et al., arXiv:2402.05099).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.profiles.packing import BLOCK_TOKENS
from meshwright.runtime.model.block_reads import BlockReads, Prefixes, RowReads
from meshwright.runtime.model.kv_cache import PagedCache


class BlockAttention:
    """The cache during a decode step, and those behind it in which the same rows go on in the same blocks: one new
    token per row, at the row's own position."""

    def __init__(self, cache: PagedCache, reads: BlockReads) -> None:
        self._cache, self._reads, self._num_rows = cache, reads, len(reads.of.rows)
        self._of, self._num_changes = reads.of, cache.tables.num_changes
        self._scale, kv_heads = cache.keys.shape[-1] ** -0.5, cache.keys.shape[2]
        within = reads.of.lengths % BLOCK_TOKENS
        places = cache.places(reads.blocks, within).view(-1, kv_heads)
        self._places = torch.stack([places, places + cache.keys[0].numel() // cache.keys.shape[-1]], dim=-1)
        self._prefixes = [_Prefixes(prefixes, self._num_rows, kv_heads) for prefixes in reads.prefixes]
        self._asked = reads.owner % self._num_rows
        readers = [reads.owner, *(one.readers.flatten() for one in reads.prefixes)]
        self._readers = torch.cat(readers) if reads.prefixes else reads.owner
        self._hidden = reads.hidden.expand(-1, kv_heads, -1).reshape(-1, 1, BLOCK_TOKENS).contiguous()
        newest = (reads.last[:, None] * kv_heads + torch.arange(kv_heads)) * BLOCK_TOKENS + within[:, None]
        self._newest = newest.flatten()
        """Of the new tokens what hides them, by its places."""

    def goes_on(self, reads: RowReads) -> bool:
        """Takes over the next token of the same rows, or the same one again; False where they are others, or have other
        blocks."""
        count = reads.tokens_since(self._of)
        if count is None or self._num_changes != self._cache.tables.num_changes or (count and reads.begins_block):
            return False
        if count:
            self._of = reads
            self._places.add_(1)
            self._newest.add_(1)
            self._hidden.view(-1).index_fill_(0, self._newest, 0.0)
        return True

    def attend(self, layer: int, query: Tensor, new: Tensor) -> Tensor:
        """[B, heads * D] from the new queries [B, kv_heads, heads / kv_heads, D]; new keys and values
        [B, kv_heads, 2, D] are kept."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        self._cache.store(layer, self._places, new)
        scored = [_Scored.of_window(self._window(keys), query.index_select(0, self._asked), self._hidden, self._scale)]
        for prefixes in self._prefixes:
            asked = query.index_select(0, prefixes.asked)
            scored.append(_Scored.of_prefixes(prefixes.held(keys), asked, prefixes.num_readers, self._scale))
        highest = torch.segment_reduce(
            self._ordered([one.highest() for one in scored]), "max", offsets=self._reads.ends, axis=0, unsafe=True
        )
        said = [scored[0].said(highest.index_select(0, self._asked), self._window(values))]
        for prefixes, one in zip(self._prefixes, scored[1:], strict=True):
            said.append(one.said(highest.index_select(0, prefixes.asked), prefixes.held(values)))
        totals, sums = (self._summed(list(column)) for column in zip(*said, strict=True))
        return (sums.view(query.shape) / totals.view(*query.shape[:3], 1)).to(query.dtype).flatten(1)

    def _window(self, held: Tensor) -> Tensor:
        """The window's blocks of [blocks, kv_heads, tokens, D]."""
        first, window = self._reads.first, self._reads.window
        return held.index_select(0, window) if first < 0 else held[first : first + len(window)]

    def _ordered(self, parts: list[Tensor]) -> Tensor:
        """What is said, numbered through, row by row [E, ...]."""
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).index_select(0, self._reads.order)

    def _summed(self, parts: list[Tensor]) -> Tensor:
        """[B, ...] of what blocks say."""
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        found = whole.new_zeros(self._num_rows + 1, *whole.shape[1:])
        return found.index_add_(0, self._readers, whole)[: self._num_rows]


class _Prefixes:
    """Prefixes of one length, and the rows that ask them."""

    def __init__(self, prefixes: Prefixes, num_rows: int, kv_heads: int) -> None:
        self.asked = prefixes.readers.flatten() % num_rows
        self.num_readers = prefixes.readers.shape[1]
        heads = torch.arange(kv_heads)
        places = prefixes.blocks[:, None] * kv_heads + heads[:, None]
        self._shape, self._places = (len(places), kv_heads, -1), places.flatten()

    def held(self, cache: Tensor) -> Tensor:
        """[M, kv_heads, n * tokens, D] from a layer's [blocks, kv_heads, tokens, D]: one token behind the other."""
        gathered = cache.flatten(0, 1).index_select(0, self._places)
        return gathered.view(*self._shape, cache.shape[-1])


class _Scored(NamedTuple):
    """Scores in fp32 of blocks or prefixes, each for its readers: [N * kv_heads, R * heads / kv_heads, tokens].

    What is said of them is in their order and in that of their readers: [N * R, heads, ...].
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
    def of_prefixes(cls, keys: Tensor, queries: Tensor, num_readers: int, scale: float) -> _Scored:
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
    return torch.bmm(one.float(), other.float())
