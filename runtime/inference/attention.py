"""Attention over the paged cache in decode steps and prefills: by block tables and Triton kernels on a GPU, and over
packed rows on a CPU.

The cache indices that a pass reads and writes are computed once and shared by all layers. Without Triton, and as the
reference for tests of the kernels, blocks are gathered for torch's own attention. `runtime.inference.decode_step`
chooses among them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from meshwright.profiles.packing import BLOCK_TOKENS, num_blocks_for
from meshwright.runtime.model.attention import RowBounds, VarlenKernel, attend_rows
from meshwright.runtime.model.block_attention import DecodeRows
from meshwright.runtime.model.block_tables import BlockTables, Numbers
from meshwright.runtime.model.kv_cache import PagedCache
from meshwright.runtime.model.limited_attention import AttentionLimits, attend_limited, attend_masked
from meshwright.runtime.model.padded_attention import padded_reads
from meshwright.runtime.model.recurrent_states import StateRows


@dataclass(frozen=True)
class TableReads:
    """The block tables that a decode step of B rows reads."""

    lengths: Tensor
    """[B] int32: the numbers of cached tokens, which are the positions of the new ones."""
    tables: Tensor
    """[B, n] int32: the blocks of each row in the order of its tokens, n for the longest row; entries after the last
    block of a row are arbitrary."""
    states: Tensor
    """[B] int32: the indices of the rows' states, in models that have layers with a state."""

    def to(self, device: torch.device) -> TableReads:
        """Return a copy on a device."""
        return TableReads(self.lengths.to(device), self.tables.to(device), self.states.to(device))


StepReads = TableReads | DecodeRows
"""The indices by which a decode step reads the cache, in the form that its attention takes."""


def table_reads(tables: BlockTables, rows: Numbers, lengths: Numbers, count: int = 1) -> TableReads:
    """Return the block tables for `count` successive new tokens of each of `rows` [B], which have `lengths` [B] cached
    tokens and hold blocks for the new ones."""
    num_blocks = (int(lengths.max()) + count - 1) // BLOCK_TOKENS + 1
    row_tables = tables.table[rows, :num_blocks].astype(np.int32)
    states = (rows + 1).astype(np.int32)
    return TableReads(*(torch.from_numpy(numbers) for numbers in (lengths.astype(np.int32), row_tables, states)))


def step_reads(cache: PagedCache, rows: Numbers, lengths: Numbers, *, by_tables: bool = False) -> StepReads:
    """Return the indices for one decode step: block tables on a GPU, or if `by_tables`; on a CPU the form that is
    faster for these rows.

    On a CPU, blocks of the cache may be moved."""
    if cache.keys.is_cuda or by_tables:
        return table_reads(cache.tables, rows, lengths)
    reads = DecodeRows(rows, lengths)
    if not cache.has_layers:
        return reads
    padded = padded_reads(cache, reads)
    if padded is not None:
        return padded
    cache.compact()
    return reads


LayerLimits: TypeAlias = Sequence[AttentionLimits]
"""The limits of attention in each layer."""


class GatheredAttention:
    """Attention over the cache during a decode step with torch's own operations.

    Of a layer with a sliding window only the blocks are gathered that the window touches. No more blocks are gathered
    at a time than a layer of the cache has, for which memory is planned, or than one row has.
    """

    def __init__(self, cache: PagedCache, reads: TableReads, limits: LayerLimits) -> None:
        num_rows, num_blocks = reads.tables.shape
        _, total_blocks, kv_heads, _, size = cache.keys.shape
        device = reads.tables.device
        self._cache, self._limits = cache, limits
        lengths, tables = reads.lengths.long(), reads.tables.long()
        rows = max(1, total_blocks // num_blocks)
        parts = [slice(first, first + rows) for first in range(0, num_rows, rows)]
        self._parts = {
            (window, chunked): [(part, _WindowBlocks(tables[part], lengths[part], window, chunked)) for part in parts]
            for window, chunked in {(layer.window, layer.chunked) for layer in limits}
        }
        last = tables[torch.arange(num_rows, device=device), lengths // BLOCK_TOKENS]
        heads = torch.arange(kv_heads, device=device)
        key_index = (last[:, None] * kv_heads + heads) * BLOCK_TOKENS + (lengths % BLOCK_TOKENS)[:, None]
        self._write_index = torch.stack([key_index, key_index + cache.keys[0].numel() // size], dim=-1)

    def attend(self, layer: int, query: Tensor, new: Tensor) -> Tensor:
        """Return [B, heads * D] from the new queries [B, kv_heads, heads / kv_heads, D]; the new keys and values [B,
        kv_heads, 2, D] are cached."""
        self._cache.store(layer, self._write_index, new)
        limits, outputs = self._limits[layer], list[Tensor]()
        for part, blocks in self._parts[limits.window, limits.chunked]:
            keys, values = (blocks.gather(cached[layer]) for cached in (self._cache.keys, self._cache.values))
            sinks = None if limits.sinks is None else limits.sinks.view(1, *query.shape[1:3], 1)
            outputs.append(attend_masked(query[part], keys, values, blocks.mask, limits.cap, sinks))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).flatten(1)


class _WindowBlocks:
    """The blocks that the windows of rows touch, or all of their blocks."""

    def __init__(self, tables: Tensor, lengths: Tensor, window: int, chunked: bool) -> None:
        """`tables` [B, n] are the blocks of rows with `lengths` [B] cached tokens; the window ends with a new token. If
        it is `chunked`, it begins with the new token's chunk."""
        num_blocks = tables.shape[1]
        count = min(num_blocks, (window + BLOCK_TOKENS - 2) // BLOCK_TOKENS + 1) if window else num_blocks
        oldest = (lengths + 1 - window).clamp_min(0) if window else torch.zeros_like(lengths)
        if chunked:
            oldest = lengths // window * window
        index = (oldest // BLOCK_TOKENS)[:, None] + torch.arange(count, device=tables.device)
        self._tables = tables.gather(1, index.clamp_max(num_blocks - 1))
        positions = (index[:, :, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=tables.device)).flatten(1)
        is_seen = (positions <= lengths[:, None]) & (positions >= oldest[:, None])
        self.mask = is_seen[:, None, None]
        """True for the tokens that are attended to, [B, 1, 1, tokens]."""

    def gather(self, cache: Tensor) -> Tensor:
        """Return the tokens [B, kv_heads, tokens, D] from a layer's [blocks, kv_heads, tokens of a block, D]."""
        return cache[self._tables].transpose(1, 2).flatten(2, 3)


LayerAngles: TypeAlias = Sequence[tuple[Tensor, Tensor]]
"""Cosines and sines of the rotary angles in each layer."""


class PagedAttention:
    """Attention over the cache during a decode step with Triton kernels, which apply the rotary embedding too."""

    def __init__(
        self, cache: PagedCache, reads: TableReads, angles: LayerAngles, limits: LayerLimits, num_queries: int
    ) -> None:
        """`angles` are cos and sin [positions, D / 2] of each layer; `num_queries` query heads share a key head."""
        _, _, kv_heads, _, size = cache.keys.shape
        from meshwright.runtime.kernels import paged_attention  # noqa: PLC0415 - needs Triton

        self._kernels, self._limits = paged_attention, limits
        self._cache, self._angles, self._reads = cache, angles, (reads.lengths, reads.tables)
        self._query = cache.keys.new_empty(len(reads.lengths), kv_heads, num_queries, size)
        num_tokens = reads.tables.shape[1] * BLOCK_TOKENS
        self._scratch = paged_attention.KeySplit(self._query, num_tokens, _num_processors(cache.keys.device))

    def attend(self, layer: int, heads: Tensor) -> Tensor:
        """Return [B, heads * D] from queries, key and value [B, kv_heads, heads / kv_heads + 2, D] as projected; the
        new keys and values are cached."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        self._kernels.rotate_and_store(heads, self._query, keys, values, self._angles[layer], self._reads)
        window, cap = self._limits[layer].window, self._limits[layer].cap
        return self._kernels.paged_attention(
            self._query, keys, values, self._reads, self._scratch, window=window, cap=cap
        )


@cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@dataclass(frozen=True)
class PrefillReads:
    """The indices by which a pass over S tokens of packed prompts writes and reads the cache, on host or device."""

    positions: Tensor
    """[S] int32: the positions of the tokens in their rows."""
    blocks: Tensor
    """[S] int32: the blocks that cache their keys and values."""
    row_starts: Tensor
    """[N + 1] int32: the first token of each row, and the end."""
    output_tokens: Tensor
    """[A] int32: the tokens whose logits are returned."""
    longest: int
    """Tokens of the longest row, or an upper bound."""

    def to(self, device: torch.device) -> PrefillReads:
        """Return a copy on a device."""
        return PrefillReads(
            self.positions.to(device),
            self.blocks.to(device),
            self.row_starts.to(device),
            self.output_tokens.to(device),
            self.longest,
        )


def prefill_reads(
    tables: BlockTables, rows: Sequence[int], lengths: Sequence[int], output_rows: Sequence[int]
) -> PrefillReads:
    """Compute the indices for the first `lengths[b]` tokens of each of `rows`, which hold blocks for them. Logits are
    returned for the last token of the rows with the indices `output_rows`."""
    starts = np.cumsum([0, *lengths])
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    blocks = tables.table[np.repeat(rows, lengths), positions // BLOCK_TOKENS]
    arrays = positions, blocks, starts, starts[1:][list(output_rows)] - 1
    token_positions, token_blocks, bounds, ends = (torch.from_numpy(array.astype(np.int32)) for array in arrays)
    return PrefillReads(token_positions, token_blocks, bounds, ends, max(lengths))


class PrefillAttention:
    """Attention during a pass over packed prompts."""

    def __init__(
        self,
        cache: PagedCache,
        reads: PrefillReads,
        *,
        angles: LayerAngles,
        limits: LayerLimits,
        num_queries: int,
        kernel: VarlenKernel,
    ) -> None:
        """`angles` are cos and sin [positions, D / 2] of each layer, whose scores are not capped; `num_queries` query
        heads share a key head."""
        from meshwright.runtime.kernels import paged_attention  # noqa: PLC0415 - needs Triton

        num_tokens, (_, _, kv_heads, _, size) = len(reads.positions), cache.keys.shape
        self._rotate_and_store, self._kernel = paged_attention.rotate_and_store_packed, kernel
        self._cache, self._angles, self._write_index = cache, angles, (reads.positions, reads.blocks)
        self._query = cache.keys.new_empty(num_tokens, kv_heads, num_queries, size)
        self._key, self._value = cache.keys.new_empty(2, num_tokens, kv_heads, size).unbind()
        self._bounds, self._limits = RowBounds(reads.row_starts, reads.longest), limits

    def attend(self, layer: int, heads: Tensor) -> Tensor:
        """Return [S, heads * D] from queries, key and value [S, kv_heads, heads / kv_heads + 2, D] as projected; the
        new keys and values are cached."""
        cached = self._cache.keys[layer], self._cache.values[layer]
        new, angles = (self._query, self._key, self._value), self._angles[layer]
        self._rotate_and_store(heads, new, cached, angles, self._write_index)
        query, key, value = (one.unsqueeze(1) for one in (self._query.flatten(1, 2), self._key, self._value))
        return attend_rows(query, key, value, self._bounds, self._kernel, window=self._limits[layer].window).flatten(1)


@dataclass(frozen=True)
class RowBatch:
    """Rows that are attended in one call: B rows of T tokens, padded where they have fewer."""

    head_index: Tensor
    """[B * kv_heads * (heads / kv_heads + 2) * T]: indices into the heads of all tokens, of the queries of each group,
    its key and its value."""
    num_tokens: int
    """T, the tokens of a row."""
    num_cached: int = 0
    """Cached tokens of a row."""
    block_index: Tensor | None = None
    """Only for a row with cached tokens, which is attended alone: [2 * kv_heads * n], the blocks of each head, first of
    all keys, then of all values."""
    mask: Tensor | None = None
    """Only for a row with cached tokens: the mask [T, n * tokens of a block], minus infinity for keys after a token,
    else 0."""


@dataclass(frozen=True)
class PackedReads:
    """The indices by which a pass over S tokens of packed rows writes and reads the cache."""

    positions: Tensor
    """[S]: the positions of the tokens in their sequences."""
    cache_index: Tensor
    """[S, kv_heads, 2]: the indices at which keys and values are stored in a layer's cache."""
    parts: tuple[RowBatch, ...]
    output_index: Tensor
    """[S * heads]: the index of each token's heads in the concatenated outputs of all parts."""
    states: StateRows | None
    """The rows for layers with a state, if there are any."""


def packed_reads(
    cache: PagedCache, rows: Sequence[int], cached: Sequence[int], lengths: Sequence[int], queries_per_group: int
) -> PackedReads:
    """Compute the indices for packed rows: row `rows[b]` has `cached[b]` tokens in the cache and `lengths[b]` new ones,
    and holds blocks for all of them. `queries_per_group` query heads share a key-value head."""
    packing = _Packing(cache, lengths, queries_per_group)
    positions = np.arange(sum(lengths)) + np.repeat(np.array(cached) - packing.starts, lengths)
    blocks = cache.tables.table[np.repeat(rows, lengths), positions // BLOCK_TOKENS]
    heads = np.arange(packing.num_heads)
    key_index = (blocks[:, None] * packing.num_heads + heads) * BLOCK_TOKENS + (positions % BLOCK_TOKENS)[:, None]
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
        cache_index=torch.from_numpy(np.stack([key_index, key_index + packing.first_value * BLOCK_TOKENS], axis=-1)),
        parts=tuple(parts),
        output_index=torch.from_numpy(packing.output_index.ravel()),
        states=cache.states.rows(lengths, rows, cached) if cache.states else None,
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
        """Lay out the rows with these indices to be attended in one call."""
        starts, lengths = self.starts[indices], self._lengths[indices]
        longest, heads_per_token = int(lengths.max()), self.num_heads * (self._per_group + 2)
        offsets = np.arange(longest)
        tokens = starts[:, None] + np.minimum(offsets, lengths[:, None] - 1)
        heads = tokens[:, None] * heads_per_token + np.arange(heads_per_token)[:, None]
        self._place_outputs(tokens, offsets < lengths[:, None])
        return RowBatch(torch.from_numpy(heads.ravel()), longest)

    def continued_row(self, index: int, table: Numbers, cached: int) -> RowBatch:
        """Lay out one row that has cached tokens, in the blocks of the table."""
        part = self.batch_rows([index])
        num_keys = cached + part.num_tokens
        keys = table[: num_blocks_for(num_keys)] * self.num_heads + np.arange(self.num_heads)[:, None]
        blocks = np.concatenate([keys.ravel(), keys.ravel() + self.first_value])
        mask = torch.full((part.num_tokens, keys.shape[1] * BLOCK_TOKENS), -torch.inf, dtype=self._dtype)
        return RowBatch(part.head_index, part.num_tokens, cached, torch.from_numpy(blocks), mask.triu_(cached + 1))

    def _place_outputs(self, tokens: Numbers, is_token: NDArray[np.bool_]) -> None:
        """Record the output indices of tokens [B, T]; attention returns [B, kv_heads, T, queries of a group]."""
        shape = (len(tokens), self.num_heads, tokens.shape[1], self._per_group)
        end = self._num_outputs + tokens.size * self.num_heads * self._per_group
        outputs = np.arange(self._num_outputs, end).reshape(shape).swapaxes(1, 2)
        self.output_index[tokens[is_token]] = outputs[is_token]
        self._num_outputs = end


class PackedAttention:
    """Attention over the cache during a pass over packed rows. `rotated` must hold their rotated heads [S, kv_heads,
    heads / kv_heads + 2, D] when `attend` is called."""

    def __init__(self, cache: PagedCache, reads: PackedReads, rotated: Tensor, limits: LayerLimits) -> None:
        self._cache, self._reads, self._rotated, self._limits = cache, reads, rotated, limits
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
        heads = self._rotated.view(-1, size).index_select(0, part.head_index)
        grouped = heads.view(-1, self._per_group, part.num_tokens, size)
        query, key, value = grouped.split((num_queries, 1, 1), dim=1)
        if part.block_index is not None:
            cached_heads = self._cache.layer_view(layer).view(-1, BLOCK_TOKENS * size).index_select(0, part.block_index)
            key, value = cached_heads.view(2, self._groups, 1, -1, size)
        limits, num_keys = self._limits[layer], part.num_cached + part.num_tokens
        if limits.apply_to(num_keys):
            if limits.sinks is not None:  # a key head of a row is a row here
                sinks = limits.sinks.view(self._groups, -1).repeat(len(query) // self._groups, 1)
                limits = replace(limits, sinks=sinks)
            output = attend_limited(query, key[:, :, :num_keys], value[:, :, :num_keys], limits)
            return output.transpose(1, 2).reshape(-1, size)
        # A key-value head is expanded to the queries of its group as a view; the kernel does not copy it.
        key, value = (head.expand(-1, num_queries, -1, -1) for head in (key, value))
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=part.mask, is_causal=part.mask is None)
        return output.transpose(1, 2).reshape(-1, size)
