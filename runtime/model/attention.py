"""The core attention of every model: rotary embedding by per-token positions, then causal attention over packed rows.

It replaces Megatron's core attention module, whose input is this rank's heads of the whole sequence of packed rows.
Adjacent rows of equal lengths form a batch, which takes one SDPA call; one call for rows of different lengths would
compute scores between rows too. With torch's variable-length kernel, which runs on a GPU only, all rows of a pass
without cached tokens take one call: https://docs.pytorch.org/docs/2.12/nn.attention.varlen.html
`runtime.model.kernel_choice` chooses between the two.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from meshwright.profiles.model_parts.hf_config import (
    LinearScaling,
    LongScaling,
    QueryGrowth,
    RopeScaling,
    YarnScaling,
)
from meshwright.profiles.model_shape import CachedHeads, ModelSpec
from meshwright.runtime.device import host
from meshwright.runtime.model.context_parallel import Gathered, SequenceShard
from meshwright.runtime.model.kernel_choice import LARGEST_FLASH_HEAD
from meshwright.runtime.model.kv_cache import ContinuedRows, EqualRows, group_equal_rows
from meshwright.runtime.model.limited_attention import AttentionLimits, attend_limited, attention_limits
from meshwright.runtime.model.recurrent_states import StateRows, state_rows

_CAUSAL = (-1, 0)
"""The window with which torch's kernel is causal."""


class VarlenKernel(Protocol):
    """The used part of the signature of `torch.nn.attention.varlen.varlen_attn`."""

    def __call__(  # noqa: PLR0917 - torch's signature
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        window_size: tuple[int, int],
        enable_gqa: bool,
    ) -> Tensor:
        """The output [T, heads, D] for packed query [T, heads, D], key and value [T, kv_heads, D].

        `cu_seq_q` and `cu_seq_k` [N + 1] int32 are the cumulative lengths of rows; `max_q` and `max_k` the longest.
        """


@dataclass(frozen=True)
class RowBounds:
    """The offsets of packed rows."""

    offsets: Tensor
    """Offset of each row, and the end, [N + 1] int32."""
    max_length: int
    """Number of tokens of the longest row."""


def torch_varlen_kernel() -> VarlenKernel:
    """Torch's variable-length kernel. Up to version 2.11 it has no `enable_gqa` argument and always groups heads."""
    # Imported here because the import takes seconds, which processes on a CPU do not need.
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415

    kernel: Any = varlen_attn  # returns only the output by default
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        return kernel

    def without_enable_gqa(*args: Any, window_size: tuple[int, int], **_: Any) -> Tensor:
        output: Tensor = kernel(*args, window_size=window_size)
        return output

    return without_enable_gqa


def attend_rows(
    query: Tensor, key: Tensor, value: Tensor, rows: RowBounds, kernel: VarlenKernel, *, window: int = 0
) -> Tensor:
    """The output [T, 1, heads, D] for packed query [T, 1, heads, D], key and value [T, 1, kv_heads, D].

    With a `window`, a token attends to this many tokens up to itself.
    """
    seen = (window - 1, 0) if window else _CAUSAL
    offsets, longest, grouped = rows.offsets, rows.max_length, query.shape[2] > key.shape[2]
    query, key, value = (heads.squeeze(1).contiguous() for heads in (query, key, value))
    attended = kernel(query, key, value, offsets, offsets, longest, longest, window_size=seen, enable_gqa=grouped)
    return attended.unsqueeze(1)


@dataclass(frozen=True)
class Packing:
    """Rows packed into a sequence of S tokens; tokens after the last row are padding.

    It is passed in place of Megatron's own packed sequence parameters, so that a recomputed layer has the rows of its
    micro-batch.
    """

    runs: tuple[EqualRows, ...]
    """Runs of adjacent rows of equal lengths, in order; under context parallelism, of this rank's slices of rows."""
    cos: Tensor
    """Cosine of the tokens' rotary angles, [S, 1, 1, D]; `sin` likewise."""
    sin: Tensor
    local_angles: tuple[Tensor, Tensor] | None
    """Cosines and sines in layers with a sliding window, [S, 1, 1, D] each; None if they are those of all layers."""
    query_scales: Tensor | None
    """Factors of the queries in layers without rotary embedding, [S, 1, 1, 1]; None if they have none."""
    masks: tuple[Tensor | None, ...]
    """The causal mask added to the scores of each run, aligned to the lower right: the last query sees all keys and
    each query before it one fewer. None for plain causal attention, with as many keys as queries."""
    qkv_format: Literal["sbhd"] = "sbhd"
    """Read by Megatron, which keeps the batch dimension for this value."""
    shard: SequenceShard | None = None
    """This rank's shard of the rows under context parallelism."""
    cache: ContinuedRows | None = None
    """The cache that the rows continue and whose keys and values they extend."""
    ends: Tensor | None = None
    """Positions of the last tokens of rows, [B] int64, if the head is needed for these only."""
    state_rows: StateRows | None = None
    """The rows for layers with a state, if the model has any."""

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of tokens of each run."""
        return tuple(run.num_rows * run.length for run in self.runs)

    @cached_property
    def bounds(self) -> RowBounds:
        """The bounds of the rows, on the device of the angles."""
        lengths = [run.length for run in self.runs for _ in range(run.num_rows)]
        offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=self.cos.device)
        return RowBounds(offsets, max(lengths))


Rotate = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function with the signature of `rotate`."""


class CoreAttention(nn.Module):
    """Causal grouped-query attention over packed rows; the heads are this tensor-parallel rank's."""

    def __init__(
        self,
        *,
        first_layer: int,
        layer_number: int,
        varlen: VarlenKernel | None = None,
        rotate_kernel: Rotate | None = None,
        spec: ModelSpec,
        config: TransformerConfig | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        """`layer_number` counts from 1 through the whole model; `first_layer` layers are on earlier stages.

        `varlen` computes passes without cached tokens, and `rotate_kernel` replaces `rotate`. `config` and groups are
        needed for sinks. The ignored arguments are Megatron's for its own kinds of attention.
        """
        super().__init__()
        number = layer_number - 1
        self.layer = spec.attention_layers_between(first_layer, number)
        self._limits = attention_limits(spec, number)
        no_varlen = self._limits.cap or self._limits.chunked or spec.attention_sinks
        self._varlen, self._rotate = None if no_varlen else varlen, rotate_kernel or rotate
        self.tp_group = pg_collection.tp if pg_collection else None
        self.softmax_offset = _sinks(spec, config) if spec.attention_sinks and config else None
        """The sinks of this rank's heads, [heads / tp], under Megatron's name for them."""
        self._score_scale, self._is_rotated = score_scale(spec), number not in spec.unrotated_layers
        self._norm_epsilon = spec.norm_epsilon if spec.rotated_norm else None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Packing, **__: Any
    ) -> Tensor:
        """The output [S, 1, heads * D] for query [S, 1, heads, D], key and value [S, 1, kv_heads, D]."""
        packing = packed_seq_params
        if self._is_rotated:
            local = packing.local_angles if self.limits.window else None
            cos, sin = local or (packing.cos, packing.sin)
            query, key = (self._rotate(heads, cos, sin) for heads in (query, key))
            if self._norm_epsilon is not None:
                query, key = (normalise_heads(heads, self._norm_epsilon) for heads in (query, key))
        elif packing.query_scales is not None:
            query = query * packing.query_scales
        if self._score_scale != 1.0:
            query = query * self._score_scale
        if packing.shard is not None:
            return _attend_parts(query, key, value, packing, parts=packing.shard, limits=self.limits)
        if packing.cache is not None:
            packing.cache.store(self.layer, key, value)
            if any(run.cached for run in packing.runs):
                return _attend(query, packing.cache.keys_and_values(self.layer), packing, self.limits)
        if self._varlen and query.shape[-1] <= LARGEST_FLASH_HEAD:
            num_tokens = sum(packing.sizes)
            rows, key, value = (heads[:num_tokens] for heads in (query, key, value))
            attended = attend_rows(rows, key, value, packing.bounds, self._varlen, window=self._limits.window)
            return _padded([attended], query)
        keys_and_values = (_batches(heads, packing) for heads in (key, value))
        return _attend(query, zip(*keys_and_values, strict=True), packing, self.limits)

    @property
    def limits(self) -> AttentionLimits:
        """The limits of the layer, with the sinks of this rank's heads."""
        return replace(self._limits, sinks=self.softmax_offset)

    def sharded_state_dict(self, *places: Any, **options: Any) -> dict[str, Any]:
        """The state for a checkpoint: the sinks, if there are any."""
        return shards_of_heads(self, self.tp_group, *places, **options)


def shards_of_heads(
    module: nn.Module,
    tp_group: dist.ProcessGroup | None,
    prefix: str = "",
    sharded_offsets: tuple[Any, ...] = (),
    metadata: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The state for a checkpoint of a module whose parameters [heads / tp * size] are sharded along their only axis."""
    state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
        module.state_dict(prefix="", keep_vars=True),
        prefix,
        {name: 0 for name, _ in module.named_parameters()},
        sharded_offsets,
        tp_group=tp_group,
        dp_cp_group=(metadata or {}).get("dp_cp_group"),
    )
    return state


def _sinks(spec: ModelSpec, config: TransformerConfig) -> nn.Parameter:
    sinks = nn.Parameter(
        torch.zeros(
            spec.num_heads // config.tensor_model_parallel_size, device=host.device(), dtype=config.params_dtype
        )
    )
    set_tensor_model_parallel_attributes(sinks, True, 0, 1)
    return sinks


def _attend_parts(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, *, parts: SequenceShard, limits: AttentionLimits
) -> Tensor:
    """Attention of this rank's slices of the rows to the gathered keys of all ranks, up to the end of each slice."""
    num_tokens = parts.num_tokens
    with Gathered(torch.stack((key[:num_tokens], value[:num_tokens]), dim=1), parts).whole() as gathered:
        keys, values = gathered.permute(1, 2, 3, 0, 4)
        seen = ((keys[:, :, row:end], values[:, :, row:end]) for _, row, end in parts.slices())
        return _attend(query, seen, packing, limits)


def _attend(query: Tensor, seen: Iterable[tuple[Tensor, Tensor]], packing: Packing, limits: AttentionLimits) -> Tensor:
    """Attention [S, 1, heads * D] of query [S, 1, heads, D], zero for padding.

    `seen` are the keys and values [B, kv_heads, T, D] of each run, all of which the last query of each row sees within
    the limits.
    """
    runs = zip(_batches(query, packing), seen, packing.masks, strict=True)
    return _padded(
        [
            _packed(
                attend_limited(queries, keys, values, limits)
                if limits.apply_to(keys.shape[2])
                else _attend_to_end(queries, keys, values, bias)
            )
            for queries, (keys, values), bias in runs
        ],
        query,
    )


def _padded(attended: list[Tensor], query: Tensor) -> Tensor:
    """The outputs [S_run, 1, heads, D] of runs joined and padded with zeros to [S, 1, heads * D]. A single run without
    padding is not copied."""
    padding = torch.zeros_like(query[sum(map(len, attended)) :])
    parts = [*attended, padding] if len(padding) else attended
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(2)


def _attend_to_end(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    """Attention [B, heads, S, D] in which the last of S queries sees all T keys and each query before it one fewer."""
    if bias is None or query.is_cuda:
        grouped = query.shape[1] > keys.shape[1]
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=bias, is_causal=bias is None, enable_gqa=grouped
        )
    # The kernel with a mask would copy keys and values for each query head of a group, so the query heads of a group
    # are concatenated as if they were more queries.
    grouped_query = query.reshape(len(keys), keys.shape[1], -1, query.shape[-1])
    return F.scaled_dot_product_attention(grouped_query, keys, values, attn_mask=bias).reshape(query.shape)


def _batches(heads: Tensor, packing: Packing) -> Iterator[Tensor]:
    """Yields the rows of each run in [S, 1, heads, D], as a view [B, heads, T, D]."""
    run_views = heads[: sum(packing.sizes)].permute(1, 2, 0, 3).split(packing.sizes, dim=2)
    for run, rows in zip(packing.runs, run_views, strict=True):
        yield rows if run.num_rows == 1 else rows[0].unflatten(1, (run.num_rows, run.length)).transpose(0, 1)


def _packed(rows: Tensor) -> Tensor:
    """A batch [B, heads, T, D] as packed rows [S, 1, heads, D]."""
    return rows.permute(2, 0, 1, 3) if len(rows) == 1 else rows.transpose(1, 2).flatten(0, 1).unsqueeze(1)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates `heads` [S, B, heads, D] by the angles of their tokens; cos and sin [S, 1, 1, D]."""
    low, high = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-high, low), dim=-1) * sin


def normalise_heads(heads: Tensor, epsilon: float) -> Tensor:
    """The root-mean-square norm, without a weight, of `heads` [..., D], in the same shape and dtype."""
    return F.rms_norm(heads.float(), heads.shape[-1:], eps=epsilon).to(heads.dtype)


def growth_of_queries(growth: QueryGrowth, positions: Tensor) -> Tensor:
    """The factors of the queries at positions [...], in fp32."""
    return torch.log1p(((positions.float() + 1) / growth.floor_scale).floor()) * growth.scale + 1


class Rotary:
    """The rotary position embedding of one model, whose angles all its layers share, or all without and all with a
    sliding window."""

    def __init__(self, spec: ModelSpec, device: torch.device, heads: CachedHeads | None = None) -> None:
        """With `heads` it is that of passes over the cache."""
        size = heads.size if heads else spec.head_dim
        self._linear, self._growth = spec.linear, spec.query_growth
        self._frequencies = {False: frequencies(spec, head_size=size).to(device)}
        if has_local_angles(spec):
            self._frequencies[True] = frequencies(spec, is_local=True, head_size=size).to(device)
        self._scales = angle_scales(spec, size).to(device)
        self._heads_per_group = heads.queries_per_key if heads else spec.num_heads // spec.num_kv_heads
        self._tables: dict[bool, tuple[Tensor, Tensor]] = {}

    def pack(
        self,
        lengths: Sequence[int],
        like: Tensor,
        *,
        tail: int = 0,
        cache: ContinuedRows | None = None,
        ends_only: bool = False,
    ) -> Packing:
        """The packing of rows of these lengths followed by `tail` tokens of padding, [S] in all.

        Angles and masks have the device and the dtype of `like`, a tensor of any shape [...].
        """
        runs = cache.runs if cache else group_equal_rows((row, 0, length) for row, length in enumerate(lengths))
        rows = [slice(run.cached, run.num_keys) for run in runs for _ in range(run.num_rows)]
        length = max(tail, *(run.num_keys for run in runs))
        (cos, sin), local = self._select(length, like, lambda t: torch.cat([t[row] for row in (*rows, slice(tail))]))
        ends = torch.tensor(lengths, device=like.device).cumsum(0) - 1 if ends_only else None
        states = None
        if self._linear:
            cached = [run.cached for run in runs for _ in range(run.num_rows)] if cache else []
            states = state_rows(self._linear, lengths, like.device, cache.rows if cache else (), cached)
        scales = self._query_scales([torch.arange(row.start, row.stop) for row in (*rows, slice(0, tail))], like)
        biases = self._biases(runs, like)
        return Packing(runs, cos, sin, local, scales, biases, cache=cache, ends=ends, state_rows=states)

    def pack_shard(self, parts: SequenceShard, like: Tensor, *, tail: int = 0) -> Packing:
        """The packing of this rank's shard of rows under context parallelism, [S] tokens with the tail; see `pack`."""
        positions = F.pad(parts.positions, (0, tail)).to(like.device)
        (cos, sin), local = self._select(int(positions.max()) + 1, like, lambda table: table[positions])
        slices = tuple(EqualRows(0, end - row - size, size) for size, row, end in parts.slices())
        scales = self._query_scales([positions], like)
        return Packing(slices, cos, sin, local, scales, self._biases(slices, like), shard=parts)

    def _query_scales(self, positions: Sequence[Tensor], like: Tensor) -> Tensor | None:
        """The factors of queries [S, 1, 1, 1] at the concatenated positions, in the dtype of `like`; None without."""
        if self._growth is None:
            return None
        scales = growth_of_queries(self._growth, torch.cat([part.to(like.device) for part in positions]))
        return scales.to(like.dtype).view(-1, 1, 1, 1)

    def _select(
        self, length: int, like: Tensor, select: Callable[[Tensor], Tensor]
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None]:
        """The selected rows of the tables, and of those of layers with a window if they have tables of their own."""
        angles = []
        for is_local in self._frequencies:
            cos, sin = self.table(length, like, is_local=is_local)
            angles.append((select(cos), select(sin)))
        return angles[0], angles[1] if len(angles) > 1 else None

    def table(self, length: int, like: Tensor, *, is_local: bool = False) -> tuple[Tensor, Tensor]:
        """The cosines and sines [length, 1, 1, D] of positions 0 to length-1, on the device and in the dtype of
        `like`; with `is_local` those of layers with a sliding window, if they have their own."""
        is_local = is_local and is_local in self._frequencies
        table = self._tables.get(is_local)
        if table is None or table[0].shape[0] < length or table[0].dtype != like.dtype:
            with torch.inference_mode(False):  # the table is reused in training, wherever it is first computed
                positions = torch.arange(length, device=like.device).unsqueeze(1)
                table = self._tables[is_local] = self._angles(positions, is_local, like.dtype)
        cos, sin = table
        return cos[:length], sin[:length]

    def _biases(self, runs: Sequence[EqualRows], like: Tensor) -> tuple[Tensor | None, ...]:
        sizes = [(run.length, run.num_keys) for run in runs]
        bias_of = {size: None if size[0] == size[1] else self._bias(*size, like) for size in set(sizes)}
        return tuple(bias_of[size] for size in sizes)

    def _bias(self, num_queries: int, num_keys: int, like: Tensor) -> Tensor:
        """The lower-right causal mask; on a CPU repeated for the query heads of a group, as `_attend_to_end` needs."""
        if like.is_cuda:
            return causal_lower_right(num_queries, num_keys)
        # On a CPU torch would materialise torch's own lower-right mask in every layer, with a warning each time.
        later = torch.full((num_queries, num_keys), -torch.inf, dtype=like.dtype).triu(num_keys - num_queries + 1)
        return later.repeat(self._heads_per_group, 1)

    def _angles(self, positions: Tensor, is_local: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        half = positions.float().unsqueeze(-1) * self._frequencies[is_local]
        angles = torch.cat((half, half), dim=-1).unsqueeze(2)
        scales = torch.ones_like(self._scales) if is_local else self._scales
        cos, sin = (values * scales.repeat(2) for values in (angles.cos(), angles.sin()))
        return cos.to(dtype), sin.to(dtype)


def score_scale(spec: ModelSpec) -> float:
    """The factor of attention scores besides 1 / sqrt(head_dim)."""
    return 1.0 if spec.attention_scale is None else spec.attention_scale * math.sqrt(spec.head_dim)


def has_local_angles(spec: ModelSpec) -> bool:
    """True if layers with a sliding window have rotary angles of their own."""
    return spec.window is not None and spec.local_rope_theta > 0


def frequencies(spec: ModelSpec, *, is_local: bool = False, head_size: int = 0) -> Tensor:
    """Radians per position, [head_dim / 2], as Hugging Face computes them in fp32; 0 for pairs that are not rotated.

    With a `head_size` they are those of heads of this size, in which the same elements are rotated. With `is_local`
    they are those of layers with a sliding window that have their own, which are never scaled.
    """
    rotated = spec.num_rotated
    steps = torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated
    theta = spec.local_rope_theta if is_local else spec.rope_theta
    plain = F.pad(1.0 / theta**steps, (0, ((head_size or spec.head_dim) - rotated) // 2))
    if spec.rope_scaling is None or is_local:
        return plain
    match spec.rope_scaling:
        case LinearScaling(factor=factor):
            return plain / factor
        case YarnScaling() as scaling:
            return _interpolate(plain, scaling, theta, rotated)
        case LongScaling(short_factors=short, long_factors=long, is_long=is_long):
            factors = torch.tensor(long if is_long else short)
            return F.pad(1.0 / (factors * theta**steps), (0, len(plain) - len(factors)))
        case RopeScaling() as scaling:
            return _scale_frequencies(plain, scaling)


def angle_scales(spec: ModelSpec, head_size: int = 0) -> Tensor:
    """The factors of the cosines and sines of scaled rotary angles, [head_dim / 2], or [head_size / 2]: 1 for pairs
    that are not rotated."""
    scales = torch.ones((head_size or spec.head_dim) // 2)
    if isinstance(spec.rope_scaling, YarnScaling | LongScaling):
        scales[: spec.num_rotated // 2] = spec.rope_scaling.attention_factor
    return scales


def _interpolate(plain: Tensor, scaling: YarnScaling, theta: float, rotated: int) -> Tensor:
    """YaRN's scaling of the frequencies [head_dim / 2] of `rotated` elements: a ramp from unchanged ones to divided
    ones, between the pairs that turn `beta_fast` and `beta_slow` times in the original length."""

    def pair(turns: float) -> float:
        return rotated * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncates:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotated - 1)
    steps = torch.arange(len(plain), dtype=torch.float32)
    divided = ((steps - first) / ((last - first) or 0.001)).clamp(0, 1)
    return plain / scaling.factor * divided + plain * (1 - divided)


def _scale_frequencies(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's scaling: frequencies of long wavelengths are divided by `factor`, those of short ones unchanged, and
    those between interpolated.

    Llama 3 report, arXiv:2407.21783, section 3.4.2, and
    https://github.com/huggingface/transformers/blob/main/src/transformers/modeling_rope_utils.py
    """
    wavelengths = 2 * math.pi / plain
    periods = scaling.original_max_positions / wavelengths
    smooth = (periods - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * plain / scaling.factor + smooth * plain
