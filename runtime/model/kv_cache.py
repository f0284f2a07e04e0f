"""The paged KV cache: keys and values of sequences of different lengths, in blocks that are allocated as rows grow.

The cache has a fixed number of blocks, so its size is as planned whatever the lengths are; the scheduler decides which
rows wait (Kwon et al., arXiv:2309.06180, section 4: blocks, block tables and shared prefixes). Adjacent rows of equal
lengths are grouped into runs, each of which is one attention call. Layers with a state have no blocks; their states are
kept beside the blocks, one for each row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.packing import BLOCK_TOKENS, num_blocks_for
from meshwright.runtime.model.block_tables import BlockTables
from meshwright.runtime.model.recurrent_states import RecurrentStates


class EqualRows(NamedTuple):
    """Adjacent rows in adjacent slots, each of `length` new tokens after `cached` tokens in the cache."""

    first_slot: int
    cached: int
    length: int
    num_rows: int = 1

    @property
    def num_keys(self) -> int:
        """Number of keys that the last token of each row sees."""
        return self.cached + self.length


def group_equal_rows(rows: Iterable[tuple[int, int, int]]) -> tuple[EqualRows, ...]:
    """Groups rows, each given as (slot, cached tokens, length), into as few runs as possible."""
    runs: list[EqualRows] = []
    for slot, cached, length in rows:
        if runs and (slot, cached, length) == (runs[-1].first_slot + runs[-1].num_rows, *runs[-1][1:3]):
            runs[-1] = runs[-1]._replace(num_rows=runs[-1].num_rows + 1)
        else:
            runs.append(EqualRows(slot, cached, length))
    return tuple(runs)


class PagedCache:
    """Rotated keys and values of one pipeline stage: [layers, blocks, kv_heads, tokens of a block, head_dim].

    Block 0 is a dummy: rows that only pad the batch of a decode step write there.
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
        states: RecurrentStates | None = None,
    ) -> None:
        """Allocates a cache for `num_rows` rows at a time, of at most `max_tokens` tokens each.

        `num_layers` counts layers with attention; `states` are those of the other layers.
        """
        shape = (num_layers, 2, num_blocks + 1, num_kv_heads, BLOCK_TOKENS, head_dim)
        storage = torch.zeros(shape, dtype=dtype, device=device)
        self.keys, self.values = storage.unbind(1)
        self._layers = [layer.view(-1, head_dim) for layer in storage]
        self.tables, self.max_tokens = BlockTables(num_blocks, num_rows, max_tokens), max_tokens
        self.states = states

    @property
    def has_layers(self) -> bool:
        """True if any layer of the stage has keys and values."""
        return len(self._layers) > 0

    def share(self, source: int, target: int, num_tokens: int) -> None:
        """Copies the last, partly filled block of a row's first `num_tokens` to the block at the same index of another
        row.

        Full blocks need no copy, since both rows read them: `BlockTables.share`.
        """
        num_full, remainder = divmod(num_tokens, BLOCK_TOKENS)
        if remainder:
            table = self.tables.table
            for cache in (self.keys, self.values):
                cache[:, table[target, num_full]] = cache[:, table[source, num_full]]

    def compact(self) -> None:
        """Moves blocks so that attention can read a contiguous window, if there are many gaps.

        Block numbers read from the tables before are then invalid.
        """
        moved, to = (torch.from_numpy(blocks) for blocks in self.tables.compact())
        if len(moved):
            for layer in (*self.keys, *self.values):
                layer.index_copy_(0, to, layer.index_select(0, moved))

    def read(self, row: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """A host copy of keys and values of a row's first `num_tokens`, [layers, kv_heads, num_tokens, head_dim]
        each."""
        blocks = self._blocks(row, num_tokens)
        keys, values = (
            cache[:, blocks].transpose(1, 2).flatten(2, 3)[:, :, :num_tokens].detach().cpu().clone()
            for cache in (self.keys, self.values)
        )
        return keys, values

    def write(self, row: int, keys: Tensor, values: Tensor) -> None:
        """Writes the result of `read`, [layers, kv_heads, num_tokens, head_dim] each, to the blocks of a row."""
        num_tokens = keys.shape[2]
        for index, block in enumerate(self._blocks(row, num_tokens).tolist()):
            first, end = index * BLOCK_TOKENS, min(num_tokens, (index + 1) * BLOCK_TOKENS)
            for cache, saved in ((self.keys, keys), (self.values, values)):
                cache[:, block, :, : end - first] = saved[:, :, first:end]

    def _blocks(self, row: int, num_tokens: int) -> Tensor:
        return torch.from_numpy(self.tables.table[row, : num_blocks_for(num_tokens)])

    def layer_view(self, layer: int) -> Tensor:
        """A view on all keys of a layer followed by all its values, [2 * blocks * kv_heads * tokens, head_dim]."""
        return self._layers[layer]

    def store(self, layer: int, indices: Tensor, new: Tensor) -> None:
        """Writes keys and values `new` [..., D] to the rows `indices` [...] of `layer_view`."""
        self._layers[layer].index_put_((indices,), new)

    def token_indices(self, blocks: Tensor, within: Tensor) -> Tensor:
        """Indices [S * kv_heads] of tokens [S], at offsets `within` in `blocks`, among a layer's
        [blocks * kv_heads * tokens, D]."""
        heads = torch.arange(self.keys.shape[2])
        return ((blocks[:, None] * len(heads) + heads) * BLOCK_TOKENS + within[:, None]).flatten()

    def continue_rows(self, rows: Sequence[int], cached: Sequence[int], lengths: Sequence[int]) -> ContinuedRows:
        """The view on the cache for a pass over packed rows, of which the b-th has `lengths[b]` new tokens after the
        `cached[b]` tokens of `rows[b]`; blocks for them must be allocated."""
        firsts = np.array(cached) - np.cumsum([0, *lengths[:-1]])
        positions = np.arange(sum(lengths)) + np.repeat(firsts, lengths)
        blocks = self.tables.table[np.repeat(rows, lengths), positions // BLOCK_TOKENS]
        within = torch.from_numpy(positions % BLOCK_TOKENS)
        indices = self.token_indices(torch.from_numpy(blocks), within).to(self.keys.device)
        runs = group_equal_rows(zip(range(len(rows)), cached, lengths, strict=True))
        return ContinuedRows(self, tuple(rows), tuple(lengths), runs, indices)


@dataclass(frozen=True)
class ContinuedRows:
    """The cache in a prefill pass over packed rows that each add several tokens, S in all, to their cached ones.

    A row without cached tokens overwrites its blocks from the start.
    """

    cache: PagedCache
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    runs: tuple[EqualRows, ...]
    """Runs of rows of equal lengths; slots are indices into `rows`."""
    indices: Tensor  # [S * kv_heads], indices of their keys among a layer's [blocks * kv_heads * tokens, D]

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Writes new keys and values [S, 1, kv_heads, D] after the cached ones, except for padding after the rows."""
        for store, new in ((self.cache.keys[layer], key), (self.cache.values[layer], value)):
            tokens = new.reshape(-1, new.shape[-1])[: len(self.indices)]
            store.view(-1, store.shape[-1]).index_copy_(0, self.indices, tokens)

    def keys_and_values(self, layer: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the keys and values of each run, its new tokens included, gathered to [B, kv_heads, T, D]."""
        for run in self.runs:
            rows = self.rows[run.first_slot : run.first_slot + run.num_rows]
            blocks = torch.stack([self.cache._blocks(row, run.num_keys) for row in rows]).to(self.indices.device)
            keys, values = (
                store[layer][blocks].transpose(1, 2).flatten(2, 3)[:, :, : run.num_keys]
                for store in (self.cache.keys, self.cache.values)
            )
            yield keys, values


def allocate_cache(
    spec: ModelSpec,
    layers: range,
    tp: int,
    *,
    num_blocks: int,
    num_rows: int,
    max_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> PagedCache:
    """The cache of a pipeline stage with these layers of the whole model, on one of `tp` tensor-parallel ranks."""
    heads, (first, end) = spec.cached_heads(tp), (layers.start, layers.stop)
    states = None
    if spec.linear:
        num_layers = spec.linear_layers_between(first, end)
        linear = spec.linear.shard(tp)
        states = RecurrentStates(linear, num_layers=num_layers, num_rows=num_rows, dtype=dtype, device=device)
    return PagedCache(
        num_layers=spec.attention_layers_between(first, end),
        num_blocks=num_blocks,
        num_rows=num_rows,
        num_kv_heads=heads.num_keys,
        max_tokens=max_tokens,
        head_dim=heads.size,
        dtype=dtype,
        device=device,
        states=states,
    )
