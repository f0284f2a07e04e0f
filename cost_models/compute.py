"""Seconds that one tensor-parallel shard computes, without any collective: the arithmetic of a decoder layer.

Each kernel takes sqrt(c^2 + b^2) + launch, with c = FLOPs / (peak x efficiency) and b = bytes / (bandwidth x
efficiency). That is the roofline max(c, b) away from its ridge (Williams, Waterman and Patterson, CACM 52(4), 2009) and
at most 41 % above it on the ridge, where published GEMM tables show neither resource saturated.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

from meshwright.cost_models.cost import Source
from meshwright.profiles.cluster import Device
from meshwright.profiles.efficiency import Efficiency
from meshwright.profiles.errors import BadInput
from meshwright.profiles.model import ModelSpec
from meshwright.profiles.table import Body

ELEMENT_BYTES = {"fp32": 4, "bf16": 2}
"""Bytes of a weight or an activation in each precision."""

_SCORING_BYTES = 11 * 4
"""Traffic per logit when tokens are scored in fp32: cast, maximum, difference, exponential, product and two sums."""

_SAMPLING_BYTES = 7 * 8
"""Traffic per logit when a token is sampled in fp64: cast, temperature, log-softmax, exponential and running sum."""

_GEMM_BACKWARD = 2.0
"""Gradients of the input and of the weight, one GEMM each (Narayanan et al., arXiv:2104.04473, section 4)."""

_ATTENTION_BACKWARD = 2.5
"""Five matrix products against two, scores computed again (Dao, FlashAttention-2, arXiv:2307.08691, section 3.1)."""

_ELEMENTWISE_BACKWARD = 2.0
"""Backward reads the saved input and the gradient and writes a gradient."""


class Time(NamedTuple):
    """Seconds of one body: `layer` for each layer, `ends` for embedding and head together."""

    layer: float
    ends: float
    source: Source


class Shard(Protocol):
    """Times of one shard's bodies, as `profiles.harness` defines them."""

    def time(self, body: Body, rows: float, tokens: float, context: float = 0) -> Time:
        """Seconds at `rows` rows of `tokens` new tokens with `context` cached tokens each."""
        ...


def element_bytes(precision: str) -> int:
    """Bytes per element; raises BadInput for a precision other than fp32 and bf16."""
    if precision not in ELEMENT_BYTES:
        raise BadInput(f"precision={precision!r} is not known; use {' or '.join(ELEMENT_BYTES)}.")
    return ELEMENT_BYTES[precision]


class AnalyticShard:
    """Times by equation. `model` is already a shard (`ModelSpec.shard`); `whole_share` is the part of the hidden state
    that norms and residuals of this rank touch: 1, or 1/tp under sequence parallelism."""

    def __init__(
        self, model: ModelSpec, device: Device, precision: str, efficiency: Efficiency, whole_share: float
    ) -> None:
        size = element_bytes(precision)
        if precision not in device.flops_per_second:
            raise BadInput(f"device {device.name} has no peak for {precision}; give flops_per_second.{precision}.")
        peak, bandwidth = device.flops_per_second[precision], device.memory_bytes_per_second
        self._model, self._size, self._launch, self._efficiency = model, size, device.launch_seconds, efficiency
        self._gemm_flop = 1 / (peak * efficiency.gemm_flops)
        self._gemm_byte = size / (bandwidth * efficiency.gemm_bytes)
        self._attention_flop = 1 / (peak * efficiency.attention_flops)
        self._attention_byte = size / (bandwidth * efficiency.attention_bytes)
        self._elementwise_byte = 1 / (bandwidth * efficiency.elementwise_bytes)
        hidden, ffn = model.hidden_size, model.ffn_size
        self._gemms = (
            (hidden, model.attention_size + 2 * model.kv_size),
            (model.attention_size, hidden),
            (hidden, 2 * ffn),
            (ffn, hidden),
        )
        sharded = 2 * (model.attention_size + model.kv_size) + 3 * ffn
        self._layer_elements = 10 * hidden * whole_share + sharded
        self._known: dict[tuple[Body, float, float, float], Time] = {}

    def time(self, body: Body, rows: float, tokens: float, context: float = 0) -> Time:
        key = (body, rows, tokens, context)
        if key not in self._known:
            self._known[key] = self._optimizer() if body is Body.OPTIMIZER else self._time(*key)
        return self._known[key]

    def attention(self, rows: float, tokens: float, context: float = 0) -> float:
        """Forward seconds of one layer's core attention: what selective recomputation repeats.

        Causal: each new token meets the cache and half of its fellows, 2 FLOPs for each of the two products.
        """
        model, seen = self._model, context + (tokens + 1) / 2
        flops = 4 * rows * tokens * seen * model.attention_size
        elements = rows * (2 * (context + tokens) * model.kv_size + 2 * tokens * model.attention_size)
        saturation = 1 + self._efficiency.attention_half_tokens / (context + tokens)
        return math.hypot(flops * self._attention_flop * saturation, elements * self._attention_byte)

    def _time(self, body: Body, rows: float, tokens: float, context: float) -> Time:
        count = rows * tokens
        gemm = sum(self._gemm(count, inner, outer) for inner, outer in self._gemms)
        attention = self.attention(rows, tokens, context)
        elementwise = self._size * count * self._layer_elements * self._elementwise_byte
        launches = self._efficiency.kernels_per_layer * self._launch
        samples = body in (Body.PREFILL, Body.DECODE)
        head_gemm, ends = self._ends(count, rows if samples else count, _SAMPLING_BYTES if samples else _SCORING_BYTES)
        end_launches = self._efficiency.kernels_at_ends * self._launch
        if body is Body.TRAIN:
            gemm, head_gemm = gemm * (1 + _GEMM_BACKWARD), head_gemm * (1 + _GEMM_BACKWARD)
            attention *= 1 + _ATTENTION_BACKWARD
            elementwise, ends = elementwise * (1 + _ELEMENTWISE_BACKWARD), ends * (1 + _ELEMENTWISE_BACKWARD)
            launches, end_launches = launches * (1 + _GEMM_BACKWARD), end_launches * (1 + _GEMM_BACKWARD)
        return Time(gemm + attention + elementwise + launches, head_gemm + ends + end_launches, Source.ANALYTIC)

    def _gemm(self, count: float, inner: int, outer: int) -> float:
        """Seconds of [count, inner] x [inner, outer]."""
        flops = 2 * count * inner * outer
        elements = inner * outer + count * (inner + outer)
        return math.hypot(flops * self._gemm_flop, elements * self._gemm_byte)

    def _ends(self, count: float, head_count: float, softmax_bytes: int) -> tuple[float, float]:
        """Seconds of the head's GEMM, and of the embedding rows and the softmax over the vocabulary."""
        model = self._model
        outputs = 1 if model.scalar_head else model.padded_vocab_size
        embedding_bytes = 2 * count * model.hidden_size * self._size
        elementwise = (head_count * outputs * softmax_bytes + embedding_bytes) * self._elementwise_byte
        return self._gemm(head_count, model.hidden_size, outputs), elementwise

    def _optimizer(self) -> Time:
        """Adam in fp32: reads gradient, weight and moments, writes weight and moments, casts, zeroes the gradient."""
        per_param = (4 * 4 + 3 * 4 + self._size + 4) * self._elementwise_byte
        model = self._model
        ends = model.num_params - model.num_layers * model.layer_params
        return Time(model.layer_params * per_param, ends * per_param, Source.ANALYTIC)
