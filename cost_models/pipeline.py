"""Seconds and bytes of a forward or training stage on one layout: micro-batches pass through pipeline stages
(forward-only, 1F1B or interleaved), followed by optimizer updates, offload and reload.

With m micro-batches and p pipeline stages, the slowest stage works on all micro-batches and waits for the first one
to pass the other stages, forward and backward: bubble = the sum of the other stages' times of one micro-batch. With
equal stages, busy + bubble = (m + p - 1)/m x busy (Narayanan et al., arXiv:2104.04473, section 2.2). Embedding and
head are counted on the last stage, which is then the slowest unless it holds fewer layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Generic, NamedTuple, TypeAlias

import numpy as np

from meshwright.cost_models.communication import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    SEND_RECEIVE,
    Groups,
    Network,
)
from meshwright.cost_models.compute import AnalyticShard, PassColumns, Passes, PassSeconds, Shard
from meshwright.cost_models.cost import Addend, Source, TermSums, source_where
from meshwright.cost_models.image_costs import IMAGE_ENCODER
from meshwright.cost_models.memory_cost import DISTRIBUTIONS, LayoutMemory
from meshwright.cost_models.micro_batches import MicroBatches
from meshwright.cost_models.params import ShardedModel, StagePart
from meshwright.cost_models.protocol import Bytes, Memo
from meshwright.profiles.choice_table import Degrees, PassSettings
from meshwright.profiles.elementwise import FloatArray, IntArray, N, maximum, minimum, sum_of, where
from meshwright.profiles.frameworks import Framework
from meshwright.profiles.schedule import Offload, Recompute, Schedule
from meshwright.profiles.stages import Stage
from meshwright.profiles.table import TimedPass

MESSAGES, BUBBLE = "pipeline messages", "pipeline bubble"
"""Names of the terms that only a pipeline of several stages has."""

GATHERS = "weight gathers"
"""Name of the term that only weights sharded over replicas have."""

GRADIENTS, OPTIMIZER, PARAMETERS, TIED = "gradient reduction", "optimizer", "parameter gather", "tied embedding"
UPDATE = GRADIENTS, OPTIMIZER, PARAMETERS, TIED
"""Names of the terms of an optimizer update, at which all replicas synchronize."""

_LOGPROB_BYTES = (4, 12)
"""Bytes per token of the two reductions of vocabulary-parallel log-probabilities: the maximum, then three sums."""

_KEY_BYTES, _FP32_BYTES = 8, 4
"""Bytes of the key that orders a token among the likeliest ones (`runtime.model.distributions`), and of its
log-probability."""


Batches: TypeAlias = tuple[MicroBatches, ...]


class BatchCompute(NamedTuple, Generic[N]):
    """Compute of some micro-batches: their number and mean tokens, and summed over them the seconds of one layer, of
    embedding and head (`ends`), and of recomputing one layer (`recompute`)."""

    num_batches: N
    mean_tokens: N
    layer: N
    ends: N
    recompute: N
    source: Source = Source.ANALYTIC
    recompute_source: Source = Source.ANALYTIC

    @property
    def amounts(self) -> tuple[N, N, N, N, N]:
        return self.num_batches, self.mean_tokens, self.layer, self.ends, self.recompute


@dataclass(frozen=True, eq=False)
class RankCompute:
    """Compute of one rank on micro-batches, shared by layouts that differ only in pp and dp."""

    shard: Shard
    analytic: AnalyticShard
    _times: Memo[tuple[TimedPass, Batches], PassSeconds[float]] = field(default_factory=Memo)

    def batch_compute(self, batches: Batches, recompute: Recompute, *, trains: bool) -> BatchCompute[float]:
        num_batches, total_tokens = 0.0, 0.0
        for number, rows, tokens in batches:
            num_batches += number
            total_tokens += number * rows * tokens
        layer, ends, source = self._time(TimedPass.TRAIN if trains else TimedPass.FORWARD, batches)
        recompute_seconds, recompute_source = (
            self._recompute_seconds(batches, recompute) if trains else (0.0, Source.ANALYTIC)
        )
        mean_tokens = total_tokens / num_batches
        return BatchCompute(num_batches, mean_tokens, layer, ends, recompute_seconds, source, recompute_source)

    def compute_of_each(self, passes: PassColumns, sizes: IntArray, *, trains: bool) -> FloatArray:
        """Return the compute of several ways to split a batch, [amounts, splits].

        `passes` has the micro-batches of one split after the other, `sizes` their numbers, [splits]. The first amounts
        are the `amounts` of `BatchCompute`, with full recomputation; the last is the seconds of recomputing core
        attention alone.
        """
        number, rows, tokens, _ = passes
        starts = np.cumsum(sizes) - sizes

        def totals(of_each: FloatArray) -> FloatArray:
            summed: FloatArray = np.add.reduceat(number * of_each, starts)
            return summed

        num_batches = totals(np.ones(len(number)))
        times = self.shard.each(TimedPass.TRAIN if trains else TimedPass.FORWARD, passes)
        whole, attention = np.zeros((2, len(sizes)))
        if trains:
            whole = totals(self.shard.each(TimedPass.FORWARD, passes).layer)
            attention = totals(self.analytic.attention(rows, tokens))
        mean_tokens = totals(rows * tokens) / num_batches
        return np.stack([num_batches, mean_tokens, totals(times.layer), totals(times.ends), whole, attention])

    def _recompute_seconds(self, batches: Batches, recompute: Recompute) -> tuple[float, Source]:
        """Return the seconds per layer of recomputation in training."""
        if recompute is Recompute.NONE:
            return 0.0, Source.ANALYTIC
        if recompute is Recompute.SELECTIVE:
            attention = self.analytic.attention
            return sum([number * attention(rows, tokens) for number, rows, tokens in batches]), Source.ANALYTIC
        time = self._time(TimedPass.FORWARD, batches)
        return time.layer, time.source

    def _time(self, timed: TimedPass, batches: Batches) -> PassSeconds[float]:
        passes: Passes = [(number, rows, tokens, 0) for number, rows, tokens in batches]
        return self._times.memoize((timed, batches), lambda: self.shard.total(timed, passes))


@dataclass(frozen=True, kw_only=True)
class Pipeline(Generic[N]):
    """Costs of one pass over a batch by one data-parallel replica, and of an optimizer update.

    Each cost is a number for one choice of a stage, or an array, [choices], for several. `image_seconds` are those of
    encoding the images of one row, and `distribution_seconds` those of a teacher's distributions over the response of
    one row, on a rank with the whole vocabulary.
    """

    stage: Stage
    shards: ShardedModel[N]
    settings: PassSettings[N]
    groups: Groups[N]
    network: Network
    element_bytes: int
    framework: Framework
    image_seconds: float = 0.0
    distribution_seconds: float = 0.0

    def addends(self, compute: BatchCompute[N]) -> list[Addend[N]]:
        """Return the seconds over the micro-batches, forward-only or 1F1B, without the optimizer.

        Collectives are costed at the mean micro-batch: they are linear in its tokens.
        """
        trains, pp = self.stage.trains, self.shards.layout.pp
        num_batches, mean_tokens = compute.num_batches, compute.mean_tokens
        per_layer, at_ends, tensor_source = self._tensor_seconds(mean_tokens)
        send, send_source = self._send_seconds(mean_tokens)
        routed, routed_source = self._routed_seconds(mean_tokens)
        gathered, gathered_source = self._context_seconds(mean_tokens)
        if trains and self.framework.overlapped_experts:
            computing = (compute.layer + compute.recompute) / num_batches
            routed = maximum(routed - computing, 0.0)
        exchanged = per_layer + routed + gathered
        layer_seconds = compute.layer + compute.recompute + num_batches * exchanged
        ends = compute.ends + num_batches * at_ends
        num_layers, has_ends = self.shards.layer_counts.slowest(layer_seconds, ends)
        tally = TermSums[N]()
        tally.add("layers", num_layers * compute.layer, compute.source)
        tally.add("embedding and head", compute.ends * has_ends, compute.source)
        tally.add("recomputation", num_layers * compute.recompute, compute.recompute_source)
        in_tensors = num_batches * (num_layers * per_layer + at_ends * has_ends)
        tally.add("tensor-parallel collectives", in_tensors, tensor_source)
        tally.add("expert-parallel collectives", num_batches * num_layers * routed, routed_source)
        tally.add("context-parallel collectives", num_batches * num_layers * gathered, gathered_source)
        exposed, gather_source = self._exposed_gathers(num_batches, layer_seconds)
        tally.add(GATHERS, num_layers * exposed, gather_source)
        tally.add(MESSAGES, num_batches * (1 + trains) * send, send_source)
        other_stages = maximum(pp - 1, 1)
        other_layers = (self.shards.model.num_layers - num_layers) / other_stages
        busy = other_layers * ((compute.layer + compute.recompute) / num_batches + exchanged)
        busy = busy + (1 - has_ends) * ends / num_batches / other_stages
        tally.add(BUBBLE, (pp - 1) * (busy + (1 + trains) * send), compute.source)
        return tally.addends

    def _exposed_gathers(self, num_batches: N, layer_seconds: N) -> tuple[N, Source]:
        """Return the seconds per layer of gathering sharded weights that compute does not hide, and their source.

        In every micro-batch the weights of a layer are gathered for its forward and for its backward pass, and its
        gradients are scattered, while the layers beside it compute: what takes longer decides (Zhao et al., PyTorch
        FSDP, arXiv:2304.11277, section 3.3; Rajbhandari et al., ZeRO, arXiv:1910.02054, section 7.2.2). Frozen weights
        have no gradients.
        """
        framework, trains = self.framework, self.stage.trains
        if not framework.sharded_weights:
            return 0 * layer_seconds, Source.ANALYTIC
        gathered, source = self._replica_collective(ALL_GATHER, self._layer_part, self.element_bytes)
        exchanged = (1 + trains) * gathered
        if trains:
            trained = self._layer_part.trained
            scattered, _ = self._replica_collective(REDUCE_SCATTER, trained, framework.gradient_bytes)
            exchanged = exchanged + scattered
        return maximum(num_batches * exchanged - layer_seconds, 0.0), source

    @cached_property
    def _layer_part(self) -> StagePart[N]:
        """The parameters of one layer on a rank, on average; experts are shared by fewer replicas than the rest."""
        model, layout = self.shards.model, self.shards.layout
        experts = model.expert_params_between(0, model.num_layers) / model.num_layers
        held = experts / layout.tp / layout.expert_replicas
        adapted = model.adapter_expert_params_between(0, model.num_layers) / model.num_layers
        adapted_held = adapted / layout.expert_replicas
        return replace(
            self.shards.fullest,
            num_params=(model.layer_params - experts) / layout.tp + held,
            expert_params=held,
            adapter_params=model.adapter_layer_params - adapted + adapted_held,
            adapter_expert_params=adapted_held,
        )

    def update_addends(self, optimizer: tuple[N, N], source: Source) -> list[Addend[N]]:
        """Return the seconds of one optimizer update, overlapped with compute only if the framework says so.

        `optimizer` has the seconds of an optimizer step for a layer, and for embedding and head, from `source`.
        Meshwright's own runtime is costed without overlap: its gradient reductions on a GPU do overlap, but how much
        time that hides has not been measured. The distributed optimizer reduces each rank's gradients once and gathers
        its weights once over the replicas and their context-parallel ranks (Rajbhandari et al., ZeRO, arXiv:1910.02054,
        section 7.1; Megatron-core `DistributedOptimizer`); without it gradients are all-reduced and every replica
        updates all weights. Where weights are sharded, both are part of each micro-batch
        (`_exposed_gathers`). A tied embedding on the first and the last pipeline stage is all-reduced between them
        (Narayanan et al., arXiv:2104.04473, section 3.1).
        """
        layout, model, framework = self.shards.layout, self.shards.model, self.framework
        layer_seconds, ends_seconds = optimizer
        sharers = layout.dp * layout.cp if framework.sharded_optimizer else 1
        num_layers, has_ends = self.shards.layer_counts.slowest(layer_seconds, ends_seconds)
        step = (num_layers * layer_seconds + ends_seconds * has_ends) / sharers
        part = self.shards.fullest.trained
        reduction = REDUCE_SCATTER if framework.sharded_optimizer else ALL_REDUCE
        tally = TermSums[N]()
        reduced, reduction_source = self._replica_collective(reduction, part, framework.gradient_bytes)
        if not framework.sharded_weights:
            tally.add(GRADIENTS, self._exposed_seconds(reduced, num_layers), reduction_source)
        tally.add(OPTIMIZER, step, source)
        if framework.sharded_optimizer and not framework.sharded_weights:
            gathered, gather_source = self._replica_collective(ALL_GATHER, part, self.element_bytes)
            tally.add(PARAMETERS, self._exposed_seconds(gathered, num_layers), gather_source)
        if model.tied_embeddings and not model.scalar_head and not model.adapter:
            embedding_bytes = framework.gradient_bytes * model.embedding_params / layout.tp
            summed, tied_source = self.network.seconds(ALL_REDUCE, self.groups.neighbours, embedding_bytes)
            tally.add(TIED, where(layout.pp > 1, summed, 0 * summed), tied_source)
        return tally.addends

    def _replica_collective(self, operation: str, part: StagePart[N], param_bytes: int) -> tuple[N, Source]:
        """Return the seconds of a collective over all replicas, plus one for experts that only some of them share."""
        is_spread = self.shards.layout.expert_replicas > 1
        expert_params = where(is_spread, part.expert_params, 0 * part.expert_params)
        common_bytes = param_bytes * (part.num_params - expert_params)
        seconds, source = self.network.seconds(operation, self.groups.data, common_bytes)
        expert_seconds, _ = self.network.seconds(operation, self.groups.expert_data, param_bytes * expert_params)
        return seconds + expert_seconds, source

    def _exposed_seconds(self, seconds: N, num_layers: N) -> N:
        """Return the seconds of a collective that compute does not hide: all of them or, if the framework overlaps
        reductions, those of one bucket (a layer)."""
        return seconds / num_layers if self.framework.overlapped_reduction else seconds

    def _tensor_seconds(self, num_tokens: N) -> tuple[N, N, Source]:
        """Return the tensor-parallel seconds of one micro-batch: per layer, and at embedding and head.

        A layer all-reduces the hidden state twice forward and twice backward (Shoeybi et al., arXiv:1909.08053,
        section 3). Under sequence parallelism each all-reduce is a reduce-scatter and an all-gather, and backward
        gathers the two inputs again for the weight gradients (Korthikanti et al., arXiv:2205.05198, section 4.2.2),
        unless an adapter is trained. Full recomputation repeats the two forward ones. A framework that splits a matmul
        into pieces hides a share of all exchanges of a layer (Wang et al., ASPLOS 2023).
        """
        tensor, trains, model = self.groups.tensor, self.stage.trains, self.shards.model
        is_sequence_parallel = self.shards.layout.sp
        hidden_bytes = num_tokens * model.hidden_size * self.element_bytes
        scattered, scatter_source = self.network.seconds(REDUCE_SCATTER, tensor, hidden_bytes)
        gathered, _ = self.network.seconds(ALL_GATHER, tensor, hidden_bytes)
        reduced, reduce_source = self.network.seconds(ALL_REDUCE, tensor, hidden_bytes)
        exchange = where(is_sequence_parallel, scattered + gathered, reduced)
        num_exchanges = self._num_tensor_blocks * (1 + trains + trains * self.settings.is_recomputed)
        per_layer = num_exchanges * exchange
        if model.adapter:
            per_layer = per_layer + self._adapter_seconds(model.adapter.rank, num_tokens)
        elif trains:
            per_layer = per_layer + where(is_sequence_parallel, self._num_tensor_blocks * gathered, 0 * gathered)
        at_ends = (1 + trains) * exchange
        if not model.scalar_head:
            for num_bytes in _LOGPROB_BYTES:
                at_ends = at_ends + self.network.seconds(ALL_REDUCE, tensor, num_bytes * num_tokens)[0]
        if self.stage.top_tokens:
            at_ends = at_ends + self._distribution_exchange(num_tokens)
        source = source_where(is_sequence_parallel, scatter_source, reduce_source)
        return per_layer * (1 - self.framework.hidden_exchanges), at_ends, source

    def _distribution_exchange(self, num_tokens: N) -> N:
        """Return the tensor-parallel seconds of the distributions of one micro-batch: the keys of the likeliest tokens
        of each rank are gathered by a teacher, and the log-probabilities of the selected tokens are reduced by all.

        Predictions of prompts are counted too, though none of them has a distribution.
        """
        tensor, number = self.groups.tensor, self.stage.num_distributions
        size = num_tokens * self.stage.top_tokens
        reduced = self.network.seconds(ALL_REDUCE, tensor, _FP32_BYTES * size)[0]
        if self.stage.trains:
            return number * reduced
        gathered = self.network.seconds(ALL_GATHER, tensor, _KEY_BYTES * size * self.shards.layout.tp)[0]
        return number * (reduced + gathered)

    @cached_property
    def _num_tensor_blocks(self) -> N:
        """Number of tensor-parallel blocks (attention, MLP) per layer, on average.

        Under sequence parallelism, a mixture-of-experts layer has only attention if tensor parallelism does not shard
        its experts and it has no shared expert.
        """
        model, layout = self.shards.model, self.shards.layout
        both = model.blocks_per_layer + 0 * layout.tp
        if model.experts is None or model.experts.shared_ffn_size:
            return both
        return where(layout.sp & (layout.fold_size > 1), both - model.expert_layers_share, both)

    def _adapter_seconds(self, rank: int, num_tokens: N) -> N:
        """Return the tensor-parallel seconds per layer for the low-rank activations of an adapter.

        A row-parallel linear shards A too, whose output is reduced forward; a column-parallel linear shards B, whose
        input gradient is reduced backward. Under sequence parallelism both have an all-gather and a reduce-scatter, one
        of them forward. Adapters of routed experts have none, since the dispatcher sums the outputs.
        """
        tensor, size = self.groups.tensor, num_tokens * rank * self.element_bytes
        trains, is_recomputed = self.stage.trains, self.settings.is_recomputed

        def exchange(operation: str, forward: float, backward: float) -> N:
            number = forward * (1 + trains * is_recomputed) + backward * trains
            return number * self.network.seconds(operation, tensor, size)[0]

        columns, rows = self.shards.model.adapter_exchanges
        scattered = exchange(ALL_GATHER, columns, rows) + exchange(REDUCE_SCATTER, rows, columns)
        return where(self.shards.layout.sp, scattered, exchange(ALL_REDUCE, rows, columns))

    def _routed_seconds(self, num_tokens: N) -> tuple[N, Source]:
        """Return the seconds per layer and micro-batch of dispatching tokens to their experts and combining them.

        Each is an all-to-all of one copy of the hidden state per expert of a token; backward does both again, and so
        does full recomputation. Under sequence parallelism a rank sends the copies of its own part of the tokens; if
        experts are sharded, copies instead of tokens are gathered and scattered around them, which is more bytes than
        `_tensor_seconds` counts (Megatron-core, `MoEAlltoAllTokenDispatcher`). Without sequence parallelism all ranks
        of a replica have the same tokens; if experts are not sharded, each rank sends only the copies for the experts
        on ranks with its own tensor-parallel rank in other replicas. All ranks wait for the busiest, which receives the
        most copies and sends as many back. A framework may send a token once for several of its experts
        (`_sent_copies`).
        """
        model, layout, trains = self.shards.model, self.shards.layout, self.stage.trains
        if model.experts is None:
            return 0 * num_tokens, Source.ANALYTIC
        hidden_bytes = num_tokens * model.hidden_size * self.element_bytes
        copies = model.experts.experts_per_token
        busiest = model.experts.imbalance(num_tokens * layout.expert_replicas, layout.ep)
        sent = self._sent_copies(copies)
        sent_bytes = busiest * sent * hidden_bytes / where(layout.sp, layout.tp, layout.fold_size)
        passed, source = self.network.seconds(ALL_TO_ALL, self.groups.experts, sent_bytes)
        has_gathered_copies = layout.sp & (layout.fold_size == 1)
        for operation in (ALL_GATHER, REDUCE_SCATTER):
            of_copies, of_tokens = (
                self.network.seconds(operation, self.groups.tensor, n * hidden_bytes)[0] for n in (copies, 1)
            )
            passed = passed + where(has_gathered_copies, (of_copies - of_tokens) / 2, 0 * passed)
        num_passes = 2 * (1 + trains + trains * self.settings.is_recomputed)
        is_routed = layout.sp | (layout.expert_replicas > 1)
        return where(is_routed, model.expert_layers_share * num_passes * passed, 0 * passed), source

    def _sent_copies(self, copies: int) -> N:
        """Return how often a token is sent: once for each of its experts or, with merged copies, once to each node that
        has any of them.

        Experts are on each of n nodes with equal probability, so that k experts are on n (1 - (1 - 1/n)^k) of them.
        Within a node merged copies are fewer, too, but their kernels reach less of the links: DeepEP 153 to 158 GB/s on
        H800 (its README), where NCCL's all-to-all of all copies reaches as much more.
        """
        size, per_node = self.groups.experts
        every = copies + 0 * size
        if not self.framework.merged_copies:
            return every
        nodes = -(-size // per_node)
        return where(nodes > 1, nodes * (1 - (1 - 1 / nodes) ** copies), every)

    def _context_seconds(self, num_tokens: N) -> tuple[N, Source]:
        """Return the context-parallel seconds per layer and micro-batch, for ranks with `num_tokens` tokens each.

        Forward gathers keys and values, as elements of the model's precision and for this rank's heads (Llama 3 report,
        arXiv:2407.21783, section 3.3.2). They are not kept, so backward gathers them again and reduce-scatters their
        gradients; recomputation repeats the forward gather.
        """
        layout, context = self.shards.layout, self.groups.context
        num_bytes = num_tokens * layout.cp * self.shards.model.cached_elements / layout.tp * self.element_bytes
        gather, source = self.network.seconds(ALL_GATHER, context, num_bytes)
        if not self.stage.trains:
            return gather, source
        scatter, _ = self.network.seconds(REDUCE_SCATTER, context, num_bytes)
        num_gathers = 2 + self.settings.is_recomputed + self.settings.is_attention_recomputed
        return num_gathers * gather + scatter, source

    def _send_seconds(self, num_tokens: N) -> tuple[N, Source]:
        """Return the seconds to send one hidden state to the next pipeline stage.

        Under sequence parallelism each rank sends its part. Without it a framework with scattered messages sends a part
        from each rank too, and gathers the parts on arrival (Narayanan et al., arXiv:2104.04473, section 4.1).
        """
        layout, is_scattered = self.shards.layout, self.framework.scattered_messages
        hidden_bytes = num_tokens * self.shards.model.hidden_size * self.element_bytes
        share = where(layout.sp | is_scattered, layout.tp, 1 + 0 * layout.tp)
        sent, source = self.network.seconds(SEND_RECEIVE, self.groups.neighbours, hidden_bytes / share)
        if is_scattered:
            gathered, _ = self.network.seconds(ALL_GATHER, self.groups.tensor, hidden_bytes)
            sent = sent + where(layout.sp, 0 * gathered, gathered)
        return where(layout.pp > 1, sent, 0 * sent), source


def interleaved(plain: Sequence[Addend[N]], layout: Degrees[N], num_batches: N) -> list[Addend[N]]:
    """Return the seconds of interleaved training with v = `layout.vpp` chunks per rank, from those of 1F1B (`plain`).

    Each micro-batch is sent v times as often. The first one passes 1/v of the other stages' layers, and as many
    messages as before, until the slowest stage has work (Narayanan et al., arXiv:2104.04473, section 2.2.2).
    """
    seconds_per_message = sum([amount for name, amount, _ in plain if name == MESSAGES]) / num_batches
    filling_seconds, vpp = (layout.pp - 1) * seconds_per_message, layout.vpp

    def in_chunks(name: str, amount: N) -> N:
        if name == MESSAGES:
            return vpp * amount
        return filling_seconds + (amount - filling_seconds) / vpp if name == BUBBLE else amount

    return [(name, in_chunks(name, amount), source) for name, amount, source in plain]


@dataclass(frozen=True)
class Updates(Generic[N]):
    """The optimizer updates of a step: their number, 0 for a stage that does not train, and the seconds of an optimizer
    step for a layer, and for embedding and head."""

    number: int
    layer: N
    ends: N
    source: Source


def step_addends(pipeline: Pipeline[N], compute: BatchCompute[N], updates: Updates[N], num_rows: N) -> list[Addend[N]]:
    """Return the seconds of a step without offload: of all updates, or of the one pass of a stage that does not train.

    `num_rows` are the rows of the fullest replica, per update if the stage trains. Their images are encoded before the
    first pipeline stage, in addition to what the slowest one computes.
    """
    one_pass: list[Addend[N]] = pipeline.addends(compute)
    if pipeline.image_seconds:
        one_pass.append((IMAGE_ENCODER, num_rows * pipeline.image_seconds, Source.ANALYTIC))
    if pipeline.distribution_seconds:
        layout = pipeline.shards.layout
        per_row = pipeline.distribution_seconds / (layout.tp * layout.cp)
        one_pass.append((DISTRIBUTIONS, num_rows * per_row, Source.ANALYTIC))
    if not updates.number:
        return one_pass
    update: list[Addend[N]] = pipeline.update_addends((updates.layer, updates.ends), updates.source)
    plain: list[Addend[N]] = [(name, updates.number * amount, source) for name, amount, source in one_pass + update]
    layout = pipeline.shards.layout
    if isinstance(layout.vpp, int) and layout.vpp == 1:
        return plain
    return interleaved(plain, layout, -(-num_rows // maximum(pipeline.settings.micro_batch_size, 1)))


@dataclass(frozen=True, kw_only=True)
class PipelineCosts:
    """Costs of one stage on one layout; `num_rows` are the rows of the fullest replica (per update if it trains).

    `compute_of` returns the compute of a schedule, `tail_of` the compute that remains after the last token if the stage
    streams, `pipeline_of` the pipeline under a schedule, `offload_addends` the seconds of an offload.
    """

    num_rows: int
    updates: Updates[float]
    pipeline_of: Callable[[Schedule], Pipeline[float]]
    compute_of: Callable[[Schedule], BatchCompute[float]]
    tail_of: Callable[[Schedule], BatchCompute[float]]
    offload_addends: Callable[[Offload], Sequence[Addend[float]]]
    memory: LayoutMemory
    _known: Memo[tuple[int, int, Recompute, int], list[Addend[float]]] = field(default_factory=Memo)
    _offloads: Memo[Offload, Sequence[Addend[float]]] = field(default_factory=Memo)

    def addends(self, schedule: Schedule) -> list[Addend[float]]:
        """Return the seconds of one step. Raises BadInput for a schedule that offloads state which the stage does not
        have, or that streams chunks to a stage which cannot stream."""
        key = schedule.micro_batch_size, schedule.micro_batch_tokens, schedule.recompute, schedule.chunk_tokens
        plain = self._known.memoize(key, lambda: self._plain_addends(schedule))
        offload = schedule.offload
        if offload is Offload.NONE:
            return list(plain)
        return [*plain, *self._offloads.memoize(offload, lambda: self.offload_addends(offload))]

    def seconds(self, schedule: Schedule) -> float:
        return sum_of([amount for _, amount, _ in self.addends(schedule)])

    def tail_seconds(self, schedule: Schedule) -> float:
        """Return the seconds that remain after the last token was sampled (Yan et al., OPPO, arXiv:2509.25762)."""
        if not schedule.chunk_tokens:
            return self.seconds(schedule)
        last = self.pipeline_of(schedule).addends(self.tail_of(schedule))
        return minimum(self.seconds(schedule), sum_of([amount for _, amount, _ in last]))

    def bytes(self, schedule: Schedule) -> Bytes:
        return self.memory.bytes(schedule)

    def _plain_addends(self, schedule: Schedule) -> list[Addend[float]]:
        """Return the seconds without offload."""
        compute = self.compute_of(schedule)
        return step_addends(self.pipeline_of(schedule), compute, self.updates, float(self.num_rows))
