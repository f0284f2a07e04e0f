"""Keys and values of the sequences being generated, one slot each.

Live sequences occupy a contiguous run of slots, so that a decode step reads the cache through a view, never a copy.
Positions are per row: rows of different lengths live side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.runtime.model.equal_rows import EqualRows, equal_rows
from meshwright.runtime.model.row_bands import bands


class SlotCache:
    """Rotated keys and values of one pipeline stage: [layers, slots, kv_heads, max_tokens, head_dim]."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        max_tokens: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, num_slots, num_kv_heads, max_tokens, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def max_tokens(self) -> int:
        """That a slot has room for."""
        return self.keys.shape[3]

    def move(self, source: int, target: int, num_tokens: int) -> None:
        """Copies the first `num_tokens` of one slot over another."""
        for cache in (self.keys, self.values):
            cache[:, target, :, :num_tokens] = cache[:, source, :, :num_tokens]

    def read(self, slot: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """A copy on the host of the first `num_tokens` of a slot, [layers, kv_heads, num_tokens, head_dim] each."""
        keys, values = (cache[:, slot, :, :num_tokens].detach().cpu().clone() for cache in (self.keys, self.values))
        return keys, values

    def write(self, slot: int, keys: Tensor, values: Tensor) -> None:
        """Puts what was read, [layers, kv_heads, num_tokens, head_dim] each, into a slot."""
        for cache, read in ((self.keys, keys), (self.values, values)):
            cache[:, slot, :, : read.shape[2]] = read

    def decode(self, first_slot: int, lengths: Tensor, longest: int) -> DecodeView:
        """A view for one new token per row; `lengths` [B] counts the tokens cached, of which no row has more than
        `longest`. A device would have to be waited for to tell them apart: there all rows are read as far."""
        _, _, heads, max_tokens, _ = self.keys.shape
        device = lengths.device
        num_rows = lengths.shape[0]
        slots = torch.arange(first_slot, first_slot + num_rows, device=device)
        rows = slots[:, None] * heads + torch.arange(heads, device=device)
        hidden = torch.arange(longest + 1, device=device) > lengths[:, None]
        mask = torch.zeros(hidden.shape, dtype=self.keys.dtype, device=device).masked_fill_(hidden, -torch.inf)
        places = (rows * max_tokens + lengths[:, None]).flatten()
        known, read = [longest] * num_rows if lengths.is_cuda else lengths.tolist(), []
        for band in bands(known):
            slots_of, reach = slice(first_slot + band.start, first_slot + band.stop), 1 + max(known[band])
            keys, values = (cache[:, slots_of, :, :reach].unbind() for cache in (self.keys, self.values))
            read.append(Band(band, keys, values, mask[band, None, None, :reach]))
        return DecodeView(self, lengths, places, tuple(read))

    def continue_rows(self, slots: Sequence[int], cached: Sequence[int], lengths: Sequence[int]) -> ContinuedRows:
        """A view for packed rows: row b has `lengths[b]` tokens behind the `cached[b]` tokens of `slots[b]`."""
        _, _, heads, max_tokens, _ = self.keys.shape
        rows = torch.tensor(slots).repeat_interleave(torch.tensor(lengths))[:, None] * heads + torch.arange(heads)
        positions = [torch.arange(start, start + length) for start, length in zip(cached, lengths, strict=True)]
        places = rows * max_tokens + torch.cat(positions)[:, None]
        runs = equal_rows(zip(slots, cached, lengths, strict=True))
        return ContinuedRows(self, tuple(lengths), runs, places.flatten().to(self.keys.device))


@dataclass(frozen=True)
class ContinuedRows:
    """The cache while rows are continued by several tokens each, which lie packed: S tokens, one row behind the other.

    A row of which nothing is cached begins in its slot, whatever was there.
    """

    cache: SlotCache
    lengths: tuple[int, ...]
    runs: tuple[EqualRows, ...]
    places: Tensor  # [S * kv_heads], where their keys go among all of a layer's [slots * kv_heads * max_tokens, D]

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Puts [S, 1, kv_heads, D] behind what is cached, leaving out what pads S behind the rows."""
        for store, new in ((self.cache.keys[layer], key), (self.cache.values[layer], value)):
            tokens = new.reshape(-1, new.shape[-1])[: len(self.places)]
            store.view(-1, store.shape[-1]).index_copy_(0, self.places, tokens)

    def seen(self, layer: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each run all keys and values, those of its own tokens too, as views [B, kv_heads, T, D]."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        for run in self.runs:
            rows = slice(run.first_slot, run.first_slot + run.num_rows), slice(None), slice(run.num_keys)
            yield keys[rows], values[rows]


@dataclass(frozen=True)
class Band:
    """Neighbouring rows of a decode step, which read their slots as far as the longest of them."""

    rows: slice
    keys: tuple[Tensor, ...]  # of each layer [b, kv_heads, T, D], as `values`
    values: tuple[Tensor, ...]
    mask: Tensor  # [b, 1, 1, T], 0 where a row may look and minus infinity elsewhere


@dataclass(frozen=True)
class DecodeView:
    """The cache during a decode step: one new token per row, at the row's own position."""

    cache: SlotCache
    positions: Tensor  # [B]
    places: Tensor  # [B * kv_heads], where the new keys go among all of a layer's [slots * kv_heads * max_tokens, D]
    bands: tuple[Band, ...]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[B, kv_heads, heads / kv_heads, D] from the new queries of that shape; new keys and values [B, kv_heads, D]
        are kept."""
        size = key.shape[-1]
        for cache, new in ((self.cache.keys, key), (self.cache.values, value)):
            cache[layer].view(-1, size).index_copy_(0, self.places, new.reshape(-1, size))
        attended = [
            F.scaled_dot_product_attention(query[band.rows], band.keys[layer], band.values[layer], attn_mask=band.mask)
            for band in self.bands
        ]
        return attended[0] if len(attended) == 1 else torch.cat(attended)
