"""Seconds that one tensor-parallel shard computes, without any collective: the arithmetic of a decoder layer.

A layer's kernels run one after the other. On a device that overlaps launches the host issues kernels ahead of it, and
the slower of the two decides; on one that does not, each kernel waits for its launch.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from meshwright.cost_models.cost import Source
from meshwright.cost_models.kernels import Heads, Kernels
from meshwright.cost_models.precision import precision_named
from meshwright.profiles.cluster import Device
from meshwright.profiles.efficiency import Efficiency
from meshwright.profiles.experts import Experts
from meshwright.profiles.frameworks import Framework, framework_named
from meshwright.profiles.model import ModelSpec
from meshwright.profiles.table import Body

_BACKWARD_LAUNCHES = 2
"""Kernels of a backward pass for each of the forward: gradients of the input and of the weight."""

_ATTENTION_BACKWARD = 2.5
"""Five matrix products against two, scores computed again (Dao, FlashAttention-2, arXiv:2307.08691, section 3.1)."""

_ELEMENTWISE_BACKWARD = 2.0
"""Backward reads the saved input and the gradient and writes a gradient."""

_SCORE_BYTES, _SCORE_BACKWARD_BYTES = 13, 19
"""Traffic per score when scores are stored in 16 bits: two products, softmax, and dropout with a one-byte mask, each
reading and writing (Korthikanti et al., arXiv:2205.05198, section 4.1, lists what is stored)."""

_LAYER_KERNELS_STARTED = 5
"""Kernels of a layer whose law counts their start: four matrix products and attention."""

_ROUTED_COPIES = 4
"""Reads and writes of a hidden state that goes to an expert and comes back."""


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


class AnalyticShard:
    """Times by equation. `model` is already a shard (`ModelSpec.shard`); `whole_share` is the part of the hidden state
    that norms and residuals of this rank touch: 1, or 1/tp under sequence parallelism. `kernels` replace the laws, and
    `head_kernels` those of the head where it computes in another format."""

    def __init__(
        self,
        model: ModelSpec,
        device: Device,
        precision: str,
        efficiency: Efficiency,
        whole_share: float,
        *,
        framework: Framework | None = None,
        kernels: Kernels | None = None,
        head_kernels: Kernels | None = None,
    ) -> None:
        numbers = precision_named(precision, device)
        self._model, self._size, self._efficiency = model, numbers.size, efficiency
        self._framework, self._cache_bytes = framework or framework_named("runtime"), numbers.cache_bytes
        launch = self._framework.launch_seconds
        self._launch = device.launch_seconds if launch is None else launch
        flops = device.flops_per_second[precision] * efficiency.sustained
        self._kernels = kernels or Kernels(
            device, efficiency, flops_per_second=flops, weight_bytes=numbers.weight_bytes, size=numbers.size
        )
        self._head_kernels = (
            head_kernels
            or kernels
            or Kernels(
                device,
                efficiency,
                flops_per_second=device.flops_per_second[numbers.head] * efficiency.sustained,
                weight_bytes=numbers.size,
                size=numbers.size,
            )
        )
        self._heads, self._cached_heads = _heads(model)
        hidden = model.hidden_size
        self._dense_mlp = (hidden, model.up_size), (model.ffn_size, hidden)
        self._gemms = model.attention_products + (() if model.experts else self._dense_mlp)
        mlp_elements = (2 + model.gated_mlp) * model.active_ffn_size
        if model.experts:
            mlp_elements += _ROUTED_COPIES * model.experts.experts_per_token * hidden
        self._layer_elements = 10 * hidden * whole_share + model.attention_elements + mlp_elements
        self._known: dict[tuple[Body, float, float, float], Time] = {}
        self._known_layers: dict[tuple[float, bool], tuple[float, float]] = {}
        self._known_heads: dict[tuple[float, float, bool, bool], float] = {}

    def time(self, body: Body, rows: float, tokens: float, context: float = 0) -> Time:
        key = (body, rows, tokens, context)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._optimizer() if body is Body.OPTIMIZER else self._time(*key)
        return known

    def attention(self, rows: float, tokens: float, context: float = 0) -> float:
        """Forward seconds of one layer's core attention: what selective recomputation repeats."""
        if self._framework.flash_attention:
            heads = self._cached_heads if tokens == 1 and context else self._heads
            return self._kernels.attention(rows, tokens, context, heads, cache_bytes=self._cache_bytes)
        return self._stored_attention(rows, tokens)[0]

    def _time(self, body: Body, rows: float, tokens: float, context: float) -> Time:
        trains, samples = body is Body.TRAIN, body in (Body.PREFILL, Body.DECODE)
        count = rows * tokens
        products, elementwise = self._per_layer(count, trains)
        at_head = count, rows if samples else count, trains, samples
        head = self._known_heads.get(at_head)
        if head is None:
            head = self._known_heads[at_head] = self._head(*at_head)
        layer = products + self._attention(rows, tokens, context, trains)
        passes = 1 + (_BACKWARD_LAUNCHES if trains else 0)
        layer += elementwise * (1 + (_ELEMENTWISE_BACKWARD if trains else 0))
        efficiency = self._efficiency
        per_layer = self._framework.kernels_per_layer or efficiency.kernels_per_layer
        return Time(
            self._with_launches(layer, passes * per_layer, passes * _LAYER_KERNELS_STARTED),
            self._with_launches(head, passes * efficiency.kernels_at_ends, passes),
            Source.ANALYTIC,
        )

    def _per_layer(self, count: float, trains: bool) -> tuple[float, float]:
        """Device seconds of what depends on the number of tokens alone: a layer's products, and its element-wise work
        forward."""
        known = self._known_layers.get((count, trains))
        if known is None:
            kernels, gemm = self._kernels, self._kernels.gemm
            if trains:
                products = sum([self._gemm(count, inner, outer, trains, kernels) for inner, outer in self._gemms])
            else:
                products = sum([gemm(count, inner, outer) for inner, outer in self._gemms])
            if self._model.experts:
                products += self._mixed_mlp(count, trains, self._model.experts)
            known = products, kernels.elementwise(self._size * count * self._layer_elements)
            self._known_layers[count, trains] = known
        return known

    def _mixed_mlp(self, count: float, trains: bool, experts: Experts) -> float:
        """Seconds of the products of a layer's MLP, the mean of layers with experts and layers without."""
        gemm, kernels, dense_share = self._gemm, self._kernels, self._model.num_dense_layers / self._model.num_layers
        dense = sum([gemm(count, inner, outer, trains, kernels) for inner, outer in self._dense_mlp])
        router = gemm(count, self._model.hidden_size, experts.num_experts, trains, kernels)
        return dense_share * dense + (1 - dense_share) * (router + self._experts(count, experts, trains))

    def _experts(self, count: float, experts: Experts, trains: bool) -> float:
        """Seconds of the experts that `count` tokens reach, and of the shared ones.

        A grouped product reads each of them once and gives it an even part of the tokens: it is one product of that
        part with the columns of all of them side by side (Gale et al., MegaBlocks, arXiv:2211.15841).
        """
        gemm, kernels, hidden = self._gemm, self._kernels, self._model.hidden_size
        touched = experts.touched(count)
        part = count * experts.experts_per_token / touched
        seconds = gemm(part, hidden, 2 * touched * experts.ffn_size, trains, kernels)
        seconds += gemm(part, experts.ffn_size, touched * hidden, trains, kernels)
        shared = experts.shared_ffn_size
        if shared:
            seconds += gemm(count, hidden, 2 * shared, trains, kernels) + gemm(count, shared, hidden, trains, kernels)
        return seconds

    def _with_launches(self, device_seconds: float, num_kernels: float, num_started: float) -> float:
        """Seconds of kernels that take `device_seconds` together, the start of `num_started` of them included."""
        if not self._efficiency.overlaps_launch:
            return device_seconds + num_kernels * self._launch
        start, framework = self._efficiency.kernel_seconds, self._framework
        if framework.cuda_graphs:
            return max(0.0, device_seconds + (num_kernels * framework.start_share - num_started) * start)
        return max(device_seconds + (num_kernels - num_started) * start, num_kernels * self._launch)

    @staticmethod
    def _gemm(count: float, inner: float, outer: float, trains: bool, kernels: Kernels) -> float:
        """Seconds of [count, inner] x [inner, outer]; training adds the gradients of the input and of the weight
        (Narayanan et al., arXiv:2104.04473, section 4)."""
        gemm = kernels.gemm
        forward = gemm(count, inner, outer)
        return forward + gemm(count, outer, inner) + gemm(inner, count, outer) if trains else forward

    def _attention(self, rows: float, tokens: float, context: float, trains: bool) -> float:
        if not self._framework.flash_attention:
            forward, backward = self._stored_attention(rows, tokens)
            return forward + (backward if trains else 0)
        return self.attention(rows, tokens, context) * (1 + (_ATTENTION_BACKWARD if trains else 0))

    def _stored_attention(self, rows: float, tokens: float) -> tuple[float, float]:
        """Forward and backward seconds when all scores are computed, stored, and read again."""
        batch, heads = rows * self._heads.queries, self._heads
        scores = batch * tokens * tokens
        product = self._kernels.gemm(batch * tokens, heads.size, tokens)
        forward = 2 * product + self._kernels.elementwise(_SCORE_BYTES * scores)
        return forward, 4 * product + self._kernels.elementwise(_SCORE_BACKWARD_BYTES * scores)

    def _head(self, count: float, head_count: float, trains: bool, samples: bool) -> float:
        """Seconds of the head's GEMM, the embedding rows and the softmax over the vocabulary."""
        model = self._model
        outputs = 1 if model.scalar_head else model.padded_vocab_size
        framework = self._framework
        per_logit: float = framework.sampling_bytes if samples else framework.loss_bytes
        per_token: float = 2 * model.hidden_size * self._size
        if trains:
            per_logit += framework.loss_backward_bytes
            per_token *= 1 + _ELEMENTWISE_BACKWARD
        elementwise = self._kernels.elementwise(head_count * outputs * per_logit + count * per_token)
        return self._gemm(head_count, model.hidden_size, outputs, trains, self._head_kernels) + elementwise

    def _optimizer(self) -> Time:
        """Adam in fp32: reads gradient, weight and moments, writes weight and moments, casts, zeroes the gradient."""
        model = self._model
        per_param = self._kernels.elementwise(4 * 4 + 3 * 4 + self._size + 4)
        ends = model.num_params - model.num_layers * model.layer_params
        return Time(model.layer_params * per_param, ends * per_param, Source.ANALYTIC)


def _heads(model: ModelSpec) -> tuple[Heads, Heads]:
    """Heads of new tokens among themselves, and over a cache.

    Latent attention has heads of two sizes, whose mean gives the FLOPs of both products, and reads one cached vector
    for all of them (DeepSeek-V2, arXiv:2405.04434, section 2.1.2).
    """
    plain = Heads(model.num_heads, model.num_kv_heads, model.head_dim)
    if model.latent is None:
        return plain, plain
    mean_size = (model.head_dim + model.latent.value_dim) / 2
    return Heads(model.num_heads, model.num_kv_heads, mean_size), Heads(model.num_heads, 1, model.cached_elements / 2)
