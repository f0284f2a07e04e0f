"""Keys and values of the sequences being generated, one slot each.

Live sequences occupy a contiguous run of slots, so that a decode step reads the cache through a view, never a copy.
Positions are per row: rows of different lengths live side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
    def num_bytes(self) -> int:
        return 2 * self.keys.numel() * self.keys.element_size()

    def move(self, source: int, target: int, num_tokens: int) -> None:
        """Copies the first `num_tokens` of one slot over another."""
        for cache in (self.keys, self.values):
            cache[:, target, :, :num_tokens] = cache[:, source, :, :num_tokens]

    def read(self, slot: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """A copy on the host of the first `num_tokens` of a slot, [layers, kv_heads, num_tokens, head_dim] each."""
        keys, values = (cache[:, slot, :, :num_tokens].detach().cpu().clone() for cache in (self.keys, self.values))
        return keys, values

    def write(self, slot: int, keys: Tensor, values: Tensor) -> None:
        """Puts what was read into a slot."""
        for cache, read in ((self.keys, keys), (self.values, values)):
            cache[:, slot, :, : read.shape[2]] = read

    def prefill(self, first_slot: int, num_rows: int, num_tokens: int) -> PrefillView:
        """A view that stores right-padded prompts of `num_tokens` into consecutive empty slots."""
        positions = torch.arange(num_tokens, device=self.keys.device)
        return PrefillView(self, first_slot, positions[:, None].expand(num_tokens, num_rows))

    def decode(self, first_slot: int, lengths: Tensor, longest: int) -> DecodeView:
        """A view for one new token per row; `lengths` [B] counts the tokens cached, `longest` is their maximum."""
        _, _, heads, max_tokens, _ = self.keys.shape
        device = lengths.device
        num_rows = lengths.shape[0]
        slots = torch.arange(first_slot, first_slot + num_rows, device=device)
        rows = slots[:, None] * heads + torch.arange(heads, device=device)
        hidden = torch.arange(longest + 1, device=device) > lengths[:, None]
        mask = torch.zeros(hidden.shape, dtype=self.keys.dtype, device=device).masked_fill_(hidden, -torch.inf)
        return DecodeView(
            self,
            slice(first_slot, first_slot + num_rows),
            positions=lengths,
            places=(rows * max_tokens + lengths[:, None]).flatten(),
            mask=mask[:, None, None],
        )

    def append(self, slots: list[int], cached: list[int], lengths: list[int], width: int) -> AppendView:
        """A view for right-padded rows [B, width] that continue what their slots hold.

        Row b has `lengths[b]` tokens of its own and goes behind the `cached[b]` tokens of `slots[b]`.
        """
        _, _, heads, max_tokens, _ = self.keys.shape
        device = self.keys.device
        row_slots, starts = torch.tensor(slots, device=device), torch.tensor(cached, device=device)
        steps = torch.arange(width, device=device)[:, None]
        positions = starts + steps
        real = (steps < torch.tensor(lengths, device=device)).flatten().nonzero()[:, 0]
        rows = row_slots.repeat(width)[real, None] * heads + torch.arange(heads, device=device)
        num_tokens = max(a + b for a, b in zip(cached, lengths, strict=True))
        visible = torch.arange(num_tokens, device=device) <= positions.T[:, :, None]
        return AppendView(
            self,
            row_slots,
            # Padding turns by the angles of some real position; what it computes is not used.
            positions=positions.clamp(max=max_tokens - 1),
            real=real,
            places=(rows * max_tokens + positions.flatten()[real, None]).flatten(),
            mask=visible[:, None],
        )


@dataclass(frozen=True)
class AppendView:
    """The cache while rows of different lengths are continued by several tokens each."""

    cache: SlotCache
    slots: Tensor  # [B]
    positions: Tensor  # [S, B]
    real: Tensor  # [N], which of the S x B tokens are no padding
    places: Tensor  # [N * kv_heads], where their keys go among all of a layer's [slots * kv_heads * max_tokens, D]
    mask: Tensor  # [B, 1, S, T]

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Stores [S, B, kv_heads, D] without the padding; returns all that is cached, [B, kv_heads, T, D]."""
        kept = []
        for store, new in ((self.cache.keys[layer], key), (self.cache.values[layer], value)):
            tokens = new.flatten(0, 1)[self.real].reshape(-1, new.shape[-1])
            store.view(-1, store.shape[-1]).index_copy_(0, self.places, tokens)
            kept.append(store[:, :, : self.mask.shape[-1]][self.slots])
        return kept[0], kept[1], self.mask


@dataclass(frozen=True)
class PrefillView:
    """The cache during a prefill: prompts attend to themselves alone."""

    cache: SlotCache
    first_slot: int
    positions: Tensor  # [S, B]

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Stores [S, B, kv_heads, D] and returns it as [B, kv_heads, S, D]; attention is causal."""
        num_tokens, num_rows = key.shape[:2]
        slots = slice(self.first_slot, self.first_slot + num_rows)
        key, value = key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3)
        self.cache.keys[layer, slots, :, :num_tokens] = key
        self.cache.values[layer, slots, :, :num_tokens] = value
        return key, value, None


@dataclass(frozen=True)
class DecodeView:
    """The cache during a decode step: one new token per row, at the row's own position."""

    cache: SlotCache
    slots: slice
    positions: Tensor  # [B]
    places: Tensor  # [B * kv_heads], where the new keys go among all of a layer's [slots * kv_heads * max_tokens, D]
    mask: Tensor  # [B, 1, 1, T], 0 where a row may look and minus infinity elsewhere; T covers the longest row

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores keys and values [B, kv_heads, D]; returns all that are cached, [B, kv_heads, T, D]."""
        size, num_tokens = key.shape[-1], self.mask.shape[-1]
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys.view(-1, size).index_copy_(0, self.places, key.reshape(-1, size))
        values.view(-1, size).index_copy_(0, self.places, value.reshape(-1, size))
        return keys[self.slots, :, :num_tokens], values[self.slots, :, :num_tokens]
