"""Keys and values of sequences of different lengths, in blocks of tokens that rows hold as they grow.

A cache has so many blocks and no more: it is as large as was planned, whatever the lengths, and who fills it decides
which rows wait (Kwon et al., arXiv:2309.06180, section 4: blocks, tables of them, and prefixes that rows share).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from meshwright.profiles.packing import BLOCK_TOKENS, blocks_of
from meshwright.runtime.model.cache_blocks import BlockTables
from meshwright.runtime.model.equal_rows import EqualRows, equal_rows


class PagedCache:
    """Rotated keys and values of one pipeline stage: [layers, blocks, kv_heads, tokens of a block, head_dim].

    Block 0 is spare: rows that only round up a decode step write there.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        num_rows: int,
        num_kv_heads: int,
        max_tokens: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """For `num_rows` rows at a time, of at most `max_tokens` tokens each."""
        shape = (num_layers, 2, num_blocks + 1, num_kv_heads, BLOCK_TOKENS, head_dim)
        held = torch.zeros(shape, dtype=dtype, device=device)
        self.keys, self.values = held.unbind(1)
        self._layers = [of_layer.view(-1, head_dim) for of_layer in held]
        self.tables, self.max_tokens = BlockTables(num_blocks, num_rows, max_tokens), max_tokens

    def share(self, source: int, target: int, num_tokens: int) -> None:
        """Copies what one row has of its first `num_tokens` in a block that is not whole; `target` holds a block there.

        Whole blocks are read by both rows: `BlockTables.share`.
        """
        whole, rest = divmod(num_tokens, BLOCK_TOKENS)
        if rest:
            blocks = self.tables.table
            for cache in (self.keys, self.values):
                cache[:, blocks[target, whole]] = cache[:, blocks[source, whole]]

    def compact(self) -> None:
        """Moves blocks to where they are read in place, if many are not: what was found of tables before is void."""
        moved, to = (torch.from_numpy(blocks) for blocks in self.tables.compact())
        if len(moved):
            for held in (*self.keys, *self.values):
                held.index_copy_(0, to, held.index_select(0, moved))

    def read(self, row: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """A copy on the host of the first `num_tokens` of a row, [layers, kv_heads, num_tokens, head_dim] each."""
        blocks = self._blocks(row, num_tokens)
        keys, values = (
            cache[:, blocks].transpose(1, 2).flatten(2, 3)[:, :, :num_tokens].detach().cpu().clone()
            for cache in (self.keys, self.values)
        )
        return keys, values

    def write(self, row: int, keys: Tensor, values: Tensor) -> None:
        """Puts what was read, [layers, kv_heads, num_tokens, head_dim] each, into the blocks that the row holds."""
        num_tokens = keys.shape[2]
        for index, block in enumerate(self._blocks(row, num_tokens).tolist()):
            first, end = index * BLOCK_TOKENS, min(num_tokens, (index + 1) * BLOCK_TOKENS)
            for cache, read in ((self.keys, keys), (self.values, values)):
                cache[:, block, :, : end - first] = read[:, :, first:end]

    def _blocks(self, row: int, num_tokens: int) -> Tensor:
        return torch.from_numpy(self.tables.table[row, : blocks_of(num_tokens)])

    def of_layer(self, layer: int) -> Tensor:
        """All keys of a layer, then all of its values, [2 * blocks * kv_heads * tokens, head_dim], where they lie."""
        return self._layers[layer]

    def store(self, layer: int, places: Tensor, new: Tensor) -> None:
        """Puts keys and values [..., D] at places [...] of `of_layer`."""
        self._layers[layer].index_put_((places,), new)

    def places(self, blocks: Tensor, within: Tensor) -> Tensor:
        """Where the tokens [S] at places `within` of `blocks` lie among a layer's [blocks * kv_heads * tokens, D]:
        [S * kv_heads]."""
        heads = torch.arange(self.keys.shape[2])
        return ((blocks[:, None] * len(heads) + heads) * BLOCK_TOKENS + within[:, None]).flatten()

    def continue_rows(self, rows: Sequence[int], cached: Sequence[int], lengths: Sequence[int]) -> ContinuedRows:
        """A view for packed rows: the b-th has `lengths[b]` tokens behind the `cached[b]` tokens of `rows[b]`, and
        holds blocks for them."""
        firsts = np.array(cached) - np.cumsum([0, *lengths[:-1]])
        positions = np.arange(sum(lengths)) + np.repeat(firsts, lengths)
        blocks = self.tables.table[np.repeat(rows, lengths), positions // BLOCK_TOKENS]
        within = torch.from_numpy(positions % BLOCK_TOKENS)
        places = self.places(torch.from_numpy(blocks), within).to(self.keys.device)
        runs = equal_rows(zip(range(len(rows)), cached, lengths, strict=True))
        return ContinuedRows(self, tuple(rows), tuple(lengths), runs, places)


@dataclass(frozen=True)
class ContinuedRows:
    """The cache while rows are continued by several tokens each, which lie packed: S tokens, one row behind the other.

    A row of which nothing is cached begins in its blocks, whatever was there.
    """

    cache: PagedCache
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    runs: tuple[EqualRows, ...]
    """Rows that are alike, by their places among `rows`."""
    places: Tensor  # [S * kv_heads], where their keys go among all of a layer's [blocks * kv_heads * tokens, D]

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Puts [S, 1, kv_heads, D] behind what is cached, leaving out what pads S behind the rows."""
        for store, new in ((self.cache.keys[layer], key), (self.cache.values[layer], value)):
            tokens = new.reshape(-1, new.shape[-1])[: len(self.places)]
            store.view(-1, store.shape[-1]).index_copy_(0, self.places, tokens)

    def seen(self, layer: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each run all keys and values, those of its own tokens too, gathered [B, kv_heads, T, D]."""
        for run in self.runs:
            rows = self.rows[run.first_slot : run.first_slot + run.num_rows]
            blocks = torch.stack([self.cache._blocks(row, run.num_keys) for row in rows]).to(self.places.device)
            keys, values = (
                store[layer][blocks].transpose(1, 2).flatten(2, 3)[:, :, : run.num_keys]
                for store in (self.cache.keys, self.cache.values)
            )
            yield keys, values
