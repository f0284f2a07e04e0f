"""Attention of packed rows with several new tokens each over a paged cache, with indices that all layers share.

Rows that start see only their own tokens. Those that take equally many blocks are batched, each padded to the longest
of them: causal attention keeps a row's tokens from seeing the padding after its end. A row that continues reads the
blocks it holds, which include its new tokens.
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

from meshwright.profiles.packing import BLOCK_TOKENS, num_blocks_for
from meshwright.runtime.model.cache_blocks import Numbers
from meshwright.runtime.model.kv_cache import PagedCache


@dataclass(frozen=True)
class RowBatch:
    """Rows that are attended in one call: B rows of T tokens, padded where they have fewer."""

    head_index: Tensor
    """[B * kv_heads * (heads / kv_heads + 2) * T]: indices into the heads of all tokens, of the queries of each group,
    its key and its value."""
    num_tokens: int
    """T, the tokens of a row."""
    block_index: Tensor | None = None
    """Only for a row that continues, which is alone: [2 * kv_heads * n], the blocks of each head, first of all keys,
    then of all values."""
    mask: Tensor | None = None
    """Only for a row that continues: the mask [T, n * tokens of a block], minus infinity for keys after a token, else
    0."""


@dataclass(frozen=True)
class PackedReads:
    """The indices by which a pass over S tokens of packed rows writes and reads the cache."""

    positions: Tensor
    """[S]: the positions of the tokens in their sequences."""
    cache_index: Tensor
    """[S, kv_heads, 2]: where keys and values are stored in a layer's cache."""
    parts: tuple[RowBatch, ...]
    output_index: Tensor
    """[S * heads]: the index of each token's heads in the concatenated outputs of all parts."""


def packed_reads(
    cache: PagedCache, rows: Sequence[int], cached: Sequence[int], lengths: Sequence[int], queries_per_group: int
) -> PackedReads:
    """Compute the indices for packed rows: row `rows[b]` has `cached[b]` tokens in the cache and `lengths[b]` new ones,
    and holds blocks for all of them. `queries_per_group` query heads share a key-value head."""
    packing = _Packing(cache, lengths, queries_per_group)
    positions = np.arange(sum(lengths)) + np.repeat(np.array(cached) - packing.starts, lengths)
    blocks = cache.tables.table[np.repeat(rows, lengths), positions // BLOCK_TOKENS]
    heads = np.arange(packing.num_heads)
    place = (blocks[:, None] * packing.num_heads + heads) * BLOCK_TOKENS + (positions % BLOCK_TOKENS)[:, None]
    starting = defaultdict[int, list[int]](list)
    for index, length in enumerate(lengths):
        if not cached[index]:
            starting[num_blocks_for(length)].append(index)
    parts = [packing.batch_rows(indices) for indices in starting.values()]
    for index, row in enumerate(rows):
        if cached[index]:
            parts.append(packing.continued_row(index, cache.tables.table[row], cached[index]))
    return PackedReads(
        positions=torch.from_numpy(positions),
        cache_index=torch.from_numpy(np.stack([place, place + packing.first_value * BLOCK_TOKENS], axis=-1)),
        parts=tuple(parts),
        output_index=torch.from_numpy(packing.output_index.ravel()),
    )


class _Packing:
    """Computes the indices of the heads of packed rows before and after attention."""

    def __init__(self, cache: PagedCache, lengths: Sequence[int], queries_per_group: int) -> None:
        _, num_blocks, self.num_heads, _, _ = cache.keys.shape
        self.first_value = num_blocks * self.num_heads
        self._dtype, self._per_group = cache.keys.dtype, queries_per_group
        self._lengths = np.array(lengths)
        self.starts: Numbers = self._lengths.cumsum() - self._lengths
        self.output_index: Numbers = np.empty((sum(lengths), self.num_heads, queries_per_group), dtype=np.int64)
        self._num_outputs = 0

    def batch_rows(self, indices: Sequence[int]) -> RowBatch:
        """Lay out rows, by their indices among all, to be attended in one call."""
        starts, lengths = self.starts[indices], self._lengths[indices]
        longest, heads_per_token = int(lengths.max()), self.num_heads * (self._per_group + 2)
        offsets = np.arange(longest)
        tokens = starts[:, None] + np.minimum(offsets, lengths[:, None] - 1)
        heads = tokens[:, None] * heads_per_token + np.arange(heads_per_token)[:, None]
        self._place_outputs(tokens, offsets < lengths[:, None])
        return RowBatch(torch.from_numpy(heads.ravel()), longest)

    def continued_row(self, index: int, table: Numbers, cached: int) -> RowBatch:
        """Lay out one row that continues and holds the blocks of the table."""
        part = self.batch_rows([index])
        num_keys = cached + part.num_tokens
        keys = table[: num_blocks_for(num_keys)] * self.num_heads + np.arange(self.num_heads)[:, None]
        blocks = np.concatenate([keys.ravel(), keys.ravel() + self.first_value])
        later = torch.full((part.num_tokens, keys.shape[1] * BLOCK_TOKENS), -torch.inf, dtype=self._dtype)
        return RowBatch(part.head_index, part.num_tokens, torch.from_numpy(blocks), later.triu_(cached + 1))

    def _place_outputs(self, tokens: Numbers, is_token: NDArray[np.bool_]) -> None:
        """Record where the output of tokens [B, T] is: attention returns [B, kv_heads, T, queries of a group]."""
        shape = (len(tokens), self.num_heads, tokens.shape[1], self._per_group)
        end = self._num_outputs + tokens.size * self.num_heads * self._per_group
        places = np.arange(self._num_outputs, end).reshape(shape).swapaxes(1, 2)
        self.output_index[tokens[is_token]] = places[is_token]
        self._num_outputs = end


class PackedAttention:
    """Attention over the cache during a pass over packed rows. `turned` must hold their rotated heads [S, kv_heads,
    heads / kv_heads + 2, D] when `attend` is called."""

    def __init__(self, cache: PagedCache, reads: PackedReads, rotated: Tensor) -> None:
        self._cache, self._reads, self._turned = cache, reads, rotated
        self._groups, self._per_group, self._size = rotated.shape[1:]

    def attend(self, layer: int, query: Tensor, new: Tensor) -> Tensor:
        """Return [S, heads * D] from the queries [S, kv_heads, heads / kv_heads, D]; the new keys and values [S,
        kv_heads, 2, D] are cached."""
        self._cache.store(layer, self._reads.cache_index, new)
        outputs = [self._attend_part(layer, part) for part in self._reads.parts]
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined.index_select(0, self._reads.output_index).view(len(query), -1)

    def _attend_part(self, layer: int, part: RowBatch) -> Tensor:
        """Return the output of one part, [B * kv_heads * T * heads / kv_heads, D]."""
        size, num_queries = self._size, self._per_group - 2
        heads = self._turned.view(-1, size).index_select(0, part.head_index)
        grouped = heads.view(-1, self._per_group, part.num_tokens, size)
        query, key, value = grouped.split((num_queries, 1, 1), dim=1)
        if part.block_index is not None:
            held = self._cache.layer_view(layer).view(-1, BLOCK_TOKENS * size).index_select(0, part.block_index)
            key, value = held.view(2, self._groups, 1, -1, size)
        # A key-value head is expanded to the queries of its group as a view; the kernel does not copy it.
        key, value = (head.expand(-1, num_queries, -1, -1) for head in (key, value))
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=part.mask, is_causal=part.mask is None)
        return output.transpose(1, 2).reshape(-1, size)
