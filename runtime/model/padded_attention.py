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
from meshwright.runtime.model.block_reads import RowReads
from meshwright.runtime.model.cache_blocks import Numbers
from meshwright.runtime.model.kv_cache import PagedCache

_CACHED_BYTES = 2**20
"""Of keys, and of values, what a core's second-level cache holds: 1 MiB of an AMD EPYC 9004. With more, the copies cost
more than they save, measured on it with 2 cores on 2026-11-25."""


@dataclass(frozen=True)
class PaddedReads(RowReads):
    """A decode step of B rows, whose blocks are to lie side by side."""

    num_blocks: int
    """That the longest needs with its new token."""


def padded_reads(cache: PagedCache, step: RowReads) -> PaddedReads | None:
    """None in a type that products on a CPU would round scores to, and of rows that are many, long or share blocks."""
    num_blocks = int(step.cached.max()) // BLOCK_TOKENS + 1
    if cache.keys.dtype != torch.float32:
        return None
    if len(step.rows) * num_blocks * cache.keys[0, 0].nbytes > _CACHED_BYTES:
        return None
    reads = PaddedReads(step.rows, step.cached, num_blocks)
    return None if cache.tables.are_shared and cache.tables.is_shared(_blocks(cache, reads)).any() else reads


class PaddedAttention:
    """The cache during decode steps, as `BlockAttention`, of rows that share nothing. What it answers lasts until it is
    asked again.

    While the same rows go on from step to step their copies stay and grow, of every layer if they all fit in the copy
    of one layer of the whole cache that memory is planned for.
    """

    def __init__(self, cache: PagedCache, num_query_heads: int) -> None:
        """A key-value head meets `num_query_heads` queries of each row."""
        self._cache, self._num_queries = cache, num_query_heads
        self._scale = cache.keys.shape[-1] ** -0.5
        self._room = cache.keys.new_empty(0)
        self._laid: _Laid | None = None

    def forget(self) -> None:
        """What was cached may be written anew."""
        self._laid = None

    def at(self, reads: PaddedReads) -> PaddedAttention:
        """The same, at the next step."""
        if self._laid is None or not self._laid.goes_on(reads):
            self._laid = self._lay(reads)
        return self

    def _lay(self, reads: PaddedReads) -> _Laid:
        num_layers, num_blocks, kv_heads, _, size = self._cache.keys.shape
        of_layer = len(reads.rows) * reads.num_blocks
        is_kept = num_layers * of_layer < num_blocks
        needed = (num_layers if is_kept else 1) * 2 * of_layer * kv_heads * BLOCK_TOKENS * size
        if needed > len(self._room):
            self._room = self._cache.keys.new_empty(needed)
        copies = self._room[:needed].view(-1, 2, len(reads.rows) * kv_heads, reads.num_blocks * BLOCK_TOKENS, size)
        return _Laid(self._cache, reads, copies, self._num_queries, is_kept=is_kept)

    def attend(self, layer: int, query: Tensor, new: Tensor) -> Tensor:
        """[B, heads * D] from the new queries [B, kv_heads, heads / kv_heads, D]; new keys and values
        [B, kv_heads, 2, D] are kept."""
        assert self._laid is not None, "no step has begun"
        laid, scores = self._laid, self._laid.scores
        self._cache.store(layer, laid.places, new)
        keys, values = laid.read(layer, new)
        torch.baddbmm(laid.hidden, laid.queries(query), keys, alpha=self._scale, out=scores)
        torch.softmax(scores, dim=-1, out=scores)
        torch.bmm(scores, values, out=laid.answers)
        return laid.by_row


class _Laid:
    """Rows side by side: where each of them is, and copies of what it has cached."""

    def __init__(
        self, cache: PagedCache, reads: PaddedReads, copies: Tensor, num_queries: int, *, is_kept: bool
    ) -> None:
        """`copies` [layers, 2, B * kv_heads, tokens, D] are of all layers and kept, or of one, made when asked."""
        _, num_blocks, num_heads, _, size = cache.keys.shape
        num_tokens, num_rows, heads = copies.shape[3], len(reads.rows), np.arange(num_heads)
        self._cache, self._reads, self._num_changes = cache, reads, cache.tables.num_changes
        self._is_kept, self._copies = is_kept, copies.view(len(copies), -1, BLOCK_TOKENS * size)
        self._tokens = copies.view(len(copies), -1, size)
        self._apart = [(keys.transpose(1, 2), values) for keys, values in copies]
        keys = (_blocks(cache, reads)[:, None] * num_heads + heads[:, None]).ravel()
        self._gathered = torch.from_numpy(np.concatenate([keys, keys + num_blocks * num_heads]))
        self._query: Tensor | None = None
        self._num_copied = 0
        """Layers whose copies are made."""
        rows = np.arange(num_rows * num_heads).reshape(num_rows, num_heads)
        self._columns = rows * num_tokens + reads.cached[:, None]
        """Of the new keys among the copied tokens; of scores those that they open."""
        self._places = np.empty((2, num_rows, num_heads, 2), dtype=np.int64)
        self._places[1] = self._columns[..., None] + [0, num_rows * num_heads * num_tokens]
        self._place()
        self.places, self._copied_to = torch.from_numpy(self._places)
        """Of the new keys and values: where they go among a layer's, and among copied tokens."""
        hidden = np.zeros((num_rows, num_heads, num_tokens), dtype=np.float32)
        hidden.swapaxes(0, 1)[:, np.arange(num_tokens) > reads.cached[:, None]] = -np.inf
        self._seen, self.hidden = hidden.ravel(), torch.from_numpy(hidden.reshape(num_rows * num_heads, 1, -1))
        """Minus infinity behind the end of a row, else 0."""
        self.scores = copies.new_empty(num_rows * num_heads, num_queries, num_tokens)
        self.answers = copies.new_empty(num_rows * num_heads, num_queries, size)
        self.by_row = self.answers.view(num_rows, -1)

    def goes_on(self, reads: PaddedReads) -> bool:
        """Takes over the next token of the same rows, or the same one again; False where they are others, have outgrown
        their copies, or have a block that is not among those that are copied in every step."""
        if self._num_changes != self._cache.tables.num_changes or reads.num_blocks != self._reads.num_blocks:
            return False
        count = reads.tokens_since(self._reads)
        if not count:
            return count == 0
        begins_block = reads.begins_block
        if begins_block and not self._is_kept:
            return False
        self._reads = reads
        self._columns += 1
        self._places += 1
        if begins_block:
            self._place()
        self._seen[self._columns.ravel()] = 0.0
        return True

    def _place(self) -> None:
        """Says where the new tokens go among a layer's."""
        reads, (_, num_blocks, num_heads, _, _) = self._reads, self._cache.keys.shape
        last = self._cache.tables.table[reads.rows, reads.cached // BLOCK_TOKENS]
        first = (last[:, None] * num_heads + np.arange(num_heads)) * BLOCK_TOKENS
        place = first + (reads.cached % BLOCK_TOKENS)[:, None]
        self._places[0] = place[..., None] + [0, num_blocks * num_heads * BLOCK_TOKENS]

    def queries(self, query: Tensor) -> Tensor:
        """[B * kv_heads, queries, D] of [B, kv_heads, queries, D], which is often the same room."""
        if query is not self._query:
            self._query, self._queries = query, query.flatten(0, 1)
        return self._queries

    def read(self, layer: int, new: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [B * kv_heads, D, tokens] and values [B * kv_heads, tokens, D] of a layer, in which the new ones
        [B, kv_heads, 2, D] are kept."""
        if not self._is_kept:
            self._copy(layer, 0)
            return self._apart[0]
        if layer < self._num_copied:
            self._tokens[layer].index_put_((self._copied_to,), new)
        else:
            self._copy(layer, layer)
            self._num_copied += 1
        return self._apart[layer]

    def _copy(self, layer: int, to: int) -> None:
        """Of what a layer has, the new tokens too."""
        blocks = self._cache.of_layer(layer).view(-1, self._copies.shape[-1])
        torch.index_select(blocks, 0, self._gathered, out=self._copies[to])


def _blocks(cache: PagedCache, reads: PaddedReads) -> Numbers:
    """[B, num_blocks]: of each row, and behind its last the spare one."""
    blocks = cache.tables.table[reads.rows, : reads.num_blocks]
    blocks[np.arange(reads.num_blocks) > (reads.cached // BLOCK_TOKENS)[:, None]] = 0
    return blocks
