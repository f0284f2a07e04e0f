"""Peak memory of a stage: bytes on the fullest rank of its pool, sized for the longest sequence of the workload.

Resident, also while other stages run: the weight copy under the term "weights" (which a planner drops if two stages
share one copy), gradients, fp32 weights and moments of a training stage, the KV cache of a generation whose sequences
stay in flight between periods, and the process of an engine beside the rank. Transient: activations, logits, any other
KV cache (that of such a process included), the buffer of a refit, and whatever is offloaded to the host while the stage
does not run. If a schedule limits the blocks of the KV cache, that limit is counted.

The equations hold for numbers and for arrays alike; adding `0 * array` to a number makes it an array of that shape.
Operators are either fused or, on a CPU, single operators of torch, each of which stores its result in its own tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, NamedTuple

import numpy as np

from meshwright.cost_models.cost import WEIGHTS, Addend, Memory, Source, TermSums, cost_of
from meshwright.cost_models.image_costs import IMAGE_ENCODER, weight_params, working_bytes
from meshwright.cost_models.micro_batches import context_parallel_tokens
from meshwright.cost_models.params import ShardedModel, StagePart, micro_batches_in_flight, sharded
from meshwright.cost_models.protocol import Bytes, BytesColumns, Memo
from meshwright.profiles.choice_table import ChoiceTable, Degrees, PassSettings, field_values
from meshwright.profiles.elementwise import FloatArray, N, maximum, minimum, sum_of, where
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_parts.fp8_weights import SCALE_BYTES, linears_of
from meshwright.profiles.model_parts.linear_attention import SPARE_STATES, STATE_BYTES, LinearAttention
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.packing import BLOCK_TOKENS, max_prefill_tokens, num_blocks_for
from meshwright.profiles.schedule import Offload, Schedule
from meshwright.profiles.stages import KEPT_TOKENS, Stage, field_type
from meshwright.profiles.workload import Workload

REFIT_BUFFER, GATHERED_WEIGHTS = "refit buffer", "gathered weights"
"""Names of the terms for the trained weights that arrive in a refit, and after an update."""

DISTRIBUTIONS = "teachers' distributions"
"""Name of the terms for the likeliest tokens of teachers and their log-probabilities, in seconds and in memory."""

_TEACHER_OUTCOME_BYTES = 20
"""Bytes of a reported token on a teacher's rank: its key, its number twice and its log-probability
(`runtime.training.trainer.forward_distributions`)."""

_STUDENT_OUTCOME_BYTES = 36
"""Bytes of a token of a teacher on a student's rank: its number as int64, two log-probabilities, their difference, two
products, and the gradients of two of these (`runtime.training.distillation`)."""

_FP32_BYTES = 4
"""Bytes of an element that is always in fp32, whatever the model computes in."""

_LOGSUMEXP_BYTES = 4
"""Bytes that flash attention keeps per head and token beyond its output (Dao et al., arXiv:2205.14135, section 3.1)."""

_LOGIT_CHUNK_ELEMENTS = 2**25
"""Logits held in fp32 at once when tokens are scored: `runtime.model.logprobs.CHUNK_ELEMENTS`."""

_LOGIT_CHUNK_COPIES = 4
"""fp32 tensors of a chunk alive at once: logits or log-probabilities, exponentials, a product, a gradient."""

_LOGIT_CHUNK_GRADIENT_COPIES = 6
"""fp32 tensors of a chunk alive at once in a backward pass by torch operators: log-probabilities, exponentials, the
gradient of the log-probabilities, and three tensors for the gradient of the entropy (`runtime.model.logprobs`)."""

SAMPLING_MASK_BYTES = "sampling mask"
"""Name of the term for the sets of tokens that were kept at each position, and what is computed with them."""

_KEPT_TOKEN_BYTES = field_type(KEPT_TOKENS).num_bytes
"""Bytes of one token of a set."""

KEPT_LOGIT_BYTES = 40
"""Bytes per kept token alive at once, forward and in training: its number and its column in 64 bits, whether this rank
has it, and fp32 logits, weights, products and gradients (`runtime.model.logprobs`)."""

_KEPT_SAMPLE_BYTES = 56
"""Bytes per kept token of a row that samples: seven numbers of 64 bits (`runtime.inference.sampling`)."""

_BLOCK_SCORES, _MIN_BLOCK_QUERIES = 2**23, 16
"""Scores held in fp32 at once where they are capped, and the minimum number of queries that they belong to:
`runtime.model.limited_attention`."""

_CAPPED_COPIES = 4, 6
"""fp32 tensors of these scores alive at once, forward and in training: capped scores with and without mask, weights,
tanh, and the gradients of weights and scores."""

_LAYER_INPUTS = 2
"""Elements that torch operators keep alive in a forward pass, in hidden sizes per token: the inputs of the first layer
and of the current one, to which the callers still hold references."""

_GATE_ELEMENTS = 2
"""Elements that torch operators keep alive, in widths of a gated MLP per token: in a forward pass the activated gate
and the up projection plus its offset (Megatron's glu_linear_offset), besides the tensors that they are computed from;
in a backward pass their gradients."""

_CLAMPED_WIDTHS = 2
"""Elements that torch operators keep of a clamped gate of routed experts, in widths per token: the clamped gate and its
sigmoid, besides the product of both."""

_SCORE_BYTES = 5
"""Bytes per head and pair of tokens that attention keeps where it stores scores in 16 bits: the output of the softmax,
the mask of the dropout, and the output of the dropout (Korthikanti et al., arXiv:2205.05198, section 4.1)."""

_PREFILL_HEADS = 4
"""Copies of queries, key and value alive at once in a prefill over the cache of latent attention: as they are
projected, rotated, gathered for attention, and its output (`runtime.inference.decode_step`)."""

_SAMPLING_BYTES = 16
"""Bytes per logit of a token being sampled, besides the logit itself: an fp64 copy and an fp64 log-probability."""

_GATHERED_COPIES = 2, 3
"""Copies of the gathered keys and values alive at once, forward and in training: as they arrive, in sequence order, and
(training) their gradient."""


@dataclass(frozen=True)
class ShardSizes(Generic[N]):
    """Sizes of a shard of a model in one layout, or in the layouts of several choices.

    `block_bytes` is the size of a KV block of one layer, `state_bytes` that of one sequence's state, `vocab_size` the
    number of logits of a token, and `capped_heads` the number of heads if their scores are capped, else 0. All other
    sizes are per token of one layer on a rank:
    `cached_elements` in the KV cache, `inputs_bytes` of its input, `working_bytes` alive at the widest point of its
    forward pass, and `kept_bytes` saved for its backward pass, or `kept_without_attention_bytes` if what flash
    attention saves is recomputed. If operators are not fused, a layer saves `unfused_bytes` more, and
    `backward_bytes` are alive in its backward pass; both are 0 if operators are fused.
    """

    block_bytes: N
    state_bytes: N
    cached_elements: N
    inputs_bytes: N
    working_bytes: N
    kept_bytes: N
    kept_without_attention_bytes: N
    unfused_bytes: N
    backward_bytes: N
    vocab_size: N
    capped_heads: N


class Operators(NamedTuple):
    """The facts that decide which tensors are kept: whether the operators of a layer are fused or those of torch,
    whether attention stores its scores, the bytes per logit in training (None: those of this project's loss, which
    is computed in chunks), whether the generation engine frees the blocks that a sliding window has passed, how often
    its cache holds the vector of a token that latent attention caches, the bytes of its process without a model (0 if
    it runs in the rank), and whether torch computes the gated delta rule."""

    is_fused: bool
    stores_scores: bool = False
    logit_bytes: int | None = None
    frees_windows: bool = False
    latent_copies: int = 1
    process_bytes: float = 0.0
    delta_by_torch: bool = False


def shard_sizes(
    model: ModelSpec, layout: Layout, workload: Workload, element_bytes: int, operators: Operators
) -> ShardSizes[float]:
    """Return the sizes of one layout's shard of a model."""
    is_fused = operators.is_fused
    shard, experts = model.shard(layout.tp), model.experts
    # `imbalance` is the load of the busiest expert rank over the mean (loads follow a power law), when each of the
    # replicas that share experts has one sequence of maximum length.
    tokens = float(workload.max_tokens * layout.expert_replicas)
    imbalance = experts.imbalance(tokens, layout.ep) if experts else 1.0
    replicated_share = 1 / layout.tp if layout.sp else 1.0  # of activations that tensor parallelism does not shard
    kept = _kept_elements(shard, imbalance, replicated_share, layout.fold_size) * element_bytes
    scores = _SCORE_BYTES * workload.max_tokens
    working = _working_elements(shard, imbalance, replicated_share, layout.fold_size)
    chunked = 0.0
    if operators.delta_by_torch and shard.linear and shard.linear.rule == "gated delta":
        chunked = _chunk_elements(shard.linear, workload.max_tokens) * STATE_BYTES / element_bytes
        working = max(working, shard.linear.elements + chunked)
    if not is_fused:
        working += _unfused_working_elements(shard, imbalance, replicated_share)
        working = max(working, _mixer_working_elements(shard, replicated_share, chunked))
    return ShardSizes(
        block_bytes=BLOCK_TOKENS
        * shard.cached_elements
        * element_bytes
        * (operators.latent_copies if shard.latent else 1),
        state_bytes=shard.linear.state_bytes(element_bytes) if shard.linear else 0.0,
        cached_elements=shard.cached_elements,
        inputs_bytes=shard.hidden_size * replicated_share * element_bytes,
        working_bytes=working * element_bytes,
        kept_bytes=kept
        + chunked * shard.linear_layers_share * element_bytes
        + shard.num_heads * (scores if operators.stores_scores else _LOGSUMEXP_BYTES),
        kept_without_attention_bytes=kept,
        unfused_bytes=0.0 if is_fused else _unfused_elements(shard, imbalance, replicated_share) * element_bytes,
        backward_bytes=0.0 if is_fused else _backward_elements(shard, imbalance, replicated_share) * element_bytes,
        vocab_size=shard.padded_vocab_size,
        capped_heads=float(shard.num_heads if shard.attention_cap or shard.attention_sinks else 0),
    )


def _kept_elements(shard: ModelSpec, imbalance: float, replicated_share: float, fold_size: int) -> float:
    """Return the elements per token that one layer keeps for its backward pass, without those of flash attention.

    Counted as in Korthikanti et al., arXiv:2205.05198, section 4, for this layer: no dropout and no stored scores
    (flash attention), a gated activation, grouped keys and values. Replicated on every rank, unless sequence
    parallel (equations 2 and 4): the inputs and outputs of both norms. Divided by tp: queries, keys, values,
    attention output, and the gate, the up projection, the activated gate and their product. Of the experts, those
    that one token is routed to are counted, on the rank to which most tokens are routed. Selective recomputation
    drops what flash attention keeps, which is little. An adapter adds its low-rank activations on every rank; the
    inputs of its first matmuls are kept already.
    """
    mlp_elements = (2 + 2 * shard.gated_mlp) * shard.active_ffn_size(imbalance) * _mlp_share(shard)
    sharded_elements = shard.mixed_elements + mlp_elements
    adapter_elements = _adapter_elements(shard, imbalance)
    return (
        _norms_per_layer(shard) * 2 * shard.hidden_size * replicated_share
        + _dispatched_elements(shard, imbalance, fold_size)
        + sharded_elements
        + adapter_elements
    )


def _adapter_elements(shard: ModelSpec, imbalance: float) -> float:
    """Return the low-rank activations per token of the adapters of a layer, those of a token's experts included."""
    if not shard.adapter:
        return 0.0
    of_mlp = len(shard.adapted_mlp(shard.ffn_size))
    networks = 1.0 if shard.num_dense_layers else 0.0
    if experts := shard.experts:
        networks = max(networks, imbalance * experts.experts_per_token + (experts.shared_ffn_size > 0))
    return shard.adapter.rank * (len(shard.adapted_attention) + networks * of_mlp)


def _norms_per_layer(shard: ModelSpec) -> float:
    """Return the mean number of norms of the hidden state in a layer."""
    return shard.blocks_per_layer * (2 if shard.norms == "both" else 1)


def _mlp_share(shard: ModelSpec) -> float:
    """Return the share of layers that have an MLP or experts."""
    return shard.dense_layers_share + shard.expert_layers_share


def _working_elements(shard: ModelSpec, imbalance: float, replicated_share: float, fold_size: int) -> float:
    """Return the elements per token alive at once in the gated MLP, the widest part of a forward pass."""
    mlp = (2 + shard.gated_mlp) * shard.active_ffn_size(imbalance)
    dispatched = _dispatched_elements(shard, imbalance, fold_size)
    return shard.hidden_size * replicated_share + shard.hidden_size + dispatched + mlp


def _unfused_elements(shard: ModelSpec, imbalance: float, replicated_share: float) -> float:
    """Return the elements per token that one layer saves in addition if its operators are not fused.

    They are the normalised inputs of all norms, those of queries and keys among them, before they are multiplied by the
    norms' weights, and a copy of keys that are normalised over all heads; a copy of the queries, a second one in layers
    with a window, and the rotated queries and keys beside the projection that holds all of them; and the up projection
    of a gated MLP plus its offset. In latent attention they are the padding of values and outputs to the size of keys,
    and the latent vectors before and after their norms. Routed experts keep their output times the weights of its
    tokens and, if their gate is clamped, the clamped gate and its sigmoid (`runtime.model.model_shard`).
    """
    rotated: float = 2 * shard.attention_size + shard.kv_size
    if shard.qk_norm or shard.whole_qk_norm or shard.rotated_norm:
        rotated += shard.attention_size + shard.kv_size * (1 + shard.whole_qk_norm)
    if not shard.attention_cap and not shard.attention_sinks:
        rotated += shard.attention_size * shard.num_window_layers / shard.num_layers
    rotated *= shard.attention_layers_share
    if shard.latent:
        padding = 2 * shard.num_heads * (shard.head_dim - shard.value_dim)
        rotated = padding + 2 * (shard.latent.query_rank + shard.latent.vector_size)
    gate = shard.active_ffn_size(imbalance) * shard.gated_mlp
    if experts := shard.experts:
        routed = imbalance * experts.experts_per_token * experts.ffn_size
        gate += (1 + _CLAMPED_WIDTHS * (experts.clamp > 0)) * routed * shard.expert_layers_share
    return _norms_per_layer(shard) * shard.hidden_size * replicated_share + rotated + gate


def _backward_elements(shard: ModelSpec, imbalance: float, replicated_share: float) -> float:
    """Return the elements per token alive in the backward pass of one layer: the gradients of its output and, in a
    gated MLP, of the two factors of its product."""
    gate = _GATE_ELEMENTS * shard.active_ffn_size(imbalance) * shard.gated_mlp
    return shard.hidden_size * replicated_share + gate


def _unfused_working_elements(shard: ModelSpec, imbalance: float, replicated_share: float) -> float:
    """Return the elements per token that are alive in addition in a forward pass if operators are not fused.

    They are the inputs of the first layer and of this one, both factors of the gated MLP's product, and the sines and
    cosines of the rotary embedding.
    """
    gate = _GATE_ELEMENTS * shard.active_ffn_size(imbalance) * shard.gated_mlp
    return _LAYER_INPUTS * shard.hidden_size * replicated_share + 2 * shard.head_dim + gate


def _mixer_working_elements(shard: ModelSpec, replicated_share: float, chunked: float) -> float:
    """Return the elements per token alive while torch operators rotate queries or keys, attend block by block in layers
    with a window, or work on `chunked` elements in layers with a state; 0 in latent attention, whose MLP is wider.

    They are the inputs of the first layer and of this one, the normalised input, the projection, normalised queries and
    keys, sines and cosines, and two products and their sum for the tensor that is rotated. Layers with a window hold
    the rotated queries and keys, a block of queries, the outputs of all blocks, and their concatenation.
    """
    if shard.latent:
        return 0.0
    queries, keys = shard.attention_size, shard.kv_size
    inputs = (_LAYER_INPUTS + 1) * shard.hidden_size * replicated_share
    held = inputs + queries + 2 * keys + (queries + keys) * (shard.qk_norm or shard.whole_qk_norm or shard.rotated_norm)
    sines = 2 * shard.head_dim * (2 if shard.local_rope_theta else 1)
    rotating = max(3 * queries, queries + 3 * keys)
    attending = held + sines + (max(rotating, 4 * queries + keys) if shard.window else rotating)
    if not shard.linear:
        return attending
    (_, projected), _ = shard.linear.linears(shard.hidden_size)
    return max(attending, inputs + projected + chunked)


def _chunk_elements(linear: LinearAttention, num_tokens: int) -> float:
    """Return the fp32 elements per token that torch keeps of a gated delta layer, for rows of `num_tokens` tokens.

    Rows are padded to whole chunks (`runtime.model.delta_rule`). In addition to the rule, the convolution
    keeps its inputs, its outputs and their activation.
    """
    chunk = min(linear.chunk_tokens, num_tokens)
    padding = -(-num_tokens // chunk) * chunk / num_tokens
    return padding * linear.rule_elements(chunk) + 3 * linear.conv_size


def _shard_key(layout: Layout) -> tuple[int, bool, int, int, int]:
    """Return the properties of a layout that `shard_sizes` depends on."""
    return layout.tp, layout.sp, layout.ep, layout.expert_replicas, layout.fold_size


def _dispatched_elements(shard: ModelSpec, imbalance: float, fold_size: int) -> float:
    """Return the elements per token dispatched to its experts and combined from them.

    Experts that are sharded by tensor parallelism hold them on all of their ranks, whole experts on one rank only.
    """
    experts = shard.experts
    copies = 2 * imbalance * experts.experts_per_token / fold_size if experts else 0.0
    return copies * shard.hidden_size * (shard.expert_layers_share if shard.layer_kinds else 1)


class LayoutMemory:
    """Bytes of one stage on one layout under any schedule."""

    def __init__(
        self,
        stage: Stage,
        model: ModelSpec,
        layout: Layout,
        workload: Workload,
        *,
        element_bytes: int,
        operators: Operators,
    ) -> None:
        kind = GenerationMemory if stage.generates else RankMemory[float]
        sizes = shard_sizes(model, layout, workload, element_bytes, operators)
        shards = sharded(model, layout)
        self._ranks = [
            kind(stage, shards, part, sizes, workload=workload, element_bytes=element_bytes, operators=operators)
            for part in shards.parts
        ]
        self._bytes_by_schedule: Memo[Schedule, Bytes] = Memo()

    def bytes(self, schedule: Schedule) -> Bytes:
        """Return the same totals as `memory`, without terms."""
        return self._bytes_by_schedule.memoize(schedule, lambda: self._bytes(schedule))

    def memory(self, schedule: Schedule) -> Memory:
        """Return the memory of the fullest pipeline stage, with the largest host memory of any stage."""
        per_rank = self.of_stages(schedule)
        fullest = max(per_rank, key=lambda memory: memory.peak_bytes)
        host = max((memory.host for memory in per_rank), key=lambda cost: cost.total)
        return fullest if fullest.host is host else replace(fullest, host=host)

    def of_stages(self, schedule: Schedule) -> list[Memory]:
        """Return the memory of each pipeline stage, of those that differ."""
        return [rank.memory(schedule) for rank in self._ranks]

    def kv_cache_bytes(self, schedule: Schedule) -> float:
        """Return the bytes of the largest KV cache of any rank; 0 for a stage that does not generate."""
        return max(rank.kv_cache_bytes(schedule) for rank in self._ranks)

    def _bytes(self, schedule: Schedule) -> Bytes:
        per_rank = [Bytes(*rank.totals(schedule, rank.state(schedule.offload))) for rank in self._ranks]
        fullest = max(per_rank, key=lambda rank_bytes: math.ceil(rank_bytes.peak))
        return fullest._replace(host=max([rank_bytes.host for rank_bytes in per_rank]))


def bytes_of_choices(
    stage: Stage,
    shards: ShardedModel[FloatArray],
    choices: ChoiceTable,
    workload: Workload,
    *,
    element_bytes: int,
    operators: Operators,
) -> BytesColumns:
    """Return the bytes of several choices of a stage that does not generate; see `LayoutMemory.bytes` for one."""
    sizes: dict[object, list[float]] = {}
    for layout in choices.layouts:  # many have the same shard
        if (key := _shard_key(layout)) not in sizes:
            sizes[key] = field_values(shard_sizes(shards.model, layout, workload, element_bytes, operators))
    size_columns = ShardSizes(
        *choices.layout.expand_to_choices([sizes[_shard_key(layout)] for layout in choices.layouts])
    )
    ranks = [
        RankMemory(
            stage, shards, part, size_columns, workload=workload, element_bytes=element_bytes, operators=operators
        )
        for part in shards.parts
    ]
    per_rank = [BytesColumns(*rank.totals(choices, rank.state_of_each(choices))) for rank in ranks]
    fullest_rank = np.array([np.ceil(rank_bytes.peak) for rank_bytes in per_rank]).argmax(axis=0)
    fullest = BytesColumns(*(np.choose(fullest_rank, columns) for columns in zip(*per_rank, strict=True)))
    return fullest._replace(host=np.max([rank_bytes.host for rank_bytes in per_rank], axis=0))


@dataclass(frozen=True)
class _State(Generic[N]):
    """Weights and optimizer state: the terms that stay on the device, those that are offloaded while the stage does not
    run, and the bytes of the resident weights that may be shared with another stage."""

    resident: list[Addend[N]]
    weights: N
    offloaded: list[Addend[N]]


@dataclass(frozen=True)
class _WorkingMemory(Generic[N]):
    """Terms of a stage besides its state: `cached` stays between its runs, and `running` is freed after each run."""

    cached: list[Addend[N]]
    running: list[Addend[N]]


class RankMemory(Generic[N]):
    """Memory of a rank of one pipeline stage, in one layout or in those of several choices."""

    def __init__(
        self,
        stage: Stage,
        shards: ShardedModel[N],
        part: StagePart[N],
        sizes: ShardSizes[N],
        *,
        workload: Workload,
        element_bytes: int,
        operators: Operators,
    ) -> None:
        self._stage, self._model, self._workload, self._size = stage, shards.model, workload, element_bytes
        self._is_fused, self._logit_bytes = operators.is_fused, operators.logit_bytes
        self._frees_windows, self._latent_copies = operators.frees_windows, operators.latent_copies
        self._process_bytes = operators.process_bytes
        self._layout: Degrees[N] = shards.layout
        self._shards: ShardedModel[N] = shards
        self._part: StagePart[N] = part
        self._sizes: ShardSizes[N] = sizes
        self._rows: N = -(-workload.batch_size // shards.layout.dp)
        self._states: Memo[Offload, _State[N]] = Memo()
        self._working: Memo[Schedule, _WorkingMemory[N]] = Memo()

    def memory(self: RankMemory[float], schedule: Schedule) -> Memory:
        state: _State[float] = self.state(schedule.offload)
        working: _WorkingMemory[float] = self._known_working_memory(schedule)
        offloaded, experience = cost_of(state.offloaded), TermSums[float]()
        experience.add(DISTRIBUTIONS, self._experience_bytes())
        return Memory(
            resident=cost_of([*state.resident, *working.cached]),
            transient=offloaded + cost_of(working.running),
            host=offloaded + cost_of(experience.addends),
        )

    def totals(self, settings: PassSettings[N], state: _State[N]) -> tuple[N, N, N, N]:
        """Return the resident bytes, those of weights among them, the transient bytes, and those in host memory."""
        working: _WorkingMemory[N] = self._known_working_memory(settings)
        return (
            _total(state.resident + working.cached),
            state.weights,
            _total(state.offloaded + working.running),
            _total(state.offloaded) + self._experience_bytes(),
        )

    def kv_cache_bytes(self, _schedule: Schedule) -> float:
        """Return the bytes of the KV cache of a stage that generates; 0 for all others."""
        return 0.0

    def state(self, offload: Offload) -> _State[N]:
        """Return the state of the stage with one kind of offload. Raises BadInput if it has no such state."""
        return self._states.memoize(offload, lambda: self._make_state(offload))

    def state_of_each(self: RankMemory[FloatArray], choices: ChoiceTable) -> _State[FloatArray]:
        """Return the state of several choices, each with its own kind of offload."""
        totals = np.zeros((3, len(choices)))
        for offload in choices.offloads:
            state = self.state(offload)
            zero = 0 * state.weights
            with_offload = np.array([_total(state.resident) + zero, state.weights, _total(state.offloaded) + zero])
            totals = np.where(choices.has_offload(offload), with_offload, totals)
        resident, weights, offloaded = totals
        return _State([("state", resident, Source.ANALYTIC)], weights, [("state", offloaded, Source.ANALYTIC)])

    def _make_state(self, offload: Offload) -> _State[N]:
        offloaded: TermSums[N] = offloaded_state(self._stage, self._shards, offload, self._part, self._size)
        weights: TermSums[N] = self._weights()
        optimizer: TermSums[N] = optimizer_state(self._stage, self._layout, self._part, self._size)
        names = {name for name, _, _ in offloaded.addends}
        resident: list[Addend[N]] = [a for a in weights.addends + optimizer.addends if a[0] not in names]
        shareable: list[Addend[N]] = [addend for addend in resident if addend[0] == WEIGHTS]
        weights_bytes: N = _total(shareable) + 0 * self._part.num_params
        return _State(resident, weights_bytes, offloaded.addends)

    def _weights(self) -> TermSums[N]:
        """Return the weight copy of this rank.

        Every rank counts the parameters of the fullest pipeline stage, because another stage that shares the copy may
        need the most memory on another rank.
        """
        return weight_copy(self._shards.max_params + weight_params(self._model), self._size)

    def _known_working_memory(self, settings: PassSettings[N]) -> _WorkingMemory[N]:
        """Return the working memory; that of a single schedule is cached, and does not depend on what is offloaded."""
        if not isinstance(settings, Schedule):
            return self._working_memory(settings)
        in_place = replace(settings, offload=Offload.NONE) if settings.offload is not Offload.NONE else settings
        return self._working.memoize(in_place, lambda: self._working_memory(settings))

    def _working_memory(self, settings: PassSettings[N]) -> _WorkingMemory[N]:
        passes: TermSums[N] = self._training_memory(settings) if self._stage.trains else self._forward_memory(settings)
        running: list[Addend[N]] = self._streaming_cache(settings) + passes.addends
        return _WorkingMemory([], self._or_larger_weight_buffer(running))

    def _or_larger_weight_buffer(self, running: list[Addend[N]]) -> list[Addend[N]]:
        """Return the terms of a running stage or, if it is larger, the buffer for weights that other ranks send.

        The two are never alive at the same time. In a refit all trained weights arrive before they overwrite the old
        ones. After an update gloo gathers the weights of all replicas into a separate buffer; NCCL does so in place.
        """
        is_gathered = self._stage.trains and not self._is_fused
        if not self._stage.needs_refit and not is_gathered:
            return running
        name = REFIT_BUFFER if self._stage.needs_refit else GATHERED_WEIGHTS
        buffer_bytes, running_bytes = self._part.trained.num_params * self._size, _total(running)
        if isinstance(buffer_bytes, np.ndarray):
            return [("working memory", maximum(buffer_bytes, running_bytes), Source.ANALYTIC)]
        return [(name, buffer_bytes, Source.ANALYTIC)] if buffer_bytes > running_bytes else running

    def _streaming_cache(self, settings: PassSettings[N]) -> list[Addend[N]]:
        """Return the KV cache of a stage that streams: blocks for as many sequences of maximum length as it has rows,
        plus one spare block."""
        if not np.any(settings.chunk_tokens):
            return []
        blocks = self._rows * num_blocks_for(self._workload.max_tokens)
        num_bytes = where(settings.chunk_tokens > 0, self._cache_bytes(blocks, self._rows), 0 * self._rows)
        tally = TermSums[N]()
        tally.add("kv cache", num_bytes)
        return tally.addends

    def _cache_bytes(self, num_blocks: N, num_rows: N) -> N:
        """Return the bytes of the KV cache, with a spare block in each layer.

        In engines that free them, layers with a sliding window keep only the blocks of a row that the window touches
        (vLLM, hybrid KV cache manager). Layers with a state keep one state for each row, and `SPARE_STATES` more.
        """
        part, window = self._part, self._model.window
        full_blocks = part.num_full_layers * (num_blocks + 1)
        states = part.num_linear_layers * (num_rows + SPARE_STATES) * self._sizes.state_bytes
        if not window:
            return full_blocks * self._sizes.block_bytes + states
        window_blocks = num_blocks + 1
        if self._frees_windows:
            window_blocks = minimum(num_blocks, num_rows * (num_blocks_for(window.num_tokens) + 1)) + 1
        return (full_blocks + part.num_window_layers * window_blocks) * self._sizes.block_bytes + states

    def _forward_memory(self, settings: PassSettings[N]) -> TermSums[N]:
        tokens = self._micro_batch_tokens(settings)
        tally = TermSums[N]()
        tally.add("working set", tokens * self._sizes.working_bytes)
        self._add_images(tally, tokens * self._layout.cp, self._least_row_tokens(settings))
        self._add_capped_scores(tally, tokens, trains=False)
        self._add_gathered(tally, tokens, trains=False)
        self._add_logits(tally, tokens, trains=False)
        return tally

    def _training_memory(self, settings: PassSettings[N]) -> TermSums[N]:
        """Return the activations of every micro-batch in flight, and the logits of one.

        Micro-batches are counted as if every row had the maximum length: with shorter rows a token cap may make more
        micro-batches, but they have fewer tokens in total. Full recomputation saves the input of each layer, and holds
        all activations of one layer at a time.
        """
        tokens, layout, longest = self._micro_batch_tokens(settings), self._layout, self._workload.max_tokens
        rows = -(-self._workload.batch_size // (self._workload.num_minibatches * layout.dp))
        max_tokens = where(
            settings.micro_batch_tokens > 0, settings.micro_batch_tokens, settings.micro_batch_size * longest
        )
        num_micro_batches = -(-rows * longest // max_tokens)
        in_flight = micro_batches_in_flight(layout, self._part.num_stages_to_end, num_micro_batches)
        sizes, num_layers, is_recomputed = self._sizes, self._part.num_layers, settings.is_recomputed > 0
        kept_bytes = where(settings.is_attention_recomputed > 0, sizes.kept_without_attention_bytes, sizes.kept_bytes)
        tally = TermSums[N]()
        tally.add("activations", in_flight * tokens * num_layers * where(is_recomputed, sizes.inputs_bytes, kept_bytes))
        tally.add("working set", where(is_recomputed, tokens * kept_bytes, 0 * tokens))
        if not self._is_fused:
            unfused = where(is_recomputed, tokens + 0 * in_flight, in_flight * tokens * num_layers)
            tally.add("unfused operators", unfused * sizes.unfused_bytes)
            tally.add("backward working set", tokens * sizes.backward_bytes)
        self._add_images(tally, tokens * self._layout.cp, self._least_row_tokens(settings))
        self._add_capped_scores(tally, tokens, trains=True)
        self._add_gathered(tally, tokens, trains=True)
        self._add_logits(tally, tokens, trains=True)
        return tally

    def _micro_batch_tokens(self, settings: PassSettings[N]) -> N:
        """Return the maximum number of tokens of a rank in one pass.

        A row of a pass is a whole sequence or its context-parallel shard; in a stage that streams, it is a prompt or a
        chunk of a response. A token cap applies to all context-parallel ranks together.
        """
        workload, cp = self._workload, self._layout.cp
        chunk = minimum(settings.chunk_tokens, workload.response.max)
        whole = context_parallel_tokens(workload.max_tokens + 0 * cp, cp)
        longest = where(chunk > 0, maximum(chunk, workload.prompt.max), whole)
        capped = context_parallel_tokens(settings.micro_batch_tokens, cp)
        return where(settings.micro_batch_tokens > 0, capped, settings.micro_batch_size * longest)

    def _least_row_tokens(self, settings: PassSettings[N]) -> N:
        """Return the fewest tokens of a row of a pass that its images are counted with: those of a prompt alone if the
        stage streams or a cap of tokens lets short rows share a pass, else those of the longest sequence."""
        longest = self._workload.max_tokens + 0 * settings.micro_batch_size
        are_short = (settings.chunk_tokens > 0) | (settings.micro_batch_tokens > 0)
        return where(are_short, self._workload.prompt.max, longest)

    def _add_images(self, tally: TermSums[N], tokens: N, row_tokens: N) -> None:
        """Add what is alive while the images of a pass of `tokens` tokens in rows of `row_tokens` are encoded; a frozen
        encoder keeps nothing else. All images of a row are encoded on each of its context-parallel ranks."""
        encoder, images = self._model.image_encoder, self._workload.images
        if encoder and images:
            in_row = min(images.max_tokens, self._workload.prompt.max)
            tally.add(IMAGE_ENCODER, working_bytes(encoder, images, tokens * in_row / row_tokens, self._size))

    def _add_gathered(self, tally: TermSums[N], tokens: N, *, trains: bool) -> None:
        """Add the gathered keys and values of one layer from all context-parallel ranks.

        They are not saved: the backward pass gathers them again.
        """
        cp = self._layout.cp
        num_bytes = tokens * cp * self._sizes.cached_elements * self._size * _GATHERED_COPIES[trains]
        tally.add("gathered keys and values", where(cp > 1, num_bytes, 0 * num_bytes))

    def _add_capped_scores(self, tally: TermSums[N], tokens: N, *, trains: bool) -> None:
        """Add the scores of one block of queries in a layer that caps them, or that has sinks."""
        if not (self._model.attention_cap or self._model.attention_sinks):
            return
        pairs = tokens * self._sizes.capped_heads
        scores = minimum(pairs * self._workload.max_tokens, maximum(_MIN_BLOCK_QUERIES * pairs, _BLOCK_SCORES))
        tally.add("capped scores", scores * _FP32_BYTES * _CAPPED_COPIES[trains])

    def _add_logits(self, tally: TermSums[N], tokens: N, *, trains: bool) -> None:
        """Add the logits of a micro-batch and one chunk of them in fp32; in training also their gradient, twice if they
        are capped: before and after the cap. With a sampling mask only the logits of kept tokens are converted.

        In training, the bytes per logit of another framework replace all of these.
        """
        if self._model.scalar_head:
            return
        elements = tokens * self._sizes.vocab_size
        num_kept = self._workload.kept_tokens if KEPT_TOKENS in self._stage.reads else 0
        copies = _LOGIT_CHUNK_COPIES if self._is_fused or not trains else _LOGIT_CHUNK_GRADIENT_COPIES
        chunk_bytes = _FP32_BYTES * copies * minimum(elements, _LOGIT_CHUNK_ELEMENTS)
        if num_kept:
            chunk_bytes = 0 * chunk_bytes
            self._add_sampling_mask(tally, tokens * num_kept * KEPT_LOGIT_BYTES)
        gradients = trains * (2 if self._model.logits_cap else 1)
        if self._stage.top_tokens:
            self._add_distributions(tally, tokens, trains=trains)
        num_bytes = elements * (1 + gradients) * self._size + chunk_bytes
        if trains and self._logit_bytes:
            num_bytes = elements * self._logit_bytes
        tally.add("logits", where(self._part.is_last, num_bytes, 0 * num_bytes))

    def _add_sampling_mask(self, tally: TermSums[N], pass_bytes: N) -> None:
        """Add the sampling mask of a stage that computes log-probabilities: what a pass computes with it on the last
        pipeline stage and, on a CPU, the sets of the whole batch and those of a replica's rows, one for each token.

        On a GPU the sets of the batch are in the memory of the host, which no plan counts.
        """
        num_bytes = where(self._part.is_last, pass_bytes, 0 * pass_bytes)
        if not self._is_fused:
            workload = self._workload
            set_bytes = workload.kept_tokens * _KEPT_TOKEN_BYTES
            num_bytes = num_bytes + workload.batch_size * workload.sampled_lengths.mean * set_bytes
            num_bytes = num_bytes + self._rows * workload.mean_tokens * set_bytes
        tally.add(SAMPLING_MASK_BYTES, num_bytes)

    def _add_distributions(self, tally: TermSums[N], tokens: N, *, trains: bool) -> None:
        """Add the outcomes of the teachers' distributions of a micro-batch, one more than the tokens of each, and in
        training their gradient of the logits, which is beside that of the sampled tokens."""
        per_outcome = _STUDENT_OUTCOME_BYTES if trains else _TEACHER_OUTCOME_BYTES
        outcomes = tokens * self._stage.num_distributions * (self._stage.top_tokens + 1)
        num_bytes = per_outcome * outcomes + trains * tokens * self._sizes.vocab_size * self._size
        tally.add(DISTRIBUTIONS, where(self._part.is_last, num_bytes, 0 * num_bytes))

    def _experience_bytes(self) -> float:
        """Return the bytes of the teachers' distributions over a whole batch of responses of mean length, which a rank
        that trains has in host memory."""
        stage, workload = self._stage, self._workload
        if not stage.trains or not stage.top_tokens:
            return 0.0
        fields = (field_type(field) for field in stage.reads)
        per_sequence = sum(
            field.num_values(0.0, workload.response_lengths.mean, stage.top_tokens) * field.num_bytes
            for field in fields
            if field.distributions
        )
        return workload.batch_size * per_sequence


ENGINE_PROCESS = "engine process"
"""Name of the term for the process of an engine without its model."""

ENGINE_WEIGHTS = "weights of the engine"
"""Name of the term for the copy of the weights in the process of an engine."""

WEIGHT_BUCKET_BYTES = 64 * 2**20
"""Bytes of weights in transit to an engine at a time, unless a single tensor is larger."""


class GenerationMemory(RankMemory[float]):
    """Memory of a rank of a generation stage."""

    def _weights(self) -> TermSums[float]:
        """Return the weight copy of this rank. An 8-bit copy is never shared, so it counts this rank's parameters."""
        if not self._stage.is_quantised:
            return super()._weights()
        linears = linears_of(self._shard)
        quantised = self._part.num_layers * linears.num_weights
        tally = TermSums[float]()
        others = self._part.num_params - quantised + weight_params(self._model)
        tally.add(WEIGHTS, others * self._size + quantised)
        tally.add("weight scales", self._part.num_layers * linears.num_outputs * SCALE_BYTES)
        return tally

    def _working_memory(self, settings: PassSettings[float]) -> _WorkingMemory[float]:
        """Return the KV cache, with blocks for the sequences in flight, and the working memory of a pass."""
        assert isinstance(settings, Schedule), settings
        num_blocks, num_slots = self._blocks(settings), self._slots(settings)
        cache, running = TermSums[float](), self._generation_memory(settings, num_blocks, num_slots).addends
        cache.add("kv cache", self._cache_bytes(num_blocks, num_slots))
        if self._process_bytes:
            process = TermSums[float]()
            self._add_process(process)
            return _WorkingMemory(process.addends, self._or_larger_weight_buffer([*cache.addends, *running]))
        if settings.keeps_in_flight:
            return _WorkingMemory(cache.addends, self._or_larger_weight_buffer(running))
        return _WorkingMemory([], self._or_larger_weight_buffer([*cache.addends, *running]))

    def kv_cache_bytes(self, schedule: Schedule) -> float:
        """Return the bytes of the KV cache."""
        return self._cache_bytes(self._blocks(schedule), self._slots(schedule))

    def _add_process(self, tally: TermSums[float]) -> None:
        """Add the memory of an engine's own process beside its KV cache, which it frees after each run of the stage:
        the process, its copy of the weights, and the weights in transit, in shared memory and as a copy."""
        weights_bytes = (self._part.num_params + weight_params(self._model)) * self._size
        largest_tensor = self._model.padded_vocab_size * self._model.hidden_size * self._size
        tally.add(ENGINE_PROCESS, self._process_bytes)
        tally.add(ENGINE_WEIGHTS, weights_bytes)
        tally.add("weights in transit", 2 * min(weights_bytes, max(WEIGHT_BUCKET_BYTES, largest_tensor)))

    @cached_property
    def _shard(self) -> ModelSpec:
        return self._model.shard(int(self._layout.tp))

    def _blocks(self, schedule: Schedule) -> int:
        return self._workload.cache_need(schedule, int(self._layout.dp)).blocks

    def _slots(self, schedule: Schedule) -> float:
        """Return the number of slots that can hold a sequence."""
        in_flight = schedule.batches_in_flight * self._rows - (-schedule.overcommit // self._layout.dp)
        return min(schedule.generation_slots, in_flight)

    def _generation_memory(self, schedule: Schedule, num_blocks: int, num_slots: float) -> TermSums[float]:
        """Return the larger of a prefill's working set and that of attention in a decode step, plus sampling. A decode
        step has a row for each live sequence, and one for each token of its draft. Sampling masks have a place for
        each kept token of each slot and, on a CPU, of the responses of the replica."""
        slot_group = int(-(-num_slots // self._layout.pp))  # pipeline stages work on different slot groups
        token_bytes = max(self._sizes.working_bytes, self._latent_prefill_bytes)
        num_rows = slot_group * (1 + schedule.draft_tokens)
        longest_pass = max(max_prefill_tokens(slot_group, self._workload.prompt.max), num_rows)
        tally = TermSums[float]()
        tally.add("working set", max(longest_pass * token_bytes, num_blocks * self._decode_attention_bytes))
        self._add_images(tally, longest_pass, self._workload.prompt.max)
        self._add_capped_scores(tally, longest_pass, trains=False)
        if self._part.is_last:
            tally.add("logits", num_rows * self._model.padded_vocab_size * (self._size + _SAMPLING_BYTES))
        if num_kept := self._workload.kept_tokens:
            num_bytes = float(num_rows * num_kept * _KEPT_SAMPLE_BYTES)
            if not self._is_fused:
                places = num_slots * self._workload.max_response + self._rows * self._workload.sampled_lengths.mean
                num_bytes += places * num_kept * _KEPT_TOKEN_BYTES
            tally.add(SAMPLING_MASK_BYTES, num_bytes)
        return tally

    @cached_property
    def _latent_prefill_bytes(self) -> float:
        """Return the bytes per token of the heads of latent attention in a prefill whose queries have the size of the
        cached vectors."""
        if not self._shard.latent or self._latent_copies == 1:
            return 0.0
        num_keys, queries, size = self._shard.cached_heads()
        return _PREFILL_HEADS * num_keys * (queries + 2) * size * self._size

    @cached_property
    def _decode_attention_bytes(self) -> float:
        """Return the bytes per KV block in a decode step of one layer.

        They are a contiguous copy of its keys and values, scores in fp32 and in the model's type, and two fp32 sums of
        values.
        """
        shard = self._shard
        scores = BLOCK_TOKENS * shard.num_heads * (_FP32_BYTES + self._size)
        sums = 2 * shard.num_heads * shard.cached_heads().size * _FP32_BYTES
        return self._sizes.block_bytes + scores + sums


def _total(addends: Sequence[Addend[N]]) -> N:
    return sum_of([amount for _, amount, _ in addends])


_GRADIENT_BYTES = 4
"""Megatron's DistributedDataParallel keeps and reduces gradients in fp32 (`grad_reduce_in_fp32`)."""

_MOMENT_BYTES = 8
"""Adam's two fp32 moments per parameter."""

_MAIN_WEIGHT_BYTES = 4
"""The fp32 weight that the optimizer updates when the model computes in bf16."""


def weight_copy(num_params: N, element_bytes: int) -> TermSums[N]:
    """Return the weight copy of a rank that holds `num_params` parameters."""
    tally = TermSums[N]()
    tally.add(WEIGHTS, num_params * element_bytes)
    return tally


def optimizer_state(stage: Stage, layout: Degrees[N], part: StagePart[N], element_bytes: int) -> TermSums[N]:
    """Return what a training stage holds besides its weights: all fp32 gradients, and a shard of the optimizer state.

    The state is sharded over dp x cp ranks: context-parallel ranks hold the same weights, as replicas do. The state of
    an expert is sharded over the replicas that hold it. Without experts the weights, gradients and state are together
    2 + 4 + (4 + 8)/(dp x cp) bytes per parameter in bf16, and 4 + 4 + 8/(dp x cp) in fp32 (Megatron-core, docs of the
    distributed optimizer; Rajbhandari et al., ZeRO stage 1, arXiv:1910.02054, section 5.1). With an adapter only its
    parameters have gradients and state.
    """
    tally, trained = TermSums[N](), part.trained
    if stage.trains:
        tally.add("gradients", trained.num_params * _GRADIENT_BYTES)
        num_params, sharers = trained.distinct_params(layout.expert_replicas), layout.dp * layout.cp
        if element_bytes < _MAIN_WEIGHT_BYTES:
            tally.add("main weights", num_params * _MAIN_WEIGHT_BYTES / sharers)
        tally.add("moments", num_params * _MOMENT_BYTES / sharers)
    return tally


def offloaded_state(
    stage: Stage, shards: ShardedModel[N], offload: Offload, part: StagePart[N], element_bytes: int
) -> TermSums[N]:
    """Return what is offloaded while the stage does not run. Raises BadInput if the stage has no such state."""
    if offload is Offload.WEIGHTS:
        if stage.is_trained:
            raise BadInput(f"{stage.name}: offload=weights is for roles that are not trained; use none.")
        return weight_copy(part.num_params + weight_params(shards.model), element_bytes)
    if offload is Offload.OPTIMIZER:
        if not stage.trains:
            raise BadInput(f"{stage.name}: offload=optimizer is for stages that train; use none.")
        return optimizer_state(stage, shards.layout, part, element_bytes)
    return TermSums()
