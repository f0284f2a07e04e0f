"""Attention of one new token per row over a paged cache, for few and short rows, which are padded to one batch.

The blocks of each row are copied to be contiguous, padded to the length of the longest row, and one batched product
computes all scores. For small copies this takes fewer operations than attention block by block. If the copies do not
fit in the cache of a CPU core, or if rows share a prefix, blocks are read in place by `BlockAttention`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from meshwright.profiles.packing import BLOCK_TOKENS
from meshwright.runtime.model.block_attention import DecodeRows
from meshwright.runtime.model.block_tables import Numbers
from meshwright.runtime.model.kv_cache import PagedCache

_CACHED_BYTES = 2**20
"""Limit on the copied keys, and on the copied values: the 1 MiB of an AMD EPYC 9004 core's second-level cache. Larger
copies cost more than they save, measured there with 2 cores on 2026-11-25."""


@dataclass(frozen=True)
class PaddedReads(DecodeRows):
    """A decode step of B rows, whose blocks are padded to one batch."""

    num_blocks: int
    """Number of blocks of the longest row with its new token."""


def padded_reads(cache: PagedCache, step: DecodeRows) -> PaddedReads | None:
    """The padded reads of a step; None if the cache is not fp32, or if rows are too many, too long or share blocks.

    In other dtypes a batched product on a CPU would round the scores.
    """
    num_blocks = int(step.cached.max()) // BLOCK_TOKENS + 1
    if cache.keys.dtype != torch.float32:
        return None
    if len(step.rows) * num_blocks * cache.keys[0, 0].nbytes > _CACHED_BYTES:
        return None
    reads = PaddedReads(step.rows, step.cached, num_blocks)
    return None if cache.tables.has_shared_blocks and cache.tables.is_shared(_blocks(cache, reads)).any() else reads


class PaddedAttention:
    """Attention of decode steps like `BlockAttention`, for rows that share no blocks.

    An output is valid until the next call. While the same rows are decoded, their copies are kept and extended, if the
    copies of all layers take no more memory than one layer of the cache, for which memory is planned.
    """

    def __init__(self, cache: PagedCache, num_query_heads: int) -> None:
        """`num_query_heads` is the number of query heads per key-value head."""
        self._cache, self._num_queries = cache, num_query_heads
        self._scale = cache.keys.shape[-1] ** -0.5
        self._buffer = cache.keys.new_empty(0)
        self._batch: _PaddedBatch | None = None

    def reset(self) -> None:
        """Discards the copies, because cached tokens may be overwritten."""
        self._batch = None

    def prepare(self, reads: PaddedReads) -> PaddedAttention:
        """Returns this object, prepared for a step."""
        if self._batch is None or not self._batch.advance_to(reads):
            self._batch = self._new_batch(reads)
        return self

    def _new_batch(self, reads: PaddedReads) -> _PaddedBatch:
        num_layers, num_blocks, kv_heads, _, size = self._cache.keys.shape
        blocks_per_layer = len(reads.rows) * reads.num_blocks
        is_kept = num_layers * blocks_per_layer < num_blocks
        needed = (num_layers if is_kept else 1) * 2 * blocks_per_layer * kv_heads * BLOCK_TOKENS * size
        if needed > len(self._buffer):
            self._buffer = self._cache.keys.new_empty(needed)
        copies = self._buffer[:needed].view(-1, 2, len(reads.rows) * kv_heads, reads.num_blocks * BLOCK_TOKENS, size)
        return _PaddedBatch(self._cache, reads, copies, self._num_queries, is_kept=is_kept)

    def attend(self, layer: int, query: Tensor, new: Tensor) -> Tensor:
        """The output [B, heads * D] for new queries [B, kv_heads, heads / kv_heads, D]; writes the new keys and values
        [B, kv_heads, 2, D] to the cache."""
        assert self._batch is not None, "`prepare` was called for the step"
        batch, scores = self._batch, self._batch.scores
        self._cache.store(layer, batch.cache_indices, new)
        keys, values = batch.read(layer, new)
        torch.baddbmm(batch.mask, batch.queries(query), keys, alpha=self._scale, out=scores)
        torch.softmax(scores, dim=-1, out=scores)
        torch.bmm(scores, values, out=batch.outputs)
        return batch.by_row


class _PaddedBatch:
    """The padded batch of a decode step: copies of cached keys and values, and the indices to update them."""

    def __init__(
        self, cache: PagedCache, reads: PaddedReads, copies: Tensor, num_queries: int, *, is_kept: bool
    ) -> None:
        """`copies` [layers, 2, B * kv_heads, tokens, D] are of all layers if they are kept, else of one layer at a
        time."""
        _, num_blocks, num_heads, _, size = cache.keys.shape
        num_tokens, num_rows, heads = copies.shape[3], len(reads.rows), np.arange(num_heads)
        self._cache, self._reads, self._num_changes = cache, reads, cache.tables.num_changes
        self._is_kept, self._copies = is_kept, copies.view(len(copies), -1, BLOCK_TOKENS * size)
        self._tokens = copies.view(len(copies), -1, size)
        self._keys_and_values = [(keys.transpose(1, 2), values) for keys, values in copies]
        keys = (_blocks(cache, reads)[:, None] * num_heads + heads[:, None]).ravel()
        self._copy_from = torch.from_numpy(np.concatenate([keys, keys + num_blocks * num_heads]))
        self._query: Tensor | None = None
        self._num_copied = 0
        """Number of layers whose copies exist."""
        rows = np.arange(num_rows * num_heads).reshape(num_rows, num_heads)
        self._columns = rows * num_tokens + reads.cached[:, None]
        """Indices of the new tokens among the copied tokens, [B, kv_heads]; also in the flat mask."""
        self._indices = np.empty((2, num_rows, num_heads, 2), dtype=np.int64)
        self._indices[1] = self._columns[..., None] + [0, num_rows * num_heads * num_tokens]
        self._set_cache_indices()
        self.cache_indices, self._copy_to = torch.from_numpy(self._indices)
        """Indices of the new keys and values in a layer of the cache, and in its copy."""
        mask = np.zeros((num_rows, num_heads, num_tokens), dtype=np.float32)
        mask.swapaxes(0, 1)[:, np.arange(num_tokens) > reads.cached[:, None]] = -np.inf
        self._flat_mask, self.mask = mask.ravel(), torch.from_numpy(mask.reshape(num_rows * num_heads, 1, -1))
        """The mask added to scores: minus infinity after the end of a row, else 0."""
        self.scores = copies.new_empty(num_rows * num_heads, num_queries, num_tokens)
        self.outputs = copies.new_empty(num_rows * num_heads, num_queries, size)
        self.by_row = self.outputs.view(num_rows, -1)
        """View on the outputs, [B, heads * D]."""

    def advance_to(self, reads: PaddedReads) -> bool:
        """Advances to `reads` and returns True, if it is the same step or the next step of the same rows.

        Returns False for other rows, for rows that have outgrown their copies, and if copies are not kept and a row
        starts a new block.
        """
        if self._num_changes != self._cache.tables.num_changes or reads.num_blocks != self._reads.num_blocks:
            return False
        count = reads.tokens_since(self._reads)
        if not count:  # 0 for the same step, None for other rows
            return count == 0
        begins_block = reads.starts_block
        if begins_block and not self._is_kept:
            return False
        self._reads = reads
        self._columns += 1
        self._indices += 1
        if begins_block:
            self._set_cache_indices()
        self._flat_mask[self._columns.ravel()] = 0.0
        return True

    def _set_cache_indices(self) -> None:
        """Sets the indices of the new tokens in a layer of the cache."""
        reads, (_, num_blocks, num_heads, _, _) = self._reads, self._cache.keys.shape
        last = self._cache.tables.table[reads.rows, reads.cached // BLOCK_TOKENS]
        first = (last[:, None] * num_heads + np.arange(num_heads)) * BLOCK_TOKENS
        index = first + (reads.cached % BLOCK_TOKENS)[:, None]
        self._indices[0] = index[..., None] + [0, num_blocks * num_heads * BLOCK_TOKENS]

    def queries(self, query: Tensor) -> Tensor:
        """A view [B * kv_heads, queries, D] on [B, kv_heads, queries, D], cached because the tensor is often the
        same."""
        if query is not self._query:
            self._query, self._queries = query, query.flatten(0, 1)
        return self._queries

    def read(self, layer: int, new: Tensor) -> tuple[Tensor, Tensor]:
        """The copied keys [B * kv_heads, D, tokens] and values [B * kv_heads, tokens, D] of a layer, including the new
        ones [B, kv_heads, 2, D]."""
        if not self._is_kept:
            self._copy(layer, 0)
            return self._keys_and_values[0]
        if layer < self._num_copied:
            self._tokens[layer].index_put_((self._copy_to,), new)
        else:
            self._copy(layer, layer)
            self._num_copied += 1
        return self._keys_and_values[layer]

    def _copy(self, layer: int, to: int) -> None:
        """Copies the rows' blocks of a layer, the new tokens included."""
        blocks = self._cache.layer_view(layer).view(-1, self._copies.shape[-1])
        torch.index_select(blocks, 0, self._copy_from, out=self._copies[to])


def _blocks(cache: PagedCache, reads: PaddedReads) -> Numbers:
    """The blocks of each row [B, num_blocks], padded with the dummy block 0."""
    blocks = cache.tables.table[reads.rows, : reads.num_blocks]
    blocks[np.arange(reads.num_blocks) > (reads.cached // BLOCK_TOKENS)[:, None]] = 0
    return blocks
