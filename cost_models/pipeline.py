"""Seconds and bytes of a forward or training stage on one layout: micro-batches pass through pipeline stages
(forward-only, 1F1B or interleaved), followed by optimizer updates, offload and reload.

With m micro-batches and p pipeline stages, the slowest stage works on all micro-batches and waits for the first one
to pass the other stages, forward and backward: bubble = the sum of the other stages' times of one micro-batch. With
equal stages, busy + bubble = (m + p - 1)/m x busy (Narayanan et al., arXiv:2104.04473, section 2.2). Embedding and
head are counted on the last stage, which is then the slowest unless it holds fewer layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeAlias

from meshwright.cost_models.communication import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    SEND_RECEIVE,
    Groups,
    Network,
)
from meshwright.cost_models.compute import AnalyticShard, Passes, PassSeconds, Shard
from meshwright.cost_models.cost import Addend, Source, Tally
from meshwright.cost_models.memory_cost import LayoutMemory
from meshwright.cost_models.micro_batches import MicroBatches
from meshwright.cost_models.params import LayerCounts, StagePart, fullest_part
from meshwright.cost_models.protocol import Bytes, Call, Memo
from meshwright.profiles.frameworks import Framework
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_parts.adapter import Adapter
from meshwright.profiles.schedule import Offload, Recompute, Schedule
from meshwright.profiles.table import TimedPass

MESSAGES, BUBBLE = "pipeline messages", "pipeline bubble"
"""Names of the terms that only a pipeline of several stages has."""

GRADIENTS, OPTIMIZER, PARAMETERS, TIED = "gradient reduction", "optimizer", "parameter gather", "tied embedding"
UPDATE = GRADIENTS, OPTIMIZER, PARAMETERS, TIED
"""Names of the terms of an optimizer update, at which all replicas synchronize."""

_LOGPROB_BYTES = (4, 12)
"""Bytes per token of the two reductions of vocabulary-parallel log-probabilities: the maximum, then three sums."""


Batches: TypeAlias = tuple[MicroBatches, ...]


class BatchCompute(NamedTuple):
    """Compute of some micro-batches: their number and mean tokens, and summed over them the seconds of one layer, of
    embedding and head (`ends`), and of recomputing one layer (`recompute`)."""

    num_batches: float
    mean_tokens: float
    layer: float
    ends: float
    recompute: float
    source: Source
    recompute_source: Source


@dataclass(frozen=True, eq=False)
class RankCompute:
    """Compute of one rank on micro-batches, shared by layouts that differ only in pp and dp."""

    shard: Shard
    analytic: AnalyticShard
    _times: Memo[tuple[TimedPass, Batches], PassSeconds] = field(default_factory=Memo)

    def batch_compute(self, batches: Batches, recompute: Recompute, *, trains: bool) -> BatchCompute:
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

    def _recompute_seconds(self, batches: Batches, recompute: Recompute) -> tuple[float, Source]:
        """Return the seconds per layer of recomputation in training."""
        if recompute is Recompute.NONE:
            return 0.0, Source.ANALYTIC
        if recompute is Recompute.SELECTIVE:
            attention = self.analytic.attention
            return sum([number * attention(rows, tokens) for number, rows, tokens in batches]), Source.ANALYTIC
        time = self._time(TimedPass.FORWARD, batches)
        return time.layer, time.source

    def _time(self, timed: TimedPass, batches: Batches) -> PassSeconds:
        passes: Passes = [(number, rows, tokens, 0) for number, rows, tokens in batches]
        return self._times.memoize((timed, batches), lambda: self.shard.total(timed, passes))


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Cost of one pass over a batch by one data-parallel replica."""

    call: Call
    computing: RankCompute
    groups: Groups
    network: Network
    element_bytes: int
    framework: Framework

    def addends(self, compute: BatchCompute) -> list[Addend]:
        """Return the seconds over the micro-batches, forward-only or 1F1B, without the optimizer.

        Collectives are costed at the mean micro-batch: they are linear in its tokens.
        """
        trains, pp = self.call.stage.trains, self.call.layout.pp
        num_batches, mean_tokens = compute.num_batches, compute.mean_tokens
        per_layer, at_ends, tensor_source = self._tensor_seconds(mean_tokens)
        send, send_source = self._send_seconds(mean_tokens)
        routed, routed_source = self._routed_seconds(mean_tokens)
        gathered, gathered_source = self._context_seconds(mean_tokens)
        layer_seconds = compute.layer + compute.recompute + num_batches * (per_layer + routed + gathered)
        ends = compute.ends + num_batches * at_ends
        num_layers, has_ends = self._layer_counts.slowest(layer_seconds, ends)
        tally = Tally()
        tally.add("layers", num_layers * compute.layer, compute.source)
        tally.add("embedding and head", compute.ends * has_ends, compute.source)
        tally.add("recomputation", num_layers * compute.recompute, compute.recompute_source)
        exchanged = num_batches * (num_layers * per_layer + at_ends * has_ends)
        tally.add("tensor-parallel collectives", exchanged, tensor_source)
        tally.add("expert-parallel collectives", num_batches * num_layers * routed, routed_source)
        tally.add("context-parallel collectives", num_batches * num_layers * gathered, gathered_source)
        tally.add(MESSAGES, num_batches * (1 + trains) * send, send_source)
        tally.add("stalled messages", (num_batches + pp - 1) * (1 + trains) * self._stall_seconds())
        if pp > 1:
            mean_other_layers = (self.call.model.num_layers - num_layers) / (pp - 1)
            busy = mean_other_layers * (
                (compute.layer + compute.recompute) / num_batches + (per_layer + routed + gathered)
            )
            if not has_ends:
                busy += ends / num_batches / (pp - 1)
            tally.add(BUBBLE, (pp - 1) * (busy + (1 + trains) * send), compute.source)
        return tally.addends

    @cached_property
    def _layer_counts(self) -> LayerCounts:
        return LayerCounts.of(self.call.model, self.call.layout.pp)

    def update_addends(self) -> list[Addend]:
        """Return the seconds of one optimizer update, overlapped with compute only if the framework says so.

        Meshwright's own runtime is costed without overlap: its gradient reductions on a GPU do overlap, but how much
        time that hides has not been measured. The distributed optimizer reduces each rank's gradients once and gathers
        its weights once over the replicas and their context-parallel ranks (Rajbhandari et al., ZeRO, arXiv:1910.02054,
        section 7.1; Megatron-core `DistributedOptimizer`); without it gradients are all-reduced and every replica
        updates all weights. A tied embedding on the first and the last pipeline stage is all-reduced between them
        (Narayanan et al., arXiv:2104.04473, section 3.1).
        """
        layout, model, framework = self.call.layout, self.call.model, self.framework
        time = self.computing.shard.time(TimedPass.OPTIMIZER, 0, 0)
        sharers = layout.dp * layout.cp if framework.sharded_optimizer else 1
        num_layers, has_ends = self._layer_counts.slowest(time.layer, time.ends)
        step = (num_layers * time.layer + time.ends * has_ends) / sharers
        part = fullest_part(model, layout.tp, layout.pp, layout.expert_replicas).trained
        reduction = REDUCE_SCATTER if framework.sharded_optimizer else ALL_REDUCE
        tally = Tally()
        reduced, source = self._replica_collective(reduction, part, framework.gradient_bytes)
        tally.add(GRADIENTS, self._exposed_seconds(reduced, num_layers), source)
        tally.add(OPTIMIZER, step, time.source)
        if framework.sharded_optimizer:
            gathered, source = self._replica_collective(ALL_GATHER, part, self.element_bytes)
            tally.add(PARAMETERS, self._exposed_seconds(gathered, num_layers), source)
        if layout.pp > 1 and model.tied_embeddings and not model.scalar_head and not model.adapter:
            embedding_bytes = framework.gradient_bytes * model.embedding_params / layout.tp
            summed, source = self.network.seconds(ALL_REDUCE, self.groups.neighbours, embedding_bytes)
            tally.add(TIED, summed, source)
        return tally.addends

    def _replica_collective(self, operation: str, part: StagePart, param_bytes: int) -> tuple[float, Source]:
        """Return the seconds of a collective over all replicas, plus one for experts that only some of them share."""
        expert_params = part.expert_params if self.call.layout.expert_replicas > 1 else 0.0
        common_bytes = param_bytes * (part.num_params - expert_params)
        seconds, source = self.network.seconds(operation, self.groups.data, common_bytes)
        expert_seconds, _ = self.network.seconds(operation, self.groups.expert_data, param_bytes * expert_params)
        return seconds + expert_seconds, source

    def _exposed_seconds(self, seconds: float, num_layers: int) -> float:
        """Return the exposed seconds of a collective: of one bucket (a layer) if the others overlap compute."""
        return seconds / num_layers if self.framework.overlapped_reduction else seconds

    def _tensor_seconds(self, num_tokens: float) -> tuple[float, float, Source]:
        """Return the tensor-parallel seconds of one micro-batch: per layer, and at embedding and head.

        A layer all-reduces the hidden state twice forward and twice backward (Shoeybi et al., arXiv:1909.08053,
        section 3). Under sequence parallelism each all-reduce is a reduce-scatter and an all-gather, and backward
        gathers the two inputs again for the weight gradients (Korthikanti et al., arXiv:2205.05198, section 4.2.2),
        unless an adapter is trained. Full recomputation repeats the two forward ones. A framework that splits a matmul
        into pieces hides a share of them (Wang et al., ASPLOS 2023).
        """
        tensor, trains = self.groups.tensor, self.call.stage.trains
        if tensor.size == 1:
            return 0.0, 0.0, Source.ANALYTIC
        hidden_bytes = num_tokens * self.call.model.hidden_size * self.element_bytes
        if self.call.layout.sp:
            scattered, source = self.network.seconds(REDUCE_SCATTER, tensor, hidden_bytes)
            gathered, _ = self.network.seconds(ALL_GATHER, tensor, hidden_bytes)
            exchange = scattered + gathered
        else:
            gathered = 0.0
            exchange, source = self.network.seconds(ALL_REDUCE, tensor, hidden_bytes)
        num_blocks = self._num_tensor_blocks
        num_exchanges = num_blocks * (1 + trains + (trains and self.call.schedule.recompute is Recompute.FULL))
        adapter = self.call.model.adapter
        per_layer = num_exchanges * exchange + (0 if adapter else num_blocks * trains) * gathered
        if adapter:
            per_layer += self._adapter_seconds(adapter, num_tokens)
        at_ends = (1 + trains) * exchange
        if not self.call.model.scalar_head:
            at_ends += sum(self.network.seconds(ALL_REDUCE, tensor, b * num_tokens)[0] for b in _LOGPROB_BYTES)
        return per_layer * (1 - self.framework.hidden_exchanges), at_ends, source

    @cached_property
    def _num_tensor_blocks(self) -> float:
        """Number of tensor-parallel blocks (attention, MLP) per layer, on average.

        Under sequence parallelism a layer of whole experts without a sharded shared expert has only attention.
        """
        model, layout = self.call.model, self.call.layout
        if not layout.sp or layout.fold_size == 1 or (model.experts and model.experts.shared_ffn_size):
            return 2
        return 2 - model.expert_layers_share

    def _adapter_seconds(self, adapter: Adapter, num_tokens: float) -> float:
        """Return the tensor-parallel seconds per layer for the low-rank activations of an adapter.

        A row-parallel linear shards A too, whose output is reduced forward; a column-parallel linear shards B, whose
        input gradient is reduced backward. Under sequence parallelism both have an all-gather and a reduce-scatter, one
        of them forward.
        """
        tensor, size = self.groups.tensor, num_tokens * adapter.rank * self.element_bytes
        trains, recomputes = self.call.stage.trains, self.call.schedule.recompute is Recompute.FULL

        def exchange(operation: str, forward: int, backward: int) -> float:
            number = forward * (1 + (trains and recomputes)) + backward * trains
            return number * self.network.seconds(operation, tensor, size)[0]

        columns, rows = adapter.num_column_parallel, adapter.num_row_parallel
        if not self.call.layout.sp:
            return exchange(ALL_REDUCE, rows, columns)
        return exchange(ALL_GATHER, columns, rows) + exchange(REDUCE_SCATTER, rows, columns)

    def _routed_seconds(self, num_tokens: float) -> tuple[float, Source]:
        """Return the seconds per layer and micro-batch of dispatching tokens to their experts and combining them.

        Each is an all-to-all of one copy of the hidden state per expert of a token; backward does both again, and so
        does full recomputation. Under sequence parallelism a rank sends the copies of its own part of the tokens; if
        experts are sharded, copies instead of tokens are gathered and scattered around them, which is more bytes than
        `_tensor_seconds` counts (Megatron-core, `MoEAlltoAllTokenDispatcher`). Without sequence parallelism and with
        whole experts, a rank sends the copies for the experts on its counterparts in other replicas. All ranks wait for
        the busiest, which receives the most copies and sends as many back.
        """
        model, layout, trains = self.call.model, self.call.layout, self.call.stage.trains
        if model.experts is None or (layout.expert_replicas == 1 and not layout.sp):
            return 0.0, Source.ANALYTIC
        hidden_bytes = num_tokens * model.hidden_size * self.element_bytes
        copies = model.experts.experts_per_token
        busiest = model.experts.imbalance(num_tokens * layout.expert_replicas, layout.ep)
        sent_bytes = busiest * copies * hidden_bytes / (layout.tp if layout.sp else layout.fold_size)
        passed, source = self.network.seconds(ALL_TO_ALL, self.groups.experts, sent_bytes)
        if layout.sp and layout.fold_size == 1:
            for operation in (ALL_GATHER, REDUCE_SCATTER):
                of_copies, of_tokens = (
                    self.network.seconds(operation, self.groups.tensor, n * hidden_bytes)[0] for n in (copies, 1)
                )
                passed += (of_copies - of_tokens) / 2
        num_passes = 2 * (1 + trains + (trains and self.call.schedule.recompute is Recompute.FULL))
        return model.expert_layers_share * num_passes * passed, source

    def _context_seconds(self, num_tokens: float) -> tuple[float, Source]:
        """Return the context-parallel seconds per layer and micro-batch, for ranks with `num_tokens` tokens each.

        Forward gathers keys and values, as elements of the model's precision and for this rank's heads (Llama 3 report,
        arXiv:2407.21783, section 3.3.2). They are not kept, so backward gathers them again and reduce-scatters their
        gradients; recomputation repeats the forward gather.
        """
        layout, trains = self.call.layout, self.call.stage.trains
        if layout.cp == 1:
            return 0.0, Source.ANALYTIC
        elements = num_tokens * layout.cp * self.call.model.cached_elements / layout.tp
        gather, source = self.network.seconds(ALL_GATHER, self.groups.context, elements * self.element_bytes)
        if not trains:
            return gather, source
        scatter, _ = self.network.seconds(REDUCE_SCATTER, self.groups.context, elements * self.element_bytes)
        return (2 + (self.call.schedule.recompute is not Recompute.NONE)) * gather + scatter, source

    def _send_seconds(self, num_tokens: float) -> tuple[float, Source]:
        """Return the seconds to send one hidden state to the next pipeline stage.

        Under sequence parallelism each rank sends its part. Scattered messages do so too, and gather on arrival
        (Narayanan et al., arXiv:2104.04473, section 4.1).
        """
        layout, scattered = self.call.layout, self.framework.scattered_messages
        if layout.pp == 1:
            return 0.0, Source.ANALYTIC
        hidden_bytes = num_tokens * self.call.model.hidden_size * self.element_bytes
        share = layout.tp if layout.sp or scattered else 1
        sent, source = self.network.seconds(SEND_RECEIVE, self.groups.neighbours, hidden_bytes / share)
        if scattered and not layout.sp:
            sent += self.network.seconds(ALL_GATHER, self.groups.tensor, hidden_bytes)[0]
        return sent, source

    def _stall_seconds(self) -> float:
        """Return the seconds by which other replicas on its node delay a scattered message.

        An observation without a known mechanism: iterations of Megatron-DeepSpeed on 512 A100 (vTrain, Bang et al.,
        MICRO 2024) are slower by this much per pipeline slot and further replica on the node, whatever the micro-batch
        and the layers of a stage, from 16 replicas on. With 8 replicas or fewer, or one per node, they are not.
        """
        tensor, data, layout = self.groups.tensor, self.groups.data, self.call.layout
        spread = data.size > tensor.size * data.per_node
        if not self.framework.scattered_messages or layout.sp or layout.pp == 1 or tensor.size == 1 or not spread:
            return 0.0
        return (data.per_node - 1) * self.framework.stall_seconds


def interleaved(plain: Sequence[Addend], layout: Layout, num_batches: int) -> list[Addend]:
    """Return the seconds of interleaved training with v = `layout.vpp` chunks per rank, from those of 1F1B (`plain`).

    Each micro-batch is sent v times as often. The first one passes 1/v of the other stages' layers, and as many
    messages as before, until the slowest stage has work (Narayanan et al., arXiv:2104.04473, section 2.2.2).
    """
    seconds_per_message = sum([amount for name, amount, _ in plain if name == MESSAGES]) / num_batches
    filling_seconds, vpp = (layout.pp - 1) * seconds_per_message, layout.vpp

    def in_chunks(name: str, amount: float) -> float:
        if name == MESSAGES:
            return vpp * amount
        return filling_seconds + (amount - filling_seconds) / vpp if name == BUBBLE else amount

    return [(name, in_chunks(name, amount), source) for name, amount, source in plain]


@dataclass(frozen=True, kw_only=True)
class PipelineCosts:
    """Costs of one stage on one layout; `num_rows` are the rows of the fullest replica (per update if it trains).

    `compute_of` returns the compute of a schedule, `tail_of` the compute that remains after the last token if the stage
    streams, `update` the seconds of one optimizer update, `offload_addends` the seconds of an offload. `without_vpp` is
    the same stage on the layout without virtual pipeline stages, if the layout has them.
    """

    layout: Layout
    num_rows: int
    num_updates: int
    pipeline_of: Callable[[Recompute], Pipeline]
    compute_of: Callable[[Schedule], BatchCompute]
    tail_of: Callable[[Schedule], BatchCompute]
    update: Callable[[], Sequence[Addend]]
    offload_addends: Callable[[Offload], Sequence[Addend]]
    memory: LayoutMemory
    without_vpp: PipelineCosts | None = None
    _known: dict[tuple[int, int, Recompute, int], Sequence[Addend]] = field(default_factory=dict)
    _known_tails: dict[tuple[int, int], float] = field(default_factory=dict)
    _known_offloads: dict[Offload, Sequence[Addend]] = field(default_factory=dict)

    def addends(self, schedule: Schedule) -> list[Addend]:
        """Return the seconds of one step. Raises BadInput for state or chunks that the stage does not have."""
        addends = (self.without_vpp or self)._without_offload(schedule)
        if self.layout.vpp > 1:
            addends = interleaved(addends, self.layout, -(-self.num_rows // schedule.micro_batch_size))
        offload = schedule.offload
        if offload is Offload.NONE:
            return list(addends)
        if offload not in self._known_offloads:
            self._known_offloads[offload] = self.offload_addends(offload)
        return [*addends, *self._known_offloads[offload]]

    def seconds(self, schedule: Schedule) -> float:
        return math.fsum([amount for _, amount, _ in self.addends(schedule)])

    def tail_seconds(self, schedule: Schedule) -> float:
        """Return the seconds that remain after the last token was sampled (Yan et al., OPPO, arXiv:2509.25762)."""
        if not schedule.chunk_tokens:
            return self.seconds(schedule)
        key = schedule.micro_batch_size, schedule.chunk_tokens
        if key not in self._known_tails:
            last = self.pipeline_of(schedule.recompute).addends(self.tail_of(schedule))
            self._known_tails[key] = math.fsum([amount for _, amount, _ in last])
        return min(self.seconds(schedule), self._known_tails[key])

    def bytes(self, schedule: Schedule) -> Bytes:
        return self.memory.bytes(schedule)

    def _without_offload(self, schedule: Schedule) -> Sequence[Addend]:
        """Return the seconds of a plain pipeline without offload."""
        key = schedule.micro_batch_size, schedule.micro_batch_tokens, schedule.recompute, schedule.chunk_tokens
        if key not in self._known:
            self._known[key] = self._make(schedule)
        return self._known[key]

    def _make(self, schedule: Schedule) -> Sequence[Addend]:
        one_pass = self.pipeline_of(schedule.recompute).addends(self.compute_of(schedule))
        if not self.num_updates:
            return one_pass
        return [(name, amount * self.num_updates, source) for name, amount, source in (*one_pass, *self.update())]
