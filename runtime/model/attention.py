"""The core attention of every model: rotary embedding by per-token positions, then scaled dot-product attention.

It sits behind megatron's core-attention seam, which hands it this rank's heads of the whole sequence. Rows lie in it
one behind the other. Equal rows that are neighbours are a batch, which takes one call; one call for rows of different
lengths would compute the scores between rows too. Where there is a kernel for rows of any lengths, all that begin in
the pass take one call of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from meshwright.profiles.model_parts.rope import RopeScaling
from meshwright.profiles.model_shape import ModelSpec
from meshwright.runtime.model.context_parallel import Gathered, Parts
from meshwright.runtime.model.equal_rows import EqualRows, equal_rows
from meshwright.runtime.model.kv_cache import ContinuedRows
from meshwright.runtime.model.varlen_attention import RowBounds, VarlenKernel, attend_rows


@dataclass(frozen=True)
class Packing:
    """Rows that lie one behind the other in a sequence of S tokens; what is behind them pads it.

    It takes the way of megatron's own packed sequences, so that a layer that is computed again finds the rows of its
    micro-batch.
    """

    runs: tuple[EqualRows, ...]
    """The rows, or this rank's slices of them, in their order."""
    cos: Tensor
    """Of the tokens' angles, as `sin`: [S, 1, 1, D]."""
    sin: Tensor
    biases: tuple[Tensor | None, ...]
    """Of each run, what is added to scores so that the last query sees all keys and each before it one fewer; None
    where there are as many keys as queries, for plain causal attention."""
    qkv_format: Literal["sbhd"] = "sbhd"
    """What megatron asks before it would drop the batch dimension, which is kept."""
    parts: Parts | None = None
    """Where rows are cut over context-parallel ranks: what this rank has of them."""
    cache: ContinuedRows | None = None
    """Where rows continue what a cache has of them, and are kept there."""
    ends: Tensor | None = None
    """Where the rows end, if the model's head is wanted for their last tokens alone: [B] int64."""

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each run."""
        return tuple(run.num_rows * run.length for run in self.runs)

    @cached_property
    def bounds(self) -> RowBounds:
        """Of the rows, on the device of the angles."""
        lengths = [run.length for run in self.runs for _ in range(run.num_rows)]
        begins = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=self.cos.device)
        return RowBounds(begins, max(lengths))


Rotate = Callable[[Tensor, Tensor, Tensor], Tensor]
"""As `rotate`."""


class CoreAttention(nn.Module):
    """Causal grouped-query attention over packed rows; the heads are this tensor-parallel rank's."""

    def __init__(
        self,
        *,
        first_layer: int,
        layer_number: int,
        varlen: VarlenKernel | None = None,
        turned: Rotate | None = None,
        **_: Any,
    ) -> None:
        """`layer_number` counts from 1 through the whole model; `first_layer` layers are on earlier stages.

        `varlen` takes the rows that begin in a pass, and `turned` is `rotate` unless it is given. The arguments left
        out are megatron's for its own kinds of attention.
        """
        super().__init__()
        self.layer = layer_number - 1 - first_layer
        self._varlen, self._turned = varlen, turned or rotate

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Packing, **__: Any
    ) -> Tensor:
        """[S, 1, heads * D] from query [S, 1, heads, D], key and value [S, 1, kv_heads, D]."""
        packing = packed_seq_params
        query, key = (self._turned(heads, packing.cos, packing.sin) for heads in (query, key))
        if packing.parts is not None:
            return _attend_parts(query, key, value, packing, packing.parts)
        if packing.cache is not None:
            packing.cache.store(self.layer, key, value)
            if any(run.cached for run in packing.runs):
                return _attend(query, packing.cache.seen(self.layer), packing)
        if self._varlen:
            held = sum(packing.sizes)
            attended = attend_rows(query[:held], key[:held], value[:held], packing.bounds, self._varlen)
            return _padded([attended], query)
        alone = (_batches(heads, packing) for heads in (key, value))
        return _attend(query, zip(*alone, strict=True), packing)


def _attend_parts(query: Tensor, key: Tensor, value: Tensor, packing: Packing, parts: Parts) -> Tensor:
    """From this rank's slices of the rows to the keys of all ranks up to their ends."""
    held = parts.num_tokens
    with Gathered(torch.stack((key[:held], value[:held]), dim=1), parts).whole() as gathered:
        keys, values = gathered.permute(1, 2, 3, 0, 4)
        seen = ((keys[:, :, row:end], values[:, :, row:end]) for _, row, end in parts.slices())
        return _attend(query, seen, packing)


def _attend(query: Tensor, seen: Iterable[tuple[Tensor, Tensor]], packing: Packing) -> Tensor:
    """[S, 1, heads * D] from query [S, 1, heads, D] and of each run the keys and values [B, kv_heads, T, D] that the
    last queries of its rows see; zero for what pads S."""
    runs = zip(_batches(query, packing), seen, packing.biases, strict=True)
    return _padded([_packed(_attend_to_end(own, *keys_and_values, bias)) for own, keys_and_values, bias in runs], query)


def _padded(attended: list[Tensor], query: Tensor) -> Tensor:
    """[S, 1, heads * D] of parts [S of each, 1, heads, D], and zero behind them. A part that is all there is is not
    copied."""
    padding = torch.zeros_like(query[sum(map(len, attended)) :])
    parts = [*attended, padding] if len(padding) else attended
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(2)


def _attend_to_end(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    """[B, heads, S, D], where the last of S queries sees all of T keys and each before it one fewer."""
    if bias is None or query.is_cuda:
        grouped = query.shape[1] > keys.shape[1]
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=bias, is_causal=bias is None, enable_gqa=grouped
        )
    # The kernel that takes a mask would copy keys and values for each query head of a group, so the heads of a group
    # are laid end to end as if they were more queries.
    end_to_end = query.reshape(len(keys), keys.shape[1], -1, query.shape[-1])
    return F.scaled_dot_product_attention(end_to_end, keys, values, attn_mask=bias).reshape(query.shape)


def _batches(heads: Tensor, packing: Packing) -> Iterator[Tensor]:
    """Of each run the rows of [S, 1, heads, D], as a view [B, heads, T, D]."""
    parts = heads[: sum(packing.sizes)].permute(1, 2, 0, 3).split(packing.sizes, dim=2)
    for run, rows in zip(packing.runs, parts, strict=True):
        yield rows if run.num_rows == 1 else rows[0].unflatten(1, (run.num_rows, run.length)).transpose(0, 1)


def _packed(rows: Tensor) -> Tensor:
    """[S, 1, heads, D] of a batch [B, heads, T, D]."""
    return rows.permute(2, 0, 1, 3) if len(rows) == 1 else rows.transpose(1, 2).flatten(0, 1).unsqueeze(1)


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
        """Rows of these lengths, and `tail` tokens of no meaning behind them, [S] in all.

        Angles and biases have the device and the dtype of `like`, a tensor of any shape [...].
        """
        runs = cache.runs if cache else equal_rows((row, 0, length) for row, length in enumerate(lengths))
        rows = [slice(run.cached, run.num_keys) for run in runs for _ in range(run.num_rows)]
        cos, sin = (
            torch.cat([at[row] for row in (*rows, slice(tail))])
            for at in self.table(max(tail, *(run.num_keys for run in runs)), like)
        )
        ends = torch.tensor(lengths, device=like.device).cumsum(0) - 1 if ends_only else None
        return Packing(runs, cos, sin, self._biases(runs, like), cache=cache, ends=ends)

    def pack_parts(self, parts: Parts, like: Tensor, *, tail: int = 0) -> Packing:
        """This rank's parts of rows, [S] tokens with the tail, otherwise as `pack`."""
        positions = F.pad(parts.positions, (0, tail)).to(like.device)
        cos, sin = (at[positions] for at in self.table(int(positions.max()) + 1, like))
        slices = tuple(EqualRows(0, end - row - size, size) for size, row, end in parts.slices())
        return Packing(slices, cos, sin, self._biases(slices, like), parts=parts)

    def table(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [length, 1, 1, D] at positions 0 to length-1, of the device and dtype of `like`."""
        if self._first is None or self._first[0].shape[0] < length or self._first[0].dtype != like.dtype:
            with torch.inference_mode(False):  # kept for training too, wherever it is first asked for
                self._first = self._angles(torch.arange(length, device=like.device).unsqueeze(1), like.dtype)
        cos, sin = self._first
        return cos[:length], sin[:length]

    def _biases(self, runs: Sequence[EqualRows], like: Tensor) -> tuple[Tensor | None, ...]:
        sizes = [(run.length, run.num_keys) for run in runs]
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
