"""Attention of one new token per row over a paged cache whose rows are few and short: all of them side by side.

A row's blocks are copied to lie one behind the other, as many for each row as the longest has, and one product meets
them all. For little that is copied this is fewer operations than block by block; where it would leave the core's cache,
or where rows share a prefix, blocks are read where they lie: `BlockAttention`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.profiles.packing import BLOCK_TOKENS
from meshwright.runtime.model.block_reads import BlockReads
from meshwright.runtime.model.kv_cache import PagedCache

_CACHED_BYTES = 2**20
"""What a core's second-level cache holds: 1 MiB of an AMD EPYC 9004, beyond which the copies cost more than they save,
measured on it with 2 cores on 2026-11-25."""


def is_small(cache: PagedCache, reads: BlockReads) -> bool:
    """Whether a step of these reads on a CPU is faster side by side."""
    num_blocks = _CACHED_BYTES // (2 * cache.keys[0, 0].nbytes)
    if cache.keys.is_cuda or reads.prefixes or len(reads.order) > num_blocks:
        return False
    return len(reads.lengths) * _longest(reads) <= num_blocks


class PaddedAttention:
    """The cache during a decode step, as `BlockAttention`, of rows that share nothing."""

    def __init__(self, cache: PagedCache, reads: BlockReads) -> None:
        kv_heads, size = cache.keys.shape[2], cache.keys.shape[-1]
        self._cache, longest, ends = cache, _longest(reads), reads.ends[1:]
        held = torch.arange(longest) < reads.ends.diff()[:, None]
        blocks = torch.zeros(len(held), longest, dtype=torch.int64)
        blocks[held] = reads.window[reads.order[: int(ends[-1])]]
        self._gathered = (blocks[:, None] * kv_heads + torch.arange(kv_heads)[:, None]).flatten()
        self._places = cache.places(reads.blocks, reads.lengths % BLOCK_TOKENS)
        is_hidden = torch.arange(longest * BLOCK_TOKENS) > reads.lengths[:, None]
        self._hidden = torch.zeros(is_hidden.shape, dtype=cache.keys.dtype).masked_fill_(is_hidden, -torch.inf)[
            :, None, None
        ]
        self._copies = cache.keys.new_empty(2, len(self._gathered), BLOCK_TOKENS * size)
        self._shape = (len(held), kv_heads, -1, size)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[B, kv_heads, heads / kv_heads, D] from the new queries of that shape; new keys and values [B, kv_heads, D]
        are kept."""
        for copy, cache, new in zip(
            self._copies, (self._cache.keys[layer], self._cache.values[layer]), (key, value), strict=True
        ):
            cache.view(-1, cache.shape[-1]).index_copy_(0, self._places, new.reshape(-1, cache.shape[-1]))
            torch.index_select(cache.view(-1, copy.shape[-1]), 0, self._gathered, out=copy)
        keys, values = self._copies.view(2, *self._shape)
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=self._hidden)


def _longest(reads: BlockReads) -> int:
    """Blocks of the longest row."""
    return int(reads.ends.diff().max())
