"""Attention of packed rows, each of several tokens behind what a paged cache has of it, for all layers laid out once.

Rows that begin see nothing but their own tokens. Those that take equally many blocks lie side by side, each filled up
to the longest of them: causal attention lets no token of a row see what is behind its end. A row that goes on meets the
blocks it holds, its new tokens among them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from meshwright.profiles.packing import BLOCK_TOKENS, blocks_of
from meshwright.runtime.model.cache_blocks import Numbers
from meshwright.runtime.model.kv_cache import PagedCache


@dataclass(frozen=True)
class SideBySide:
    """Rows of which attention takes one call: B rows of T tokens, which are filled up where they have fewer."""

    heads: Tensor
    """[B * kv_heads * (heads / kv_heads + 2) * T]: among those of all tokens, the queries of each group, its key and
    its value."""
    num_tokens: int
    """T."""
    blocks: Tensor | None = None
    """Of a row that goes on, which is alone: [2 * kv_heads * n], the blocks of each head, first of all keys, then of
    all values."""
    hidden: Tensor | None = None
    """Of the same: [T, n * tokens of a block], minus infinity for keys that lie behind a token, else 0."""


@dataclass(frozen=True)
class PackedReads:
    """What a pass over S tokens of packed rows writes and reads."""

    positions: Tensor
    """[S]: of the tokens in their sequences."""
    places: Tensor
    """[S, kv_heads, 2]: where keys and values go among a layer's."""
    parts: tuple[SideBySide, ...]
    answers: Tensor
    """[S * heads]: of each token's heads, their place among what all parts answer."""


def packed_reads(
    cache: PagedCache, rows: Sequence[int], cached: Sequence[int], lengths: Sequence[int], queries_per_group: int
) -> PackedReads:
    """The b-th of the packed rows has `lengths[b]` tokens behind the `cached[b]` tokens of `rows[b]` and holds blocks
    for them; a key-value head meets `queries_per_group` queries of each token."""
    packing = _Packing(cache, lengths, queries_per_group)
    positions = np.arange(sum(lengths)) + np.repeat(np.array(cached) - packing.starts, lengths)
    blocks = cache.tables.table[np.repeat(rows, lengths), positions // BLOCK_TOKENS]
    heads = np.arange(packing.num_heads)
    place = (blocks[:, None] * packing.num_heads + heads) * BLOCK_TOKENS + (positions % BLOCK_TOKENS)[:, None]
    beginning = defaultdict[int, list[int]](list)
    for index, length in enumerate(lengths):
        if not cached[index]:
            beginning[blocks_of(length)].append(index)
    parts = [packing.side_by_side(indices) for indices in beginning.values()]
    for index, row in enumerate(rows):
        if cached[index]:
            parts.append(packing.going_on(index, cache.tables.table[row], cached[index]))
    return PackedReads(
        positions=torch.from_numpy(positions),
        places=torch.from_numpy(np.stack([place, place + packing.first_value * BLOCK_TOKENS], axis=-1)),
        parts=tuple(parts),
        answers=torch.from_numpy(packing.answers.ravel()),
    )


class _Packing:
    """Where the heads of packed rows lie before and after attention."""

    def __init__(self, cache: PagedCache, lengths: Sequence[int], queries_per_group: int) -> None:
        _, num_blocks, self.num_heads, _, _ = cache.keys.shape
        self.first_value = num_blocks * self.num_heads
        self._dtype, self._per_group = cache.keys.dtype, queries_per_group
        self._lengths = np.array(lengths)
        self.starts: Numbers = self._lengths.cumsum() - self._lengths
        self.answers: Numbers = np.empty((sum(lengths), self.num_heads, queries_per_group), dtype=np.int64)
        self._num_answers = 0

    def side_by_side(self, indices: Sequence[int]) -> SideBySide:
        """Of rows by their places among all."""
        starts, lengths = self.starts[indices], self._lengths[indices]
        longest, within = int(lengths.max()), self.num_heads * (self._per_group + 2)
        steps = np.arange(longest)
        tokens = starts[:, None] + np.minimum(steps, lengths[:, None] - 1)
        heads = tokens[:, None] * within + np.arange(within)[:, None]
        self._place_answers(tokens, steps < lengths[:, None])
        return SideBySide(torch.from_numpy(heads.ravel()), longest)

    def going_on(self, index: int, table: Numbers, cached: int) -> SideBySide:
        """Of one row, which holds the blocks of the table."""
        part = self.side_by_side([index])
        num_keys = cached + part.num_tokens
        keys = table[: blocks_of(num_keys)] * self.num_heads + np.arange(self.num_heads)[:, None]
        blocks = np.concatenate([keys.ravel(), keys.ravel() + self.first_value])
        later = torch.full((part.num_tokens, keys.shape[1] * BLOCK_TOKENS), -torch.inf, dtype=self._dtype)
        return SideBySide(part.heads, part.num_tokens, torch.from_numpy(blocks), later.triu_(cached + 1))

    def _place_answers(self, tokens: Numbers, is_token: NDArray[np.bool_]) -> None:
        """What attention says of tokens [B, T] comes as [B, kv_heads, T, queries of a group]."""
        shape = (len(tokens), self.num_heads, tokens.shape[1], self._per_group)
        end = self._num_answers + tokens.size * self.num_heads * self._per_group
        found = np.arange(self._num_answers, end).reshape(shape).swapaxes(1, 2)
        self.answers[tokens[is_token]] = found[is_token]
        self._num_answers = end


class PackedAttention:
    """The cache during a pass over packed rows, whose turned heads [S, kv_heads, heads / kv_heads + 2, D] are in
    `turned` when it is asked."""

    def __init__(self, cache: PagedCache, reads: PackedReads, turned: Tensor) -> None:
        self._cache, self._reads, self._turned = cache, reads, turned
        self._groups, self._per_group, self._size = turned.shape[1:]

    def attend(self, layer: int, query: Tensor, new: Tensor) -> Tensor:
        """[S, heads * D] from the queries [S, kv_heads, heads / kv_heads, D]; new keys and values [S, kv_heads, 2, D]
        are kept."""
        self._cache.store(layer, self._reads.places, new)
        said = [self._said(layer, part) for part in self._reads.parts]
        joined = said[0] if len(said) == 1 else torch.cat(said)
        return joined.index_select(0, self._reads.answers).view(len(query), -1)

    def _said(self, layer: int, part: SideBySide) -> Tensor:
        """What the part answers, [B * kv_heads * T * heads / kv_heads, D]."""
        size, num_queries = self._size, self._per_group - 2
        heads = self._turned.view(-1, size).index_select(0, part.heads)
        own = heads.view(-1, self._per_group, part.num_tokens, size)
        query, key, value = own.split((num_queries, 1, 1), dim=1)
        if part.blocks is not None:
            held = self._cache.of_layer(layer).view(-1, BLOCK_TOKENS * size).index_select(0, part.blocks)
            key, value = held.view(2, self._groups, 1, -1, size)
        # A key-value head is laid before the queries of its group as a view, of which the kernel makes no copy.
        key, value = (one.expand(-1, num_queries, -1, -1) for one in (key, value))
        said = F.scaled_dot_product_attention(query, key, value, attn_mask=part.hidden, is_causal=part.hidden is None)
        return said.transpose(1, 2).reshape(-1, size)
