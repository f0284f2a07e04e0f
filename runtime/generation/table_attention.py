"""Attention of one new token per row over a paged cache by the tables of its rows' blocks, as a GPU takes it.

The kernels read blocks where they lie. Without Triton, and as what tests hold the kernels to, blocks are gathered and
torch attends.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.profiles.packing import BLOCK_TOKENS
from meshwright.runtime.model.block_reads import RowReads
from meshwright.runtime.model.cache_blocks import BlockTables, Numbers
from meshwright.runtime.model.kv_cache import PagedCache
from meshwright.runtime.model.padded_attention import padded_reads


@dataclass(frozen=True)
class TableReads:
    """What a decode step of B rows reads, by the tables of their blocks."""

    lengths: Tensor
    """[B] int32: tokens that are cached, so the positions of the new ones."""
    tables: Tensor
    """[B, n] int32: the blocks of a row in the order of its tokens, as many as the longest has; behind those of a row,
    anything."""

    def to(self, device: torch.device) -> TableReads:
        """The same on a device."""
        return TableReads(self.lengths.to(device), self.tables.to(device))


StepReads = TableReads | RowReads
"""What a decode step reads, in the way in which its attention wants it."""


def table_reads(tables: BlockTables, rows: Numbers, lengths: Numbers, count: int = 1) -> TableReads:
    """For one more token of each of `rows` [B], or `count` one after the other, for which they hold blocks behind the
    `lengths` [B] that are cached."""
    num_blocks = (int(lengths.max()) + count - 1) // BLOCK_TOKENS + 1
    of_rows = tables.table[rows, :num_blocks].astype(np.int32)
    return TableReads(torch.from_numpy(lengths.astype(np.int32)), torch.from_numpy(of_rows))


def step_reads(cache: PagedCache, rows: Numbers, lengths: Numbers) -> StepReads:
    """As `table_reads` on a GPU; on a CPU in the way in which the step is faster, for which blocks may be moved."""
    if cache.keys.is_cuda:
        return table_reads(cache.tables, rows, lengths)
    reads = RowReads(rows, lengths)
    side_by_side = padded_reads(cache, reads)
    if side_by_side is not None:
        return side_by_side
    cache.compact()
    return reads


class GatheredAttention:
    """The cache during a decode step, by torch's own operations."""

    def __init__(self, cache: PagedCache, reads: TableReads) -> None:
        num_rows, num_blocks = reads.tables.shape
        _, _, kv_heads, _, size = cache.keys.shape
        device = reads.tables.device
        self._cache, self._tables = cache, reads.tables.long()
        self._held = (num_rows, kv_heads, num_blocks * BLOCK_TOKENS, size)
        self._seen = torch.arange(num_blocks * BLOCK_TOKENS, device=device) <= reads.lengths[:, None, None, None]
        lengths = reads.lengths.long()
        last = self._tables[torch.arange(num_rows, device=device), lengths // BLOCK_TOKENS]
        heads = torch.arange(kv_heads, device=device)
        places = (last[:, None] * kv_heads + heads) * BLOCK_TOKENS + (lengths % BLOCK_TOKENS)[:, None]
        self._places = torch.stack([places, places + cache.keys[0].numel() // size], dim=-1)

    def attend(self, layer: int, query: Tensor, new: Tensor) -> Tensor:
        """[B, heads * D] from the new queries [B, kv_heads, heads / kv_heads, D]; new keys and values
        [B, kv_heads, 2, D] are kept."""
        self._cache.store(layer, self._places, new)
        keys, values = (
            held[layer][self._tables].transpose(1, 2).reshape(self._held)
            for held in (self._cache.keys, self._cache.values)
        )
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=self._seen).flatten(1)


class PagedAttention:
    """The cache during a decode step, by kernels, which turn heads by their angles too."""

    def __init__(self, cache: PagedCache, reads: TableReads, angles: tuple[Tensor, Tensor], num_queries: int) -> None:
        """`angles` are cos and sin [positions, D / 2]; a key-value head meets `num_queries` queries of each row."""
        _, _, kv_heads, _, size = cache.keys.shape
        from meshwright.runtime.kernels import paged  # noqa: PLC0415 - there is Triton where they were chosen

        self._kernels = paged
        self._cache, self._angles, self._reads = cache, angles, (reads.lengths, reads.tables)
        self._query = cache.keys.new_empty(len(reads.lengths), kv_heads, num_queries, size)
        num_tokens = reads.tables.shape[1] * BLOCK_TOKENS
        self._room = paged.PartsOfRows(self._query, num_tokens, _num_processors(cache.keys.device))

    def attend(self, layer: int, heads: Tensor) -> Tensor:
        """[B, heads * D] from queries, key and value [B, kv_heads, heads / kv_heads + 2, D] as projected; what is new
        is kept."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        self._kernels.turn_and_store(heads, self._query, keys, values, self._angles, self._reads)
        return self._kernels.attend(self._query, keys, values, self._reads, self._room)


@cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
