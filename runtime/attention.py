"""The core attention of every model: rotary embedding by per-token positions, then scaled dot-product attention.

It sits behind megatron's core-attention seam, which hands it this rank's heads of the whole sequence. Rows lie in it
one behind the other, and each is attended to alone: one call for all of them would compute the scores between rows too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from meshwright.profiles.model import ModelSpec, RopeScaling
from meshwright.runtime.kv_cache import ContinuedRows
from meshwright.runtime.parts import Gathered, Parts


@dataclass(frozen=True)
class Packing:
    """Rows that lie one behind the other in a sequence of S tokens; what is behind them pads it.

    It takes the way of megatron's own packed sequences, so that a layer that is computed again finds the rows of its
    micro-batch.
    """

    lengths: tuple[int, ...]
    """Tokens of each row, or of each of this rank's pieces of the rows."""
    cos: Tensor
    """Of the tokens' angles, as `sin`: [S, 1, 1, D]."""
    sin: Tensor
    biases: tuple[Tensor | None, ...]
    """Of each row, what is added to scores so that the last query sees all keys and each before it one fewer; None
    where there are as many keys as queries, for plain causal attention."""
    qkv_format: Literal["sbhd"] = "sbhd"
    """What megatron asks before it would drop the batch dimension, which is kept."""
    parts: Parts | None = None
    """Where rows are cut over context-parallel ranks: what this rank has of them."""
    cache: ContinuedRows | None = None
    """Where rows continue what a cache has of them, and are kept there."""
    ends_only: bool = False
    """Whether the model's head is wanted for the last token of each row alone."""


class CoreAttention(nn.Module):
    """Causal grouped-query attention over packed rows; the heads are this tensor-parallel rank's."""

    def __init__(self, *, first_layer: int, layer_number: int, **_: Any) -> None:
        """`layer_number` counts from 1 through the whole model; `first_layer` layers are on earlier stages.

        The arguments left out are megatron's for its own kinds of attention.
        """
        super().__init__()
        self.layer = layer_number - 1 - first_layer

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Packing, **__: Any
    ) -> Tensor:
        """[S, 1, heads * D] from query [S, 1, heads, D], key and value [S, 1, kv_heads, D]."""
        packing = packed_seq_params
        query, key = rotate(query, packing.cos, packing.sin), rotate(key, packing.cos, packing.sin)
        if packing.parts is not None:
            return _attend_parts(query, key, value, packing, packing.parts)
        if packing.cache is not None:
            packing.cache.store(self.layer, key, value)
            if any(packing.cache.cached):
                return _attend(query, packing.cache.seen(self.layer), packing)
        alone = (_rows(heads, packing.lengths) for heads in (key, value))
        return _attend(query, zip(*alone, strict=True), packing)


def _attend_parts(query: Tensor, key: Tensor, value: Tensor, packing: Packing, parts: Parts) -> Tensor:
    """From this rank's pieces of the rows to the keys of all ranks up to their ends."""
    held = parts.num_tokens
    with Gathered(torch.stack((key[:held], value[:held]), dim=1), parts).whole() as gathered:
        keys, values = gathered.permute(1, 2, 3, 0, 4)
        seen = ((keys[:, :, row:end], values[:, :, row:end]) for _, _, row, end in parts.pieces())
        return _attend(query, seen, packing)


def _attend(query: Tensor, seen: Iterable[tuple[Tensor, Tensor]], packing: Packing) -> Tensor:
    """[S, 1, heads * D] from query [S, 1, heads, D] and of each row the keys and values [1, kv_heads, T, D] that its
    last query sees; zero for what pads S."""
    padding = torch.zeros_like(query[sum(packing.lengths) :])
    rows = zip(_rows(query, packing.lengths), seen, packing.biases, strict=True)
    attended = [_attend_to_end(own, *keys_and_values, bias).permute(2, 0, 1, 3) for own, keys_and_values, bias in rows]
    return torch.cat((*attended, padding)).flatten(2)


def _attend_to_end(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    """[1, heads, S, D], where the last of S queries sees all of T keys and each before it one fewer."""
    if bias is None or query.is_cuda:
        grouped = query.shape[1] > keys.shape[1]
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=bias, is_causal=bias is None, enable_gqa=grouped
        )
    # The kernel that takes a mask would copy keys and values for each query head of a group, so the heads of a group
    # are laid end to end as if they were more queries.
    end_to_end = query.reshape(1, keys.shape[1], -1, query.shape[-1])
    return F.scaled_dot_product_attention(end_to_end, keys, values, attn_mask=bias).reshape(query.shape)


def _rows(heads: Tensor, lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
    """[1, heads, T, D] of each row of [S, 1, heads, D]."""
    return heads[: sum(lengths)].permute(1, 2, 0, 3).split(lengths, dim=2)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`heads` [S, B, heads, D] turned by the angles of their tokens; cos and sin [S, 1, 1, D]."""
    low, high = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-high, low), dim=-1) * sin


class Rotary:
    """The angles of rotary position embedding, shared by the layers of one model, which turn packed rows."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self._frequencies = frequencies(spec).to(device)
        self._heads_per_group = spec.num_heads // spec.num_kv_heads
        self._first: tuple[Tensor, Tensor] | None = None

    def pack(
        self,
        lengths: Sequence[int],
        like: Tensor,
        *,
        tail: int = 0,
        cache: ContinuedRows | None = None,
        ends_only: bool = False,
    ) -> Packing:
        """Rows of these lengths, and `tail` tokens of no meaning behind them; angles have the dtype of `like`."""
        starts = cache.cached if cache else (0,) * len(lengths)
        rows = [slice(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        cos, sin = (
            torch.cat([at[row] for row in (*rows, slice(tail))])
            for at in self.table(max(tail, *(row.stop for row in rows)), like)
        )
        biases = self._biases([(row.stop - row.start, row.stop) for row in rows], like)
        return Packing(tuple(lengths), cos, sin, biases, cache=cache, ends_only=ends_only)

    def pack_parts(self, parts: Parts, like: Tensor, *, tail: int = 0) -> Packing:
        """This rank's parts of rows, otherwise as `pack`."""
        positions = F.pad(parts.positions, (0, tail)).to(like.device)
        cos, sin = (at[positions] for at in self.table(int(positions.max()) + 1, like))
        pieces = tuple(parts.pieces())
        biases = self._biases([(size, end - row) for _, size, row, end in pieces], like)
        return Packing(tuple(piece.size for piece in pieces), cos, sin, biases, parts=parts)

    def table(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [length, 1, 1, D] at positions 0 to length-1, of the device and dtype of `like`."""
        if self._first is None or self._first[0].shape[0] < length or self._first[0].dtype != like.dtype:
            with torch.inference_mode(False):  # kept for training too, wherever it is first asked for
                self._first = self._angles(torch.arange(length, device=like.device).unsqueeze(1), like.dtype)
        cos, sin = self._first
        return cos[:length], sin[:length]

    def _biases(self, sizes: Sequence[tuple[int, int]], like: Tensor) -> tuple[Tensor | None, ...]:
        """For so many queries and the keys that they see, of each row."""
        known = {size: None if size[0] == size[1] else self._bias(*size, like) for size in set(sizes)}
        return tuple(known[size] for size in sizes)

    def _bias(self, num_queries: int, num_keys: int, like: Tensor) -> Tensor:
        """On a GPU nothing but its shape; elsewhere of the query heads of a group, end to end."""
        if like.is_cuda:
            return causal_lower_right(num_queries, num_keys)
        # There torch would make this of it too, in every layer, and warn that no kernel does without.
        later = torch.full((num_queries, num_keys), -torch.inf, dtype=like.dtype).triu(num_keys - num_queries + 1)
        return later.repeat(self._heads_per_group, 1)

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        turns = positions.float().unsqueeze(-1) * self._frequencies
        angles = torch.cat((turns, turns), dim=-1).unsqueeze(2)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def frequencies(spec: ModelSpec) -> Tensor:
    """Radians per position, [head_dim / 2], as Hugging Face computes them in fp32."""
    steps = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    plain = 1.0 / spec.rope_theta**steps
    return plain if spec.rope_scaling is None else _stretched(plain, spec.rope_scaling)


def _stretched(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's rule: long waves are slowed by `factor`, short ones kept, those between blended.

    Llama 3 report, arXiv:2407.21783, section 3.4.2, and
    https://github.com/huggingface/transformers/blob/main/src/transformers/modeling_rope_utils.py
    """
    wavelengths = 2 * math.pi / plain
    turns = scaling.original_max_positions / wavelengths
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * plain / scaling.factor + kept * plain
