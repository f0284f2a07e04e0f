"""The core attention of every model: rotary embedding by per-token positions, then scaled dot-product attention.

It sits behind megatron's core-attention seam, which hands it this rank's heads of the whole sequence. It knows of
a cache only the protocol below: who keeps keys and values, and where, is the cache's affair.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from meshwright.profiles.model import ModelSpec, RopeScaling
from meshwright.runtime.parts import Gathered, Parts


class AttentionCache(Protocol):
    """Keys and values of earlier tokens, kept between forward passes."""

    @property
    def positions(self) -> Tensor:
        """[S, B] int64, the position in its sequence of each query token."""
        ...

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Stores rotated keys, and values, [S, B, kv_heads, D] of the 0-based `layer` of this pipeline stage.

        Returns all keys and values to attend to, [B, kv_heads, T, D], and a boolean mask [B, 1, S, T] that is
        true where a query may look; None means plain causal attention, T == S.
        """
        ...


@contextmanager
def attention_cache(model: nn.Module, cache: AttentionCache) -> Iterator[None]:
    """Within it every core attention of `model` reads and extends `cache`."""
    cores = [module for module in model.modules() if isinstance(module, CoreAttention)]
    before = [core.cache for core in cores]
    for core in cores:
        core.cache = cache
    try:
        yield
    finally:
        for core, earlier in zip(cores, before, strict=True):
            core.cache = earlier


@dataclass(frozen=True)
class Packing:
    """Rows that lie one behind the other in a sequence of S tokens; each starts at position 0 and sees itself alone.

    It takes the way of megatron's own packed sequences, so that a layer that is computed again finds the rows of its
    micro-batch.
    """

    lengths: tuple[int, ...]
    """Tokens of each row; they sum to S."""
    cos: Tensor
    """Of the tokens' angles, as `sin`: [S, 1, 1, D]."""
    sin: Tensor
    qkv_format: Literal["sbhd"] = "sbhd"
    """What megatron asks before it would drop the batch dimension, which is kept."""
    parts: Parts | None = None
    """Where rows are cut over context-parallel ranks: what this rank has of them. Tokens behind them pad S."""


class CoreAttention(nn.Module):
    """Causal grouped-query attention over [S, B, heads, D]; the heads are this tensor-parallel rank's.

    Either B rows continue what a cache has of them, or B is 1 and the sequence is packed.
    """

    def __init__(self, *, rotary: Rotary, first_layer: int, layer_number: int, **_: Any) -> None:
        """`layer_number` counts from 1 through the whole model; `first_layer` layers are on earlier stages.

        The arguments left out are megatron's for its own kinds of attention.
        """
        super().__init__()
        self.rotary = rotary
        self.layer = layer_number - 1 - first_layer
        self.cache: AttentionCache | None = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: Any,
        packed_seq_params: Packing | None = None,
        **__: Any,
    ) -> Tensor:
        """[S, B, heads * D] from query [S, B, heads, D], key and value [S, B, kv_heads, D]."""
        if packed_seq_params is not None and packed_seq_params.parts is not None:
            return _attend_parts(query, key, value, packed_seq_params, packed_seq_params.parts)
        if packed_seq_params is not None:
            return _attend_packed(query, key, value, packed_seq_params)
        assert self.cache is not None, "tokens come packed or with a cache"
        if self.layer == 0:  # all layers of a pass share the positions, the first computes their angles
            self.rotary.aim(self.cache.positions, query.dtype)
        cos, sin = self.rotary.aimed
        query = rotate(query, cos, sin)
        keys, values, mask = self.cache.extend(self.layer, rotate(key, cos, sin), value)
        attended = _attend(query.permute(1, 2, 0, 3), keys, values, mask)
        return attended.permute(2, 0, 1, 3).flatten(2)


def _attend_packed(query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
    """[S, 1, heads * D], row by row: one call for all of them would compute the scores between rows too."""
    turned = (rotate(query, packing.cos, packing.sin), rotate(key, packing.cos, packing.sin), value)
    queries, keys, values = (heads.permute(1, 2, 0, 3).split(packing.lengths, dim=2) for heads in turned)
    attended = (_attend(*row, None).permute(2, 0, 1, 3) for row in zip(queries, keys, values, strict=True))
    return torch.cat(tuple(attended)).flatten(2)


def _attend_parts(query: Tensor, key: Tensor, value: Tensor, packing: Packing, parts: Parts) -> Tensor:
    """As `_attend_packed`, from this rank's pieces of the rows to the keys of all ranks up to their ends."""
    query, key = rotate(query, packing.cos, packing.sin), rotate(key, packing.cos, packing.sin)
    held = parts.num_tokens
    attended = []
    with Gathered(torch.stack((key[:held], value[:held]), dim=1), parts).whole() as gathered:
        keys, values = gathered.permute(1, 2, 3, 0, 4)
        for own, size, row, end in parts.pieces():
            queries = query[own : own + size].permute(1, 2, 0, 3)
            found = _attend_to_end(queries, keys[:, :, row:end], values[:, :, row:end])
            attended.append(found.permute(2, 0, 1, 3))
    return torch.cat((*attended, torch.zeros_like(query[held:]))).flatten(2)


def _attend_to_end(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """[B, heads, S, D], where the last of S queries sees all of T keys and each before it one fewer."""
    length, seen = query.shape[2], keys.shape[2]
    if length == seen:
        return _attend(query, keys, values, None)
    if query.is_cuda:
        bias, grouped = causal_lower_right(length, seen), query.shape[1] > keys.shape[1]
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, enable_gqa=grouped)
    # There torch would make this mask of it too, and warn that no kernel does without.
    mask = torch.ones(length, seen, dtype=torch.bool, device=query.device).tril(seen - length)
    return _attend(query, keys, values, mask.expand(query.shape[0], 1, -1, -1))


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """[B, heads, S, D] from query [B, heads, S, D], keys and values [B, kv_heads, T, D], mask [B, 1, S, T]."""
    batch, heads, length, size = query.shape
    per_key = heads // keys.shape[1]
    if mask is None:
        return F.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=per_key > 1)
    if per_key == 1:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
    # The kernels that take a mask would copy keys and values for each query head of a group, so the heads of a
    # group are laid end to end as if they were more queries.
    grouped = query.reshape(batch, keys.shape[1], per_key * length, size)
    attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask.repeat(1, 1, per_key, 1))
    return attended.reshape(batch, heads, length, size)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`heads` [S, B, heads, D] turned by the angles of their tokens; cos and sin [S, B or 1, 1, D]."""
    low, high = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-high, low), dim=-1) * sin


class Rotary:
    """The angles of rotary position embedding, shared by the layers of one model."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self._frequencies = frequencies(spec).to(device)
        self._first: tuple[Tensor, Tensor] | None = None
        self.aimed: tuple[Tensor, Tensor]
        """cos and sin [S, B, 1, D] at the positions last aimed at."""

    def pack(self, lengths: Sequence[int], like: Tensor) -> Packing:
        """Rows of these lengths, with angles of the dtype of `like`."""
        cos, sin = (
            torch.cat([of_positions[:length] for length in lengths]) for of_positions in self.table(max(lengths), like)
        )
        return Packing(tuple(lengths), cos, sin)

    def pack_parts(self, parts: Parts, tail: int, like: Tensor) -> Packing:
        """This rank's parts of rows, and `tail` tokens of no meaning behind them."""
        positions = F.pad(parts.positions, (0, tail)).to(like.device)
        cos, sin = (of_positions[positions] for of_positions in self.table(int(positions.max()) + 1, like))
        return Packing((len(positions),), cos, sin, parts=parts)

    def table(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [length, 1, 1, D] at positions 0 to length-1, of the device and dtype of `like`."""
        if self._first is None or self._first[0].shape[0] < length or self._first[0].dtype != like.dtype:
            with torch.inference_mode(False):  # kept for training too, wherever it is first asked for
                self._first = self._angles(torch.arange(length, device=like.device).unsqueeze(1), like.dtype)
        cos, sin = self._first
        return cos[:length], sin[:length]

    def aim(self, positions: Tensor, dtype: torch.dtype) -> None:
        """Sets `aimed` to the angles at `positions` [S, B]."""
        self.aimed = self._angles(positions, dtype)

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
