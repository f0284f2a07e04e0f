"""Decode attention of one new token per row over a paged cache, by the block tables of the rows, for a GPU.

The Triton kernels read blocks in place. Without Triton, and as the reference for tests of the kernels, blocks are
gathered and torch attends.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.profiles.packing import BLOCK_TOKENS
from meshwright.runtime.model.block_reads import DecodeRows
from meshwright.runtime.model.cache_blocks import BlockTables, Numbers
from meshwright.runtime.model.kv_cache import PagedCache
from meshwright.runtime.model.padded_attention import padded_reads


@dataclass(frozen=True)
class TableReads:
    """The block tables that a decode step of B rows reads."""

    lengths: Tensor
    """[B] int32: the numbers of cached tokens, which are the positions of the new ones."""
    tables: Tensor
    """[B, n] int32: the blocks of each row in the order of its tokens, n for the longest row; entries after the last
    block of a row are arbitrary."""

    def to(self, device: torch.device) -> TableReads:
        """Return a copy on a device."""
        return TableReads(self.lengths.to(device), self.tables.to(device))


StepReads = TableReads | DecodeRows
"""The indices by which a decode step reads the cache, in the form that its attention takes."""


def table_reads(tables: BlockTables, rows: Numbers, lengths: Numbers, count: int = 1) -> TableReads:
    """Return the block tables for `count` successive new tokens of each of `rows` [B], which have `lengths` [B] cached
    tokens and hold blocks for the new ones."""
    num_blocks = (int(lengths.max()) + count - 1) // BLOCK_TOKENS + 1
    row_tables = tables.table[rows, :num_blocks].astype(np.int32)
    return TableReads(torch.from_numpy(lengths.astype(np.int32)), torch.from_numpy(row_tables))


def step_reads(cache: PagedCache, rows: Numbers, lengths: Numbers) -> StepReads:
    """Return what one decode step reads: block tables on a GPU; on a CPU whichever form is faster for these rows, for
    which blocks may be moved."""
    if cache.keys.is_cuda:
        return table_reads(cache.tables, rows, lengths)
    reads = DecodeRows(rows, lengths)
    padded = padded_reads(cache, reads)
    if padded is not None:
        return padded
    cache.compact()
    return reads


class GatheredAttention:
    """Attention over the cache during a decode step with torch's own operations."""

    def __init__(self, cache: PagedCache, reads: TableReads) -> None:
        num_rows, num_blocks = reads.tables.shape
        _, _, kv_heads, _, size = cache.keys.shape
        device = reads.tables.device
        self._cache, self._tables = cache, reads.tables.long()
        self._gathered_shape = (num_rows, kv_heads, num_blocks * BLOCK_TOKENS, size)
        self._mask = torch.arange(num_blocks * BLOCK_TOKENS, device=device) <= reads.lengths[:, None, None, None]
        lengths = reads.lengths.long()
        last = self._tables[torch.arange(num_rows, device=device), lengths // BLOCK_TOKENS]
        heads = torch.arange(kv_heads, device=device)
        places = (last[:, None] * kv_heads + heads) * BLOCK_TOKENS + (lengths % BLOCK_TOKENS)[:, None]
        self._places = torch.stack([places, places + cache.keys[0].numel() // size], dim=-1)

    def attend(self, layer: int, query: Tensor, new: Tensor) -> Tensor:
        """Return [B, heads * D] from the new queries [B, kv_heads, heads / kv_heads, D]; the new keys and values [B,
        kv_heads, 2, D] are cached."""
        self._cache.store(layer, self._places, new)
        keys, values = (
            cached[layer][self._tables].transpose(1, 2).reshape(self._gathered_shape)
            for cached in (self._cache.keys, self._cache.values)
        )
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=self._mask).flatten(1)


class PagedAttention:
    """Attention over the cache during a decode step with Triton kernels, which apply the rotary embedding too."""

    def __init__(self, cache: PagedCache, reads: TableReads, angles: tuple[Tensor, Tensor], num_queries: int) -> None:
        """`angles` are cos and sin [positions, D / 2]; `num_queries` query heads share a key-value head."""
        _, _, kv_heads, _, size = cache.keys.shape
        from meshwright.runtime.kernels import paged  # noqa: PLC0415 - Triton is installed where kernels are chosen

        self._kernels = paged
        self._cache, self._angles, self._reads = cache, angles, (reads.lengths, reads.tables)
        self._query = cache.keys.new_empty(len(reads.lengths), kv_heads, num_queries, size)
        num_tokens = reads.tables.shape[1] * BLOCK_TOKENS
        self._scratch = paged.KeySplit(self._query, num_tokens, _num_processors(cache.keys.device))

    def attend(self, layer: int, heads: Tensor) -> Tensor:
        """Return [B, heads * D] from queries, key and value [B, kv_heads, heads / kv_heads + 2, D] as projected; the
        new keys and values are cached."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        self._kernels.rotate_and_store(heads, self._query, keys, values, self._angles, self._reads)
        return self._kernels.paged_attention(self._query, keys, values, self._reads, self._scratch)


@cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
