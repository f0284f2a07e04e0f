"""Compute time of one tensor-parallel shard, without collectives: the arithmetic of a decoder layer.

A layer's kernels run one after the other. On a device that overlaps launches the host issues kernels ahead of the
device, and the slower of the two decides; on one that does not, each kernel waits for its launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeAlias

import numpy as np

from meshwright.cost_models.cost import Source, least_trusted
from meshwright.cost_models.image_costs import prompt_seconds
from meshwright.cost_models.kernels import (
    DecodeSeconds,
    Heads,
    Kernels,
    LowRank,
    Mixture,
    QuantisedLinears,
    precision_named,
)
from meshwright.profiles.efficiency import Efficiency
from meshwright.profiles.elementwise import FloatArray, N, sum_of
from meshwright.profiles.experts import Experts
from meshwright.profiles.frameworks import Framework, own_framework
from meshwright.profiles.hardware import Device
from meshwright.profiles.model_parts.hf_config import SlidingWindow
from meshwright.profiles.model_parts.linear_attention import LinearAttention
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.table import TimedPass
from meshwright.profiles.workload import Images

_BACKWARD_LAUNCHES = 2
"""Backward kernels per forward kernel: the gradients of the input and of the weight."""

_FROZEN_BACKWARD_LAUNCHES = 1
"""Backward kernels per forward kernel where the weights are frozen: the gradient of the input."""

_ATTENTION_BACKWARD = 2.5
"""Backward over forward FLOPs of attention: five matrix products against two, since scores are recomputed (Dao,
FlashAttention-2, arXiv:2307.08691, section 3.1). It is divided by the speed of the backward relative to the forward."""

_ELEMENTWISE_BACKWARD = 2.0
"""Backward over forward traffic: it reads the saved input and the gradient, and writes a gradient."""

_EAGER_NORM, _EAGER_ROTATION, _EAGER_GATE = 16, 8, 2
"""Elements in 16 bits that PyTorch's operators move besides those of a fused kernel (transformers 4.52,
models/llama/modeling_llama.py): of a norm (cast to 32 bits, square, mean, product with the inverse root, cast, product
with the weight: 36 bytes, fused 4), of a rotation (two products, a negation, a concatenation and a sum: 20 bytes, fused
4), and of a gate (its activation is written and read)."""

_SCORE_BYTES, _SCORE_BACKWARD_BYTES = 13, 19
"""Traffic per score when scores are stored in 16 bits: two products, softmax, and dropout with a one-byte mask, each
reading and writing (Korthikanti et al., arXiv:2205.05198, section 4.1, lists what is stored)."""

_TOP_TOKEN_BYTES = (54, 54 + 30)
"""Traffic per logit of a distribution that is cut to a teacher's likeliest tokens, without and with a gradient, by
torch operators: keys of 8 bytes, which are widened, ordered, shifted, joined and selected, or a student's scaling,
maximum and exponentials; backward, probabilities, their products and a cast gradient. Counted from the operators, not
measured."""

_CAST_BYTES = 4
"""Traffic per element that is cast to 8 bits: 16 bits are read, and 8 written twice."""

_LAYER_KERNELS_STARTED = 5
"""Kernels of a layer whose time equations already include the start of the kernel: four matrix products and
attention."""


_STATE_COLUMNS = 128
"""Columns of the products inside a layer of linear attention or Mamba: the size of a head in published models."""


class WeightFormats(NamedTuple):
    """Number formats of the weights of a generating shard, by name: of the linears of its layers, and of its routed
    experts."""

    linears: str
    experts: str


_MANY_PASSES = 16
"""Number of passes from which costing all of them together is faster than one by one."""


Pass: TypeAlias = tuple[float, float, float, float]
"""(number of passes, rows, new tokens per row, cached tokens per row)."""

Passes: TypeAlias = Sequence[Pass]


class PassColumns(NamedTuple):
    """Several passes; each field is an array, [passes]."""

    number: FloatArray
    rows: FloatArray
    tokens: FloatArray
    context: FloatArray


class PassSeconds(NamedTuple, Generic[N]):
    """Seconds of one timed pass, or of each of several: of a `layer`, and of embedding and head together (`ends`)."""

    layer: N
    ends: N
    source: Source


class Shard(Protocol):
    """Times of the passes of one shard, as `profiles.harness` defines them."""

    def time(self, timed_pass: TimedPass, rows: float, tokens: float, context: float = 0) -> PassSeconds[float]:
        """Return the seconds of a pass over `rows` rows of `tokens` new tokens with `context` cached tokens each."""
        ...

    def each(self, timed_pass: TimedPass, passes: PassColumns) -> PassSeconds[FloatArray]:
        """Return the seconds of each of several passes, [passes], and the least trusted source."""
        times = [self.time(timed_pass, *one) for one in zip(*(column.tolist() for column in passes[1:]), strict=True)]
        return PassSeconds(
            np.array([time.layer for time in times]),
            np.array([time.ends for time in times]),
            least_trusted(time.source for time in times),
        )

    def total(self, timed_pass: TimedPass, passes: Passes) -> PassSeconds[float]:
        """Return the seconds of all these passes together."""
        layers = ends = 0.0
        worst_source = None
        for number, rows, tokens, context in passes:
            layer, end, source = self.time(timed_pass, rows, tokens, context)
            layers += number * layer
            ends += number * end
            if source is not worst_source:
                worst_source = least_trusted((worst_source, source)) if worst_source else source
        return PassSeconds(layers, ends, worst_source or Source.MEASURED)


class _Launches(NamedTuple):
    """Launch cost of some kernels: the seconds that it adds to their device seconds, and the fewest seconds that they
    can take together (those in which the host issues them)."""

    extra: float
    minimum: float


class _PassKind(NamedTuple):
    """Constants of one kind of pass, and its seconds cached by number of tokens."""

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
    """Times of the passes of one shard, from equations.

    `model` is already a shard (`ModelSpec.shard`). `whole_share` is the fraction of the hidden state that norms and
    residuals of this rank touch: 1, or 1/tp under sequence parallelism. Experts are spread over `spread` replicas and,
    if they are not sharded by tp, over `folded` ranks of each (see `Mixture`). `kernels` replace the analytic kernel
    times, and `head_kernels` those of the head. With `is_quantised` the shard generates with 8-bit weights in its
    linears. With a `linear_format` the linears of its layers, experts included, train in that number format. With
    `weight_formats` it generates with those of a checkpoint, where they are not the precision.

    Raises BadInput for an unknown precision, or one for which the device has no peak.
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
        linear_format: str | None = None,
        weight_formats: WeightFormats | None = None,
    ) -> None:
        number_format = precision_named(precision, device)
        self._framework, self._cache_bytes = framework or own_framework(device.kind), number_format.cache_bytes
        efficiency = efficiency.of_kernel(self._framework.attention_kernel)
        self._model, self._size, self._efficiency = model, number_format.size, efficiency
        self._flash = self._framework.flash_attention
        self._attention_backward = _ATTENTION_BACKWARD / efficiency.attention.gradients
        launch, forward_launch = self._framework.launch_seconds, self._framework.forward_launch_seconds
        self._launch = device.launch_seconds if launch is None else launch
        self._forward_launch = self._launch if forward_launch is None else forward_launch

        kernels_in = partial(_kernels_in, device=device, efficiency=efficiency, size=number_format.size)
        self._kernels = kernels or kernels_in(precision)
        self._router_kernels, self._is_cast = self._kernels, linear_format is not None
        if linear_format:
            self._router_kernels = _kernels_of_format(linear_format, device, efficiency, number_format.size)
        served = [kernels_in(name) for name in weight_formats or ()]
        self._linear_kernels, expert_kernels = served or [self._router_kernels] * 2
        self._head_kernels = head_kernels or kernels or kernels_in(number_format.head)
        hidden = model.hidden_size
        self._new_heads, cached_heads = _attention_kernels(model, cached=False), _attention_kernels(model, cached=True)
        self._linear = model.linear
        self._attention_share, self._linear_share = model.attention_layers_share, model.linear_layers_share
        self._dense_share, self._expert_share = model.dense_layers_share, model.expert_layers_share
        self._decode_attention = self._layer_decoding(cached_heads)
        self._dense_mlp = (hidden, model.up_size), (model.ffn_size, hidden)
        is_uniform = not model.experts and not model.layer_kinds
        self._gemms = model.attention_linears + (self._dense_mlp if is_uniform else ())
        mlp_elements: float = (2 + model.gated_mlp) * model.active_ffn_size()
        self._adapters = self._shares_of_adapters(number_format.size)
        self.is_quantised, is_fused = is_quantised, self._framework.kernels_per_layer is not None
        linears = partial(QuantisedLinears, model, device, efficiency, self._kernels, number_format.size)
        self._quantised = linears(is_fused=is_fused) if is_quantised else None
        self._mixture, self._routing = None, 0.0
        if model.experts:
            self._mixture = Mixture(
                expert_kernels,
                model.experts,
                hidden,
                spread=spread,
                folded=folded,
                size=number_format.size,
                separate_biases=model.expert_bias and not self._framework.fused_expert_biases,
                adapter=model.adapter,
            )
            widths = self._dense_share * model.ffn_size + self._expert_share * model.experts.shared_ffn_size
            mlp_elements = (2 + model.gated_mlp) * widths
            self._routing = self._expert_share * self._routing_kernels(model.experts, spread * folded)
        elif not is_uniform:
            mlp_elements *= self._dense_share
        around_blocks = _elements_around_blocks(model, is_eager=self._framework.eager_operators) * hidden * whole_share
        inside_blocks = model.mixed_elements + mlp_elements + self._framework.eager_operators * _eager_elements(model)
        self._layer_elementwise = self._kernels.elementwise(number_format.size * (around_blocks + inside_blocks))
        self._layer_products = self._linear_kernels.products(self._gemms)
        self._layer_gradients = self._linear_kernels.products([(outer, inner) for inner, outer in self._gemms])
        self._cast_seconds = self._casting_seconds() if self._is_cast else (0.0, 0.0)
        self._outputs = 1 if model.scalar_head else model.padded_vocab_size
        self._head_products = self._head_kernels.products([(hidden, self._outputs)])
        self._head_gradients = self._head_kernels.products([(self._outputs, hidden)])
        forward: dict[float, float] = {}
        self._pass_kinds = {
            timed_pass: self._make_pass_kind(timed_pass, {} if timed_pass is TimedPass.TRAIN else forward)
            for timed_pass in TimedPass
        }

    def _make_pass_kind(self, timed_pass: TimedPass, layers: dict[float, float]) -> _PassKind:
        trains, samples = timed_pass is TimedPass.TRAIN, timed_pass in (TimedPass.PREFILL, TimedPass.DECODE)
        framework, efficiency = self._framework, self._efficiency
        passes, launch = 1 + (_BACKWARD_LAUNCHES if trains else 0), self._launch if trains else self._forward_launch
        recorded = framework.recorded_kernels if timed_pass is TimedPass.DECODE else None
        per_layer: float = recorded or framework.kernels_per_layer or efficiency.kernels_per_layer
        at_ends = framework.kernels_at_ends or efficiency.kernels_at_ends
        if self._quantised:
            per_layer += self._quantised.num_kernels
        num_kernels: float = passes * per_layer
        num_started: float = passes * _LAYER_KERNELS_STARTED
        if self._is_adapted:
            of_frozen = 1 + (_FROZEN_BACKWARD_LAUNCHES if trains else 0)
            of_experts = self._expert_share * self._mixture.num_adapter_kernels if self._mixture else 0.0
            of_adapters = of_experts + sum(share * adapter.num_kernels for share, adapter in self._adapters)
            started = sum(share * adapter.num_started for share, adapter in self._adapters)
            num_kernels = of_frozen * per_layer + passes * of_adapters
            num_started = of_frozen * _LAYER_KERNELS_STARTED + passes * started
        per_logit = framework.sampling_bytes if samples else framework.loss_bytes
        per_logit += framework.loss_backward_bytes if trains else 0
        num_biases = self._expert_share * self._mixture.num_bias_kernels if self._mixture else 0.0
        both_ways, seconds = 1 + (_ELEMENTWISE_BACKWARD if trains else 0), self._kernels.elementwise
        return _PassKind(
            trains=trains,
            samples=samples,
            layer_seconds=self._layer_elementwise * both_ways + self._cast_seconds[0] + trains * self._cast_seconds[1],
            token_seconds=seconds(2 * self._model.hidden_size * self._size * both_ways),
            head_seconds=seconds(self._outputs * per_logit),
            layer_launches=self._launches(
                num_kernels,
                num_started,
                passes * self._routing,
                launch=launch,
                recorded=framework.cuda_graphs or recorded is not None,
                num_short=passes * num_biases if trains else 0.0,
                exposed=self._exposed_share(trains=trains),
            ),
            ends_launches=self._launches(passes * at_ends, passes, 0, launch=launch, recorded=framework.cuda_graphs),
            layers=layers,
            heads={},
        )

    @property
    def _is_adapted(self) -> bool:
        return self._model.adapter is not None

    def _shares_of_adapters(self, size: float) -> list[tuple[float, LowRank]]:
        """Return the adapters of a layer but those of routed experts, each with the share of layers that have it."""
        model = self._model
        if not self._is_adapted:
            return []
        if not model.experts and not model.layer_kinds:
            return [(1.0, LowRank(model, self._kernels, size))]
        shared = model.experts.shared_ffn_size if model.experts else 0
        blocks = (
            (self._attention_share, model.adapted_attention),
            (self._dense_share, model.adapted_mlp(model.ffn_size)),
            (self._expert_share, model.adapted_mlp(shared)),
        )
        return [(share, LowRank(model, self._kernels, size, linears)) for share, linears in blocks if share and linears]

    def distribution_seconds(self, *, trains: bool) -> float:
        """Return the seconds of cutting the distribution of one prediction to a teacher's likeliest tokens; of a stage
        that trains, those of the student's log-probabilities of these tokens, and of their gradient."""
        return self._kernels.elementwise(self._outputs * _TOP_TOKEN_BYTES[trains])

    def image_seconds(self, images: Images) -> float:
        """Return the mean seconds of encoding the images of a prompt; 0 for a model of text."""
        encoder = self._model.image_encoder
        return prompt_seconds(encoder, images, self._kernels, self._size) if encoder else 0.0

    def time(self, timed_pass: TimedPass, rows: float, tokens: float, context: float = 0) -> PassSeconds[float]:
        return self.total(timed_pass, ((1, rows, tokens, context),))

    def each(self, timed_pass: TimedPass, passes: PassColumns) -> PassSeconds[FloatArray]:
        kind, (_, rows, tokens, context) = self._pass_kinds[timed_pass], passes
        count = rows * tokens
        attention = self._attention_of_each(kind, rows, tokens, context)
        layer = self._matmuls(kind, count) + count * kind.layer_seconds + attention + kind.layer_launches.extra
        ends = self._head(kind, count, rows if kind.samples else count) + kind.ends_launches.extra
        return PassSeconds(
            np.maximum(layer, kind.layer_launches.minimum),
            np.maximum(ends, kind.ends_launches.minimum),
            Source.ANALYTIC,
        )

    def total(self, timed_pass: TimedPass, passes: Passes) -> PassSeconds[float]:
        if timed_pass is TimedPass.OPTIMIZER:
            return self._optimizer()
        if len(passes) >= _MANY_PASSES:
            columns = PassColumns(*np.array(passes, dtype=np.float64).T)
            times = self.each(timed_pass, columns)
            return PassSeconds(float(columns.number @ times.layer), float(columns.number @ times.ends), Source.ANALYTIC)
        run, layers, ends = self._pass_kinds[timed_pass], 0.0, 0.0
        (launch_seconds, min_seconds), min_ends_seconds = run.layer_launches, run.ends_launches.minimum
        layer_tokens, ends_tokens, head_tokens, layer, end = 0.0, 0.0, 0.0, 0.0, 0.0
        for (number, rows, tokens, _), kernel in zip(passes, self._attentions(run, passes), strict=True):
            count, attention = rows * tokens, kernel + launch_seconds
            at_head = rows if run.samples else count
            # Device seconds grow with the number of tokens. If launches dominated a larger pass they dominate this one,
            # and its device seconds need not be computed.
            if layer + attention > min_seconds or count > layer_tokens:
                layer_tokens, layer = count, self._layer(run, count)
            if end > min_ends_seconds or count > ends_tokens or at_head > head_tokens:
                ends_tokens, head_tokens, end = count, at_head, self._ends(run, count, at_head)
            seconds = layer + attention
            layers += number * (seconds if seconds > min_seconds else min_seconds)
            ends += number * (end if end > min_ends_seconds else min_ends_seconds)
        return PassSeconds(layers, ends, Source.ANALYTIC)

    def _layer(self, run: _PassKind, count: float) -> float:
        """Return the device seconds of a layer for `count` tokens, without attention."""
        seconds = run.layers.get(count)
        if seconds is None:
            seconds = run.layers[count] = self._matmuls(run, count) + count * run.layer_seconds
        return seconds

    def _ends(self, run: _PassKind, count: float, at_head: float) -> float:
        """Return the device seconds of the embedding of `count` tokens and of the head on `at_head` of them."""
        seconds = run.heads.get((count, at_head))
        if seconds is None:
            seconds = run.heads[count, at_head] = self._head(run, count, at_head) + run.ends_launches.extra
        return seconds

    def _attention_of_each(
        self, kind: _PassKind, rows: FloatArray, tokens: FloatArray, context: FloatArray
    ) -> FloatArray:
        """Return the seconds of one layer's core attention in each pass, [passes]."""
        blocks = self.attention(rows, tokens, context, trains=kind.trains)
        is_decoding = (tokens == 1) & (context > 0) & self._flash
        return np.where(is_decoding, self._decode_attention(rows, context), blocks) if is_decoding.any() else blocks

    def _attentions(self, run: _PassKind, passes: Passes) -> list[float]:
        """Return the seconds of one layer's core attention in each pass."""
        attention, decoding, flash = self.attention, self._decode_attention, self._flash
        return [
            decoding(rows, context)
            if tokens == 1 and context and flash
            else attention(rows, tokens, context, trains=run.trains)
            for _, rows, tokens, context in passes
        ]

    def attention(self, rows: N, tokens: N, context: N | float = 0.0, *, trains: bool = False) -> N:
        """Return the seconds of one layer's core attention, forward or (`trains`) forward and backward.

        It does not cover decoding. Selective recomputation repeats the forward part.
        """
        if not self._flash:
            stored, backward = self._stored_attention(rows, tokens)
            return stored + backward if trains else stored
        forward = self._forward_attention(rows, tokens, context + 0 * tokens)
        return forward * (1 + self._attention_backward) if trains else forward

    def _forward_attention(self, rows: N, tokens: N, context: N) -> N:
        """Return the forward seconds of one layer's core attention (in linear attention and Mamba, of its work on the
        state), on average over layers."""
        attention, size = self._kernels.attention, self._cache_bytes
        seconds = [
            share * attention(rows, tokens, context, heads, cache_bytes=size) for share, heads in self._new_heads
        ]
        if self._linear:
            seconds.append(self._linear_share * self._state_seconds(rows, tokens, self._linear))
        return sum_of(seconds)

    def _state_seconds(self, rows: N, tokens: N, linear: LinearAttention) -> N:
        """Return the forward seconds of a layer with a state (linear attention or Mamba), without its projections.

        It works in chunks, whose matrix products are costed as one product over all tokens. Every row reads and writes
        its state once.
        """
        computing: N = self._kernels.computing(rows * tokens, linear.work / _STATE_COLUMNS, _STATE_COLUMNS)
        moving: N = self._kernels.elementwise(2 * linear.state_bytes(self._cache_bytes) * rows)
        return computing + moving

    def _layer_decoding(self, kernels: Sequence[tuple[float, Heads]]) -> DecodeSeconds:
        """Return a function of rows and cached tokens: the seconds of a decode step's attention in a layer, or of its
        reads and writes of states, on average over layers."""
        decoding = [(share, self._kernels.decoding(heads, self._cache_bytes)) for share, heads in kernels]
        if len(decoding) == 1 and decoding[0][0] == 1:
            return decoding[0][1]
        state_bytes = self._linear.state_bytes(self._cache_bytes) if self._linear else 0.0
        per_row = self._kernels.elementwise(2 * state_bytes * self._linear_share) if self._linear else 0.0

        def mean_seconds(rows: N, context: N) -> N:
            return sum_of([share * seconds(rows, context) for share, seconds in decoding]) + rows * per_row

        return mean_seconds

    def _matmuls(self, run: _PassKind, count: N) -> N:
        """Return the device seconds of a layer's weight matmuls, which depend on the number of tokens alone."""
        products = self._quantised.seconds(count) if self._quantised else self._layer_products(count)
        if run.trains:
            products = products + self._matmul_gradients(count)
        if self._attention_share != 1:
            products = self._attention_share * products
        for share, adapter in self._adapters:
            products = products + share * adapter.seconds(count, trains=run.trains)
        if self._linear:
            products = products + self._linear_share * self._products_of(
                self._linear.linears(self._model.hidden_size), count, trains=run.trains
            )
        if self._mixture or self._model.layer_kinds:
            products = products + self._dense_share * self._products_of(self._dense_mlp, count, trains=run.trains)
        if self._mixture:
            products = products + self._expert_share * self._mixture_mlp(count, run.trains, self._mixture)
        return products

    def _products_of(self, linears: Sequence[tuple[float, float]], count: N, *, trains: bool) -> N:
        """Return the seconds of linears that only some layers have."""
        return sum_of([self._gemm(count, inner, outer, trains, self._linear_kernels) for inner, outer in linears])

    def _matmul_gradients(self, count: N) -> N:
        """Return the device seconds of the gradients of a layer's matmuls: of their inputs and, unless an adapter is
        trained instead, of their weights."""
        inputs = self._layer_gradients(count)
        if self._is_adapted:
            return inputs
        weights: list[N] = [self._linear_kernels.gemm(inner, count, outer) for inner, outer in self._gemms]
        return inputs + sum_of(weights)

    def _mixture_mlp(self, count: N, trains: bool, mixture: Mixture) -> N:
        """Return the seconds of the matmuls of a layer's router and experts."""
        gemm, kernels = self._gemm, self._linear_kernels
        hidden, shared = self._model.hidden_size, mixture.experts.shared_ffn_size
        mixed = gemm(count, hidden, mixture.experts.num_experts, trains, self._router_kernels)
        mixed = mixed + mixture.seconds(count, trains=trains, is_frozen=self._is_adapted)
        if shared:
            widened = gemm(count, hidden, (mixture.experts.num_matrices - 1) * shared, trains, kernels)
            mixed = mixed + widened + gemm(count, shared, hidden, trains, kernels)
        return mixed

    def _casting_seconds(self) -> tuple[float, float]:
        """Return the seconds per token of casting the inputs of a layer's linears, and the gradients of their outputs.

        Each is read, and written as it is and transposed, for the two products that it is a factor of (Micikevicius et
        al., FP8 formats, arXiv:2209.05433; NVIDIA Transformer Engine docs, FP8 primer).
        """
        model = self._model
        attention, share_of_attention = model.attention_linears, self._attention_share
        linears = [(share_of_attention * inner, share_of_attention * outer) for inner, outer in attention]
        linears += [(self._dense_share * inner, self._dense_share * outer) for inner, outer in self._dense_mlp]
        if experts := model.experts:
            width = experts.experts_per_token * experts.ffn_size + experts.shared_ffn_size
            copies, share = experts.experts_per_token, self._expert_share
            linears += [(share * copies * model.hidden_size, share * 2 * width), (share * width, share * copies)]
        seconds = self._kernels.elementwise
        inputs, outputs = sum(inner for inner, _ in linears), sum(outer for _, outer in linears)
        return seconds(_CAST_BYTES * inputs), seconds(_CAST_BYTES * outputs)

    def _routing_kernels(self, experts: Experts, ep: int) -> float:
        """Return the number of routing kernels, plus those of this rank's experts if each runs separately."""
        separate = (
            0.0 if self._framework.grouped_experts else experts.num_experts / ep * self._efficiency.expert_kernels
        )
        return self._efficiency.routing_kernels + separate

    def _exposed_share(self, *, trains: bool) -> float:
        """Return the share of a layer's launch seconds that does not overlap with the device.

        It is that of the forward pass if the host waits in each layer for the number of tokens of each expert, since
        the host is then never ahead (Megatron-Bridge, perf_recipes/qwen/gb300/qwen3_moe.py at 007282ea: this
        "serializes the CPU behind the GPU"). It is 1 if exchanges overlap with another micro-batch, since one of the
        two is always in its forward pass.
        """
        framework = self._framework
        if not self._mixture or not framework.counts_on_host:
            return 0.0
        if not trains or framework.overlapped_experts:
            return 1.0
        return self._forward_launch / ((1 + _BACKWARD_LAUNCHES) * self._launch) if self._launch else 0.0

    def _launches(
        self,
        num_kernels: float,
        num_started: float,
        num_routing: float,
        *,
        launch: float,
        recorded: bool,
        num_short: float = 0.0,
        exposed: float = 0.0,
    ) -> _Launches:
        """Return the launch cost of some kernels.

        The device seconds already include the start of `num_started` of them, and of all `num_routing` kernels around
        experts. The host does not issue `recorded` kernels (CUDA graphs) one by one. `num_short` further kernels end
        before the host has launched the next one. The share `exposed` of the launch seconds does not overlap with the
        device.
        """
        start, framework = self._efficiency.kernel_seconds, self._framework
        if not self._efficiency.overlaps_launch:
            return _Launches((num_kernels + num_routing + num_short) * launch, 0.0)
        if recorded and framework.records_experts:
            return _Launches((num_kernels * framework.start_share - num_started + num_short) * start, 0.0)
        num_starts = (num_kernels * framework.start_share if recorded else num_kernels) - num_started
        launch_seconds = (num_routing if recorded else num_kernels + num_routing) * launch
        return _Launches(num_starts * start + num_short * launch + exposed * launch_seconds, launch_seconds)

    def _gemm(self, count: N, inner: float, outer: float, trains: bool, kernels: Kernels) -> N:
        """Return the seconds of [count, inner] x [inner, outer].

        Training adds the gradients of the input and, unless an adapter is trained instead, of the weight (Narayanan et
        al., arXiv:2104.04473, section 4).
        """
        forward: N = kernels.gemm(count, inner, outer)
        if not trains:
            return forward
        both: N = forward + kernels.gemm(count, outer, inner)
        weights: N = kernels.gemm(inner, count, outer)
        return both if self._is_adapted else both + weights

    def _stored_attention(self, rows: N, tokens: N) -> tuple[N, N]:
        """Return forward and backward seconds of unfused attention, which stores all scores and reads them again.

        The matmuls read and write little besides scores, whose traffic is counted once, in the bytes per score.
        """
        heads, _ = _heads(self._model)
        batch = rows * heads.queries
        scores = batch * tokens * tokens
        product: N = self._kernels.computing(batch * tokens, heads.size, tokens)
        forward = 2 * product + self._kernels.elementwise(_SCORE_BYTES * scores)
        return forward, 4 * product + self._kernels.elementwise(_SCORE_BACKWARD_BYTES * scores)

    def _head(self, run: _PassKind, count: N, head_count: N) -> N:
        """Return the seconds of the head's GEMM, the embedding lookup and the softmax over the vocabulary."""
        product = self._head_products(head_count)
        if run.trains:
            gradients = self._head_gradients(head_count)
            if not self._is_adapted or self._model.scalar_head:
                gradients = gradients + self._head_kernels.gemm(self._model.hidden_size, head_count, self._outputs)
            product = product + gradients
        return product + head_count * run.head_seconds + count * run.token_seconds

    def _optimizer(self) -> PassSeconds[float]:
        """Return the seconds of an Adam step in fp32.

        It reads gradient, weight and moments, writes weight and moments, casts, and zeroes the gradient.
        """
        model = self._model
        per_param = self._kernels.elementwise(4 * 4 + 3 * 4 + self._size + 4)
        if model.adapter:
            head = model.trained_head_params
            return PassSeconds(model.adapter_layer_params * per_param, head * per_param, Source.ANALYTIC)
        ends = model.num_params - model.num_layers * model.layer_params
        return PassSeconds(model.layer_params * per_param, ends * per_param, Source.ANALYTIC)


def _kernels_in(name: str, *, device: Device, efficiency: Efficiency, size: float) -> Kernels:
    """Return the kernels of a pass in a number format, with `size` bytes an element between them."""
    named = precision_named(name, device)
    return Kernels(
        device,
        efficiency,
        flops_per_second=device.flops_per_second[named.peak] * efficiency.sustained,
        weight_bytes=named.weight_bytes,
        size=size,
        block_scaled=named.block_scaled,
        widens=named.widens,
    )


def _kernels_of_format(name: str, device: Device, efficiency: Efficiency, size: float) -> Kernels:
    """Return the kernels of linears that compute in a number format; their outputs have `size` bytes an element."""
    weight_bytes = precision_named(name, device).weight_bytes
    flops = device.flops_per_second[name] * efficiency.sustained
    return Kernels(
        device, efficiency, flops_per_second=flops, weight_bytes=weight_bytes, size=(weight_bytes + size) / 2
    )


def _attention_kernels(model: ModelSpec, *, cached: bool) -> tuple[tuple[float, Heads], ...]:
    """Return the attention kernels of the layers, each with the share of layers that have it.

    An indexer (DeepSeek-V3.2) selects the tokens that a token attends to: a fixed number, as in a sliding window. Each
    of the indexer's heads takes one product with the keys of all tokens, half the work of an attention head.
    """
    heads = _heads(model)[cached]
    full = model.num_full_layers / model.num_layers
    kernels = [(full, heads)]
    if model.latent and model.latent.indexer:
        indexer = model.latent.indexer
        selected = heads._replace(window=SlidingWindow(num_tokens=indexer.num_tokens))
        kernels = [(full, selected), (full, Heads(indexer.num_heads, 1, indexer.head_dim / 2))]
    if model.window:
        kernels.append((model.num_window_layers / model.num_layers, heads._replace(window=model.window)))
    return tuple((share, kernel) for share, kernel in kernels if share)


def _elements_around_blocks(model: ModelSpec, *, is_eager: bool) -> float:
    """Return the elements per token that norms and residuals of a layer read and write, over the hidden size.

    A block has five: its norm, which reads and writes, and a residual, which reads two and writes one. Norms after
    attention and MLP in addition to those before read and write once more. PyTorch's own norm (`is_eager`) moves more.
    """
    norms = 2 if model.norms == "both" else 1
    return model.blocks_per_layer * (3 + norms * (2 + _EAGER_NORM * is_eager))


def _eager_elements(model: ModelSpec) -> float:
    """Return the elements per token that PyTorch's rotations and gates of a layer read and write besides those of fused
    kernels."""
    rotated = model.attention_size + model.kv_size
    return _EAGER_ROTATION * rotated + _EAGER_GATE * model.gated_mlp * model.active_ffn_size()


def _heads(model: ModelSpec) -> tuple[Heads, Heads]:
    """Return the heads for attention among new tokens, and for attention over a cache.

    Latent attention has heads of two sizes, whose mean gives the FLOPs of both products, and reads one cached vector
    for all of them (DeepSeek-V2, arXiv:2405.04434, section 2.1.2).
    """
    plain = Heads(model.num_heads, model.num_kv_heads, model.head_dim)
    if model.latent is None:
        return plain, plain
    mean_size = (model.head_dim + model.latent.value_dim) / 2
    cached = model.latent.kv_rank + model.latent.rope_dim
    return Heads(model.num_heads, model.num_kv_heads, mean_size), Heads(model.num_heads, 1, cached / 2)
