"""Seconds that one tensor-parallel shard computes, without any collective: the arithmetic of a decoder layer.

A layer's kernels run one after the other. On a device that overlaps launches the host issues kernels ahead of it, and
the slower of the two decides; on one that does not, each kernel waits for its launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

from meshwright.cost_models.cost import Source, least_trusted
from meshwright.cost_models.kernels import Heads, Kernels
from meshwright.cost_models.low_rank import LowRank
from meshwright.cost_models.mixture import Mixture
from meshwright.cost_models.precision import QuantisedLinears, precision_named
from meshwright.profiles.cluster import Device
from meshwright.profiles.efficiency import Efficiency
from meshwright.profiles.experts import Experts
from meshwright.profiles.frameworks import Framework, own_framework
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.table import Body

_BACKWARD_LAUNCHES = 2
"""Kernels of a backward pass for each of the forward: gradients of the input and of the weight."""

_ATTENTION_BACKWARD = 2.5
"""Five matrix products against two, scores computed again (Dao, FlashAttention-2, arXiv:2307.08691, section 3.1), at
the speed that gradients have of the forward pass."""

_ELEMENTWISE_BACKWARD = 2.0
"""Backward reads the saved input and the gradient and writes a gradient."""

_SCORE_BYTES, _SCORE_BACKWARD_BYTES = 13, 19
"""Traffic per score when scores are stored in 16 bits: two products, softmax, and dropout with a one-byte mask, each
reading and writing (Korthikanti et al., arXiv:2205.05198, section 4.1, lists what is stored)."""

_LAYER_KERNELS_STARTED = 5
"""Kernels of a layer whose law counts their start: four matrix products and attention."""


Pass: TypeAlias = tuple[float, float, float, float]
"""How often it runs, its rows, their new tokens, and the tokens cached of each row."""

Passes: TypeAlias = Sequence[Pass]


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

    def total(self, body: Body, passes: Passes) -> Time:
        """Seconds of all these passes together."""
        layers = ends = 0.0
        known = None
        for number, rows, tokens, context in passes:
            layer, end, source = self.time(body, rows, tokens, context)
            layers += number * layer
            ends += number * end
            if source is not known:
                known = least_trusted((known, source)) if known else source
        return Time(layers, ends, known or Source.MEASURED)


class _Launches(NamedTuple):
    """What launching adds to the device seconds of some kernels, and the least that they take with it."""

    more: float
    least: float


class _BodyRun(NamedTuple):
    """What is the same whenever a body runs, seconds of element-wise work; and what is known by numbers of tokens."""

    trains: bool
    samples: bool
    layer_seconds: float  # of a layer, per token
    token_seconds: float  # of the embedding, per token
    head_seconds: float  # of the head, per token that it sees
    layer_launches: _Launches
    ends_launches: _Launches
    layers: dict[float, float]
    heads: dict[tuple[float, float], float]


class AnalyticShard(Shard):
    """Times by equation. `model` is already a shard (`ModelSpec.shard`); `whole_share` is the part of the hidden state
    that norms and residuals of this rank touch: 1, or 1/tp under sequence parallelism. Experts are spread over `spread`
    replicas and, where they are whole, over `folded` ranks of each (see `Mixture`). `kernels` replace the laws, and
    `head_kernels` those of the head where it computes in another format. What `is_quantised` has linears in 8 bits, and
    generates with them.

    Raises BadInput for a precision that is not known, or for which the device has no peak.
    """

    def __init__(
        self,
        model: ModelSpec,
        device: Device,
        precision: str,
        efficiency: Efficiency,
        whole_share: float,
        *,
        spread: int = 1,
        folded: int = 1,
        framework: Framework | None = None,
        kernels: Kernels | None = None,
        head_kernels: Kernels | None = None,
        is_quantised: bool = False,
    ) -> None:
        numbers = precision_named(precision, device)
        self._model, self._size, self._efficiency = model, numbers.size, efficiency
        self._framework, self._cache_bytes = framework or own_framework(device.kind), numbers.cache_bytes
        self._flash = self._framework.flash_attention
        self._attention_backward = _ATTENTION_BACKWARD / efficiency.attention.gradients
        launch = self._framework.launch_seconds
        self._launch = device.launch_seconds if launch is None else launch

        def by_law(name: str, weight_bytes: float) -> Kernels:
            flops = device.flops_per_second[name] * efficiency.sustained
            return Kernels(device, efficiency, flops_per_second=flops, weight_bytes=weight_bytes, size=numbers.size)

        self._kernels = kernels or by_law(precision, numbers.weight_bytes)
        self._head_kernels = head_kernels or kernels or by_law(numbers.head, numbers.size)
        (self._heads, cached_heads), hidden = _heads(model), model.hidden_size
        self._window, self._window_share = model.window, model.num_window_layers / model.num_layers
        self._decoding = self._decoding_of_layers(cached_heads)
        self._dense_mlp = (hidden, model.up_size), (model.ffn_size, hidden)
        self._gemms = model.attention_products + (() if model.experts else self._dense_mlp)
        mlp_elements: float = (2 + model.gated_mlp) * model.active_ffn_size()
        self._adapter = LowRank(model, self._kernels, numbers.size) if model.adapter else None
        self.is_quantised, is_fused = is_quantised, self._framework.kernels_per_layer is not None
        linears = partial(QuantisedLinears, model, device, efficiency, self._kernels, numbers.size)
        self._quantised = linears(is_fused=is_fused) if is_quantised else None
        self._mixture, self._routing, self._dense_share = None, 0.0, model.num_dense_layers / model.num_layers
        if model.experts:
            self._mixture = Mixture(
                self._kernels, efficiency, model.experts, hidden, spread=spread, folded=folded, size=numbers.size
            )
            widths = self._dense_share * model.ffn_size + (1 - self._dense_share) * model.experts.shared_ffn_size
            mlp_elements = (2 + model.gated_mlp) * widths
            self._routing = (1 - self._dense_share) * self._kernels_around(model.experts, spread * folded)
        layer_bytes = numbers.size * (10 * hidden * whole_share + model.attention_elements + mlp_elements)
        self._layer_elementwise = self._kernels.elementwise(layer_bytes)
        self._layer_products = self._kernels.products(self._gemms)
        self._layer_gradients = self._kernels.products([(outer, inner) for inner, outer in self._gemms])
        self._outputs = 1 if model.scalar_head else model.padded_vocab_size
        self._head_products = self._head_kernels.products([(hidden, self._outputs)])
        self._head_gradients = self._head_kernels.products([(self._outputs, hidden)])
        self._prompts: dict[tuple[float, float], float] = {}  # attention of tokens among themselves
        forward: dict[float, float] = {}
        self._runs = {body: self._run(body, {} if body is Body.TRAIN else forward) for body in Body}

    def _run(self, body: Body, layers: dict[float, float]) -> _BodyRun:
        trains, samples = body is Body.TRAIN, body in (Body.PREFILL, Body.DECODE)
        framework, efficiency = self._framework, self._efficiency
        passes = 1 + (_BACKWARD_LAUNCHES if trains else 0)
        recorded = framework.recorded_kernels if body is Body.DECODE else None
        per_layer = recorded or framework.kernels_per_layer or efficiency.kernels_per_layer
        started = _LAYER_KERNELS_STARTED
        if self._adapter:
            per_layer, started = per_layer + self._adapter.num_kernels, started + self._adapter.num_started
        if self._quantised:
            per_layer += self._quantised.num_kernels
        per_logit = framework.sampling_bytes if samples else framework.loss_bytes
        per_logit += framework.loss_backward_bytes if trains else 0
        both_ways, seconds = 1 + (_ELEMENTWISE_BACKWARD if trains else 0), self._kernels.elementwise
        return _BodyRun(
            trains=trains,
            samples=samples,
            layer_seconds=self._layer_elementwise * both_ways,
            token_seconds=seconds(2 * self._model.hidden_size * self._size * both_ways),
            head_seconds=seconds(self._outputs * per_logit),
            layer_launches=self._launches(
                passes * per_layer,
                passes * started,
                passes * self._routing,
                recorded=framework.cuda_graphs or recorded is not None,
            ),
            ends_launches=self._launches(
                passes * efficiency.kernels_at_ends, passes, 0, recorded=framework.cuda_graphs
            ),
            layers=layers,
            heads={},
        )

    def time(self, body: Body, rows: float, tokens: float, context: float = 0) -> Time:
        return self.total(body, ((1, rows, tokens, context),))

    def total(self, body: Body, passes: Passes) -> Time:
        if body is Body.OPTIMIZER:
            return self._optimizer()
        run, layers, ends = self._runs[body], 0.0, 0.0
        (more, least), least_at_ends = run.layer_launches, run.ends_launches.least
        layer_tokens, ends_tokens, head_tokens, layer, end = 0.0, 0.0, 0.0, 0.0, 0.0
        for (number, rows, tokens, _), kernel in zip(passes, self._attentions(run, passes), strict=True):
            count, attention = rows * tokens, kernel + more
            at_head = rows if run.samples else count
            # Fewer tokens never take longer: where launches decide for more of them they decide for these.
            if layer + attention > least or count > layer_tokens:
                layer_tokens, layer = count, self._layer(run, count)
            if end > least_at_ends or count > ends_tokens or at_head > head_tokens:
                ends_tokens, head_tokens, end = count, at_head, self._ends(run, count, at_head)
            seconds = layer + attention
            layers += number * (seconds if seconds > least else least)
            ends += number * (end if end > least_at_ends else least_at_ends)
        return Time(layers, ends, Source.ANALYTIC)

    def _layer(self, run: _BodyRun, count: float) -> float:
        """Device seconds of a layer but for its attention, for so many tokens."""
        found = run.layers.get(count)
        if found is None:
            found = run.layers[count] = self._products(run, count) + count * run.layer_seconds
        return found

    def _ends(self, run: _BodyRun, count: float, at_head: float) -> float:
        """Device seconds of the embedding of so many tokens, and of the head on some of them."""
        found = run.heads.get((count, at_head))
        if found is None:
            found = run.heads[count, at_head] = self._head(run, count, at_head) + run.ends_launches.more
        return found

    def _attentions(self, run: _BodyRun, passes: Passes) -> list[float]:
        """Seconds of one layer's core attention in each pass."""
        attention, decoding, flash = self.attention, self._decoding, self._flash
        return [
            decoding(rows, context)
            if tokens == 1 and context and flash
            else attention(rows, tokens, context, trains=run.trains)
            for _, rows, tokens, context in passes
        ]

    def attention(self, rows: float, tokens: float, context: float = 0, *, trains: bool = False) -> float:
        """Seconds of one layer's core attention, forward (what selective recomputation repeats) or both ways, of tokens
        that are no decode."""
        if not self._flash:
            stored, backward = self._stored_attention(rows, tokens)
            return stored + backward if trains else stored
        forward = None if context else self._prompts.get((rows, tokens))
        if forward is None:
            forward = self._forward_attention(rows, tokens, context)
            if not context:
                self._prompts[rows, tokens] = forward
        return forward * (1 + self._attention_backward) if trains else forward

    def _forward_attention(self, rows: float, tokens: float, context: float) -> float:
        """Seconds of a layer's, the mean of those with a sliding window and those without."""
        attention, heads, size = self._kernels.attention, self._heads, self._cache_bytes
        everything = attention(rows, tokens, context, heads, cache_bytes=size)
        if not self._window:
            return everything
        windowed = attention(rows, tokens, context, heads._replace(window=self._window), cache_bytes=size)
        return everything + self._window_share * (windowed - everything)

    def _decoding_of_layers(self, heads: Heads) -> Callable[[float, float], float]:
        """Seconds by rows and cached tokens of a decode step's attention in a layer, the mean of those with a sliding
        window and those without."""
        everything = self._kernels.decoding(heads, self._cache_bytes)
        if not self._window:
            return everything
        share, of_window = self._window_share, heads._replace(window=self._window)
        windowed = self._kernels.decoding(of_window, self._cache_bytes)
        return lambda rows, context: share * windowed(rows, context) + (1 - share) * everything(rows, context)

    def _products(self, run: _BodyRun, count: float) -> float:
        """Device seconds of a layer's products of weights, which depend on the number of tokens alone."""
        products = self._quantised.seconds(count) if self._quantised else self._layer_products(count)
        if run.trains:
            products += self._gradients(count)
        if self._adapter:
            products += self._adapter.seconds(count, trains=run.trains)
        if self._mixture:
            products += self._mixed_mlp(count, run.trains, self._mixture)
        return products

    def _gradients(self, count: float) -> float:
        """Device seconds of the gradients of a layer's products: of what they read and, unless an adapter is trained in
        their place, of the weights."""
        inputs = self._layer_gradients(count)
        if self._adapter:
            return inputs
        gemm = self._kernels.gemm
        return inputs + sum([gemm(inner, count, outer) for inner, outer in self._gemms])

    def _mixed_mlp(self, count: float, trains: bool, mixture: Mixture) -> float:
        """Seconds of the products of a layer's MLP, the mean of layers with experts and layers without."""
        gemm, kernels, dense_share = self._gemm, self._kernels, self._dense_share
        dense = sum([gemm(count, inner, outer, trains, kernels) for inner, outer in self._dense_mlp])
        hidden, shared = self._model.hidden_size, mixture.experts.shared_ffn_size
        mixed = gemm(count, hidden, mixture.experts.num_experts, trains, kernels)
        mixed += mixture.seconds(count, trains=trains, is_frozen=self._adapter is not None)
        if shared:
            mixed += gemm(count, hidden, 2 * shared, trains, kernels) + gemm(count, shared, hidden, trains, kernels)
        return dense_share * dense + (1 - dense_share) * mixed

    def _kernels_around(self, experts: Experts, ep: int) -> float:
        """Kernels that route tokens, and those of this rank's experts where each runs by itself."""
        alone = 0.0 if self._framework.grouped_experts else experts.num_experts / ep * self._efficiency.expert_kernels
        return self._efficiency.routing_kernels + alone

    def _launches(self, num_kernels: float, num_started: float, num_routing: float, *, recorded: bool) -> _Launches:
        """Of kernels whose device seconds count the start of `num_started` of them, and of those around experts, whose
        device seconds count all of theirs; the host has no part in those that are recorded."""
        start, framework = self._efficiency.kernel_seconds, self._framework
        if not self._efficiency.overlaps_launch:
            return _Launches((num_kernels + num_routing) * self._launch, 0.0)
        if recorded:
            return _Launches((num_kernels * framework.start_share - num_started) * start, 0.0)
        return _Launches((num_kernels - num_started) * start, (num_kernels + num_routing) * self._launch)

    def _gemm(self, count: float, inner: float, outer: float, trains: bool, kernels: Kernels) -> float:
        """Seconds of [count, inner] x [inner, outer]; training adds the gradients of the input and of the weight
        (Narayanan et al., arXiv:2104.04473, section 4), the latter unless an adapter is trained in its place."""
        gemm = kernels.gemm
        forward = gemm(count, inner, outer)
        if not trains:
            return forward
        both = forward + gemm(count, outer, inner)
        return both if self._adapter else both + gemm(inner, count, outer)

    def _stored_attention(self, rows: float, tokens: float) -> tuple[float, float]:
        """Forward and backward seconds when all scores are computed, stored, and read again.

        Products move little but scores, whose traffic is counted once, in bytes per score.
        """
        batch, heads = rows * self._heads.queries, self._heads
        scores = batch * tokens * tokens
        product = self._kernels.computing(batch * tokens, heads.size, tokens)
        forward = 2 * product + self._kernels.elementwise(_SCORE_BYTES * scores)
        return forward, 4 * product + self._kernels.elementwise(_SCORE_BACKWARD_BYTES * scores)

    def _head(self, run: _BodyRun, count: float, head_count: float) -> float:
        """Seconds of the head's GEMM, the embedding rows and the softmax over the vocabulary."""
        product = self._head_products(head_count)
        if run.trains:
            gradients = self._head_gradients(head_count)
            if not self._adapter:
                gradients += self._head_kernels.gemm(self._model.hidden_size, head_count, self._outputs)
            product += gradients
        return product + head_count * run.head_seconds + count * run.token_seconds

    def _optimizer(self) -> Time:
        """Adam in fp32: reads gradient, weight and moments, writes weight and moments, casts, zeroes the gradient."""
        model = self._model
        per_param = self._kernels.elementwise(4 * 4 + 3 * 4 + self._size + 4)
        if model.adapter:
            return Time(model.adapter_layer_params * per_param, 0.0, Source.ANALYTIC)
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
