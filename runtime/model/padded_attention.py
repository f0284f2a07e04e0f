"""Attention of one new token per row over a paged cache whose rows are few and short: all of them side by side.

A row's blocks are copied to lie one behind the other, as many for each row as the longest has, and one product meets
them all. For little that is copied this is fewer operations than block by block; where it would leave the core's cache,
or where rows share a prefix, blocks are read where they lie: `BlockAttention`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from meshwright.profiles.packing import BLOCK_TOKENS
from meshwright.runtime.model.cache_blocks import Numbers
from meshwright.runtime.model.kv_cache import PagedCache

_CACHED_BYTES = 2**20
"""Of keys, and of values, what a core's second-level cache holds: 1 MiB of an AMD EPYC 9004. With more, the copies cost
more than they save, measured on it with 2 cores on 2026-11-25."""


@dataclass(frozen=True)
class PaddedReads:
    """What a decode step of B rows reads that lie side by side."""

    lengths: Tensor
    """[B]: tokens that are cached, so the positions of the new ones."""
    places: Tensor
    """[B, kv_heads, 2]: where the new keys and values go among a layer's."""
    gathered: Tensor
    """[2 * B * kv_heads * n]: the blocks of each head, first of all keys, then of all values."""
    hidden: Tensor
    """[B * kv_heads, 1, n * tokens of a block]: minus infinity behind the end of a row, else 0."""


def padded_reads(cache: PagedCache, rows: Numbers, lengths: Numbers) -> PaddedReads | None:
    """For one more token of each of `rows` [B], which hold a block for it behind the `lengths` [B] that are cached.

    None in a type that products on a CPU would round scores to, and of rows that are many, long or share blocks.
    """
    counts = lengths // BLOCK_TOKENS + 1
    longest, num_rows = int(counts.max()), len(rows)
    if cache.keys.dtype != torch.float32:
        return None
    if num_rows * longest * cache.keys[0, 0].nbytes > _CACHED_BYTES:
        return None
    blocks = cache.tables.table[rows, :longest]
    blocks[np.arange(longest) >= counts[:, None]] = 0
    if cache.tables.is_shared(blocks).any():
        return None
    _, num_blocks, num_heads, _, _ = cache.keys.shape
    heads, values = np.arange(num_heads), num_blocks * num_heads
    keys = blocks[:, None] * num_heads + heads[:, None]
    last = blocks[np.arange(num_rows), counts - 1]
    place = (last[:, None] * num_heads + heads) * BLOCK_TOKENS + (lengths % BLOCK_TOKENS)[:, None]
    hidden = np.zeros((num_rows, num_heads, longest * BLOCK_TOKENS), dtype=np.float32)
    hidden.swapaxes(0, 1)[:, np.arange(longest * BLOCK_TOKENS) > lengths[:, None]] = -np.inf
    return PaddedReads(
        lengths=torch.from_numpy(lengths),
        places=torch.from_numpy(np.stack([place, place + values * BLOCK_TOKENS], axis=-1)),
        gathered=torch.from_numpy(np.concatenate([keys.ravel(), keys.ravel() + values])),
        hidden=torch.from_numpy(hidden.reshape(num_rows * num_heads, 1, -1)),
    )


class PaddedAttention:
    """The cache during a decode step, as `BlockAttention`, of rows that share nothing. What it answers lasts until it
    is asked again."""

    def __init__(self, cache: PagedCache, reads: PaddedReads, num_query_heads: int) -> None:
        """A key-value head meets `num_query_heads` queries of each row."""
        size, num_rows = cache.keys.shape[-1], len(reads.lengths)
        self._cache, self._reads, self._scale = cache, reads, size**-0.5
        self._copies = cache.keys.new_empty(len(reads.gathered), BLOCK_TOKENS * size)
        num_heads, _, num_tokens = reads.hidden.shape
        keys, self._values = self._copies.view(2, num_heads, num_tokens, size)
        self._keys = keys.transpose(1, 2)
        self._scores = keys.new_empty(num_heads, num_query_heads, num_tokens)
        self._answers = keys.new_empty(num_heads, num_query_heads, size)
        self._by_row = self._answers.view(num_rows, -1)

    def attend(self, layer: int, query: Tensor, new: Tensor) -> Tensor:
        """[B, heads * D] from the new queries [B, kv_heads, heads / kv_heads, D]; new keys and values
        [B, kv_heads, 2, D] are kept."""
        reads, scores = self._reads, self._scores
        self._cache.store(layer, reads.places, new)
        blocks = self._cache.of_layer(layer).view(-1, self._copies.shape[-1])
        torch.index_select(blocks, 0, reads.gathered, out=self._copies)
        torch.baddbmm(reads.hidden, query.flatten(0, 1), self._keys, alpha=self._scale, out=scores)
        torch.softmax(scores, dim=-1, out=scores)
        torch.bmm(scores, self._values, out=self._answers)
        return self._by_row
