"""Attention of packed prompts with the kernels of a GPU: one call for all rows of a pass.

Keys and values are written to the blocks of a paged cache as the rotary embedding is applied; attention reads them from
the pass itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from meshwright.profiles.packing import BLOCK_TOKENS
from meshwright.runtime.model.cache_blocks import BlockTables
from meshwright.runtime.model.kv_cache import PagedCache
from meshwright.runtime.model.varlen_attention import RowBounds, VarlenKernel, attend_rows


@dataclass(frozen=True)
class PrefillReads:
    """The indices by which a pass over S tokens of packed prompts writes and reads, on the host or the device."""

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
    returned for the last token of the rows with the indices `asked`."""
    begins = np.cumsum([0, *lengths])
    positions = np.arange(begins[-1]) - np.repeat(begins[:-1], lengths)
    blocks = tables.table[np.repeat(rows, lengths), positions // BLOCK_TOKENS]
    arrays = positions, blocks, begins, begins[1:][list(output_rows)] - 1
    token_positions, token_blocks, bounds, ends = (torch.from_numpy(array.astype(np.int32)) for array in arrays)
    return PrefillReads(token_positions, token_blocks, bounds, ends, max(lengths))


class PrefillAttention:
    """Attention during a pass over packed prompts."""

    def __init__(
        self,
        cache: PagedCache,
        reads: PrefillReads,
        angles: tuple[Tensor, Tensor],
        num_queries: int,
        kernel: VarlenKernel,
    ) -> None:
        """`angles` are cos and sin [positions, D / 2]; `num_queries` query heads share a key-value head."""
        from meshwright.runtime.kernels import paged  # noqa: PLC0415 - Triton is installed where kernels are chosen

        num_tokens, (_, _, kv_heads, _, size) = len(reads.positions), cache.keys.shape
        self._turn_and_keep, self._kernel = paged.rotate_and_store_packed, kernel
        self._cache, self._angles, self._places = cache, angles, (reads.positions, reads.blocks)
        self._query = cache.keys.new_empty(num_tokens, kv_heads, num_queries, size)
        self._key, self._value = cache.keys.new_empty(2, num_tokens, kv_heads, size).unbind()
        self._bounds = RowBounds(reads.row_starts, reads.longest)

    def attend(self, layer: int, heads: Tensor) -> Tensor:
        """Return [S, heads * D] from queries, key and value [S, kv_heads, heads / kv_heads + 2, D] as projected; the
        new keys and values are cached."""
        cached = self._cache.keys[layer], self._cache.values[layer]
        self._turn_and_keep(heads, (self._query, self._key, self._value), cached, self._angles, self._places)
        query, key, value = (one.unsqueeze(1) for one in (self._query.flatten(1, 2), self._key, self._value))
        return attend_rows(query, key, value, self._bounds, self._kernel).flatten(1)
