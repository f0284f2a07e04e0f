"""Seconds of a stage that passes micro-batches through pipeline stages: forward-only, 1F1B and interleaved training.

With m micro-batches and p stages, the slowest stage works on all of them, and waits for the first of them to pass the
other stages, forward and backward: bubble = the sum of the other stages' times of one micro-batch. With equal stages
that is busy + bubble = (m + p - 1)/m x busy (Narayanan et al., arXiv:2104.04473, section 2.2). Embedding and head are
counted on the last stage, which is then the slowest unless it holds fewer layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeAlias

from meshwright.cost_models.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    SEND_RECEIVE,
    Groups,
    Network,
)
from meshwright.cost_models.compute import AnalyticShard, Passes, Shard, Time
from meshwright.cost_models.cost import Addend, Source, Tally
from meshwright.cost_models.dealing import MicroBatches
from meshwright.cost_models.params import LayerCounts, StagePart, fullest_part
from meshwright.cost_models.question import Call, Once
from meshwright.profiles.frameworks import Framework
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_parts.adapter import Adapter
from meshwright.profiles.schedule import Recompute
from meshwright.profiles.table import Body

MESSAGES, BUBBLE = "pipeline messages", "pipeline bubble"
"""The terms that a pipeline of several stages has beside others."""

GRADIENTS, OPTIMIZER, PARAMETERS, TIED = "gradient reduction", "optimizer", "parameter gather", "tied embedding"
UPDATE = GRADIENTS, OPTIMIZER, PARAMETERS, TIED
"""The terms of updates, at which all replicas meet."""

_LOGPROB_BYTES = (4, 12)
"""Bytes per token of the two reductions of vocabulary-parallel log-probabilities: the maximum, then three sums."""


Batches: TypeAlias = tuple[MicroBatches, ...]


class Computed(NamedTuple):
    """Of some micro-batches their number and mean tokens, and over all of them the seconds of one layer, of the ends,
    and of one layer computed again."""

    num_batches: float
    mean_tokens: float
    layer: float
    ends: float
    again: float
    source: Source
    again_source: Source


@dataclass(frozen=True, eq=False)
class Computing:
    """What one rank computes of micro-batches; layouts that differ in their pipeline stages alone have the same."""

    shard: Shard
    analytic: AnalyticShard
    _times: Once[tuple[Body, Batches], Time] = field(default_factory=Once)

    def of(self, batches: Batches, recompute: Recompute, *, trains: bool) -> Computed:
        num_batches, total_tokens = 0.0, 0.0
        for number, rows, tokens in batches:
            num_batches += number
            total_tokens += number * rows * tokens
        layer, ends, source = self._time(Body.TRAIN if trains else Body.FORWARD, batches)
        again, again_source = self._recomputed(batches, recompute) if trains else (0.0, Source.ANALYTIC)
        return Computed(num_batches, total_tokens / num_batches, layer, ends, again, source, again_source)

    def _recomputed(self, batches: Batches, recompute: Recompute) -> tuple[float, Source]:
        """Seconds per layer that training passes compute a second time."""
        if recompute is Recompute.NONE:
            return 0.0, Source.ANALYTIC
        if recompute is Recompute.SELECTIVE:
            attention = self.analytic.attention
            return sum([number * attention(rows, tokens) for number, rows, tokens in batches]), Source.ANALYTIC
        time = self._time(Body.FORWARD, batches)
        return time.layer, time.source

    def _time(self, body: Body, batches: Batches) -> Time:
        passes: Passes = [(number, rows, tokens, 0) for number, rows, tokens in batches]
        return self._times.of((body, batches), lambda: self.shard.total(body, passes))


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """One pass over a batch by one data-parallel replica."""

    call: Call
    computing: Computing
    groups: Groups
    network: Network
    element_bytes: int
    framework: Framework

    def addends(self, compute: Computed) -> list[Addend]:
        """Seconds, forward-only or 1F1B, over the micro-batches, without the optimizer.

        Exchanges are costed at the mean micro-batch: they are linear in its tokens.
        """
        trains, pp = self.call.stage.trains, self.call.layout.pp
        num_batches, mean_tokens = compute.num_batches, compute.mean_tokens
        per_layer, at_ends, tensor_source = self._tensor_seconds(mean_tokens)
        send, send_source = self._send_seconds(mean_tokens)
        routed, routed_source = self._routed_seconds(mean_tokens)
        gathered, gathered_source = self._context_seconds(mean_tokens)
        a_layer = compute.layer + compute.again + num_batches * (per_layer + routed + gathered)
        ends = compute.ends + num_batches * at_ends
        num_layers, has_ends = self._layer_counts.slowest(a_layer, ends)
        tally = Tally()
        tally.add("layers", num_layers * compute.layer, compute.source)
        tally.add("embedding and head", compute.ends * has_ends, compute.source)
        tally.add("recomputation", num_layers * compute.again, compute.again_source)
        exchanged = num_batches * (num_layers * per_layer + at_ends * has_ends)
        tally.add("tensor-parallel collectives", exchanged, tensor_source)
        tally.add("expert-parallel collectives", num_batches * num_layers * routed, routed_source)
        tally.add("context-parallel collectives", num_batches * num_layers * gathered, gathered_source)
        tally.add(MESSAGES, num_batches * (1 + trains) * send, send_source)
        tally.add("stalled messages", (num_batches + pp - 1) * (1 + trains) * self._stall_seconds())
        if pp > 1:
            elsewhere = (self.call.model.num_layers - num_layers) / (pp - 1)
            busy = elsewhere * ((compute.layer + compute.again) / num_batches + (per_layer + routed + gathered))
            if not has_ends:
                busy += ends / num_batches / (pp - 1)
            tally.add(BUBBLE, (pp - 1) * (busy + (1 + trains) * send), compute.source)
        return tally.addends

    @cached_property
    def _layer_counts(self) -> LayerCounts:
        return LayerCounts.of(self.call.model, self.call.layout.pp)

    def update_addends(self) -> list[Addend]:
        """Seconds of one optimizer update, none of it overlapped unless the framework says so. This project's own says
        no: what its replicas exchange on a GPU overlaps computing, but nobody has measured how much that hides.

        The distributed optimizer moves each rank's gradients once and its weights once over the replicas and their
        context-parallel ranks (Rajbhandari et al., ZeRO, arXiv:1910.02054, section 7.1; Megatron-core
        `DistributedOptimizer`); without it gradients are all-reduced and every replica updates everything. A tied
        embedding that lives on the first and the last pipeline stage is summed between them (Narayanan et al.,
        arXiv:2104.04473, section 3.1).
        """
        layout, model, framework = self.call.layout, self.call.model, self.framework
        time = self.computing.shard.time(Body.OPTIMIZER, 0, 0)
        sharers = layout.dp * layout.cp if framework.sharded_optimizer else 1
        num_layers, has_ends = self._layer_counts.slowest(time.layer, time.ends)
        step = (num_layers * time.layer + time.ends * has_ends) / sharers
        part = fullest_part(model, layout.tp, layout.pp, layout.expert_replicas).trained
        reduction = REDUCE_SCATTER if framework.sharded_optimizer else ALL_REDUCE
        tally = Tally()
        reduced, source = self._over_replicas(reduction, part, framework.gradient_bytes)
        tally.add(GRADIENTS, self._exposed(reduced, num_layers), source)
        tally.add(OPTIMIZER, step, time.source)
        if framework.sharded_optimizer:
            gathered, source = self._over_replicas(ALL_GATHER, part, self.element_bytes)
            tally.add(PARAMETERS, self._exposed(gathered, num_layers), source)
        if layout.pp > 1 and model.tied_embeddings and not model.scalar_head and not model.adapter:
            embedding_bytes = framework.gradient_bytes * model.embedding_params / layout.tp
            summed, source = self.network.seconds(ALL_REDUCE, self.groups.neighbours, embedding_bytes)
            tally.add(TIED, summed, source)
        return tally.addends

    def _over_replicas(self, operation: str, part: StagePart, param_bytes: int) -> tuple[float, Source]:
        """An exchange of what replicas have in common, after it one of the experts that only some of them share."""
        expert_params = part.expert_params if self.call.layout.expert_replicas > 1 else 0.0
        common_bytes = param_bytes * (part.num_params - expert_params)
        seconds, source = self.network.seconds(operation, self.groups.data, common_bytes)
        more, _ = self.network.seconds(operation, self.groups.expert_data, param_bytes * expert_params)
        return seconds + more, source

    def _exposed(self, seconds: float, num_layers: int) -> float:
        """What is left of an exchange by buckets of one layer when all but one of them overlap computing."""
        return seconds / num_layers if self.framework.overlapped_reduction else seconds

    def _tensor_seconds(self, num_tokens: float) -> tuple[float, float, Source]:
        """Tensor-parallel seconds of one micro-batch: per layer, and at embedding and head.

        A layer makes two exchanges of the hidden state forward and two backward (Shoeybi et al., arXiv:1909.08053,
        section 3); under sequence parallelism each is a reduce-scatter and an all-gather, and backward gathers the two
        inputs again (Korthikanti et al., arXiv:2205.05198, section 4.2.2), for the gradients of weights, which a model
        with an adapter has none of. Full recomputation repeats the forward two.
        A framework that computes a product by pieces hides a share of them (Wang et al., ASPLOS 2023).
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
        cut = self._num_cut
        num_exchanges = cut * (1 + trains + (trains and self.call.schedule.recompute is Recompute.FULL))
        adapter = self.call.model.adapter
        per_layer = num_exchanges * exchange + (0 if adapter else cut * trains) * gathered
        if adapter:
            per_layer += self._adapter_seconds(adapter, num_tokens)
        at_ends = (1 + trains) * exchange
        if not self.call.model.scalar_head:
            at_ends += sum(self.network.seconds(ALL_REDUCE, tensor, b * num_tokens)[0] for b in _LOGPROB_BYTES)
        return per_layer * (1 - self.framework.hidden_exchanges), at_ends, source

    @cached_property
    def _num_cut(self) -> float:
        """Of a layer's attention and MLP, those whose hidden state the tensor-parallel ranks exchange: under sequence
        parallelism not around experts that are whole, where no shared one is cut beside them."""
        model, layout = self.call.model, self.call.layout
        if not layout.sp or layout.folded == 1 or (model.experts and model.experts.shared_ffn_size):
            return 2
        return 2 - model.expert_layers_share

    def _adapter_seconds(self, adapter: Adapter, num_tokens: float) -> float:
        """Tensor-parallel seconds per layer of what lies between an adapter's two products.

        Where a linear is cut along its inputs A is cut too, and its answer is summed forward; where one is cut along
        its outputs B is cut, and the gradient of what it reads is summed backward. Under sequence parallelism both have
        an all-gather and a reduce-scatter, one of them forward.
        """
        tensor, size = self.groups.tensor, num_tokens * adapter.rank * self.element_bytes
        trains, again = self.call.stage.trains, self.call.schedule.recompute is Recompute.FULL

        def exchange(operation: str, forward: int, backward: int) -> float:
            number = forward * (1 + (trains and again)) + backward * trains
            return number * self.network.seconds(operation, tensor, size)[0]

        columns, rows = adapter.num_columns, adapter.num_rows
        if not self.call.layout.sp:
            return exchange(ALL_REDUCE, rows, columns)
        return exchange(ALL_GATHER, columns, rows) + exchange(REDUCE_SCATTER, rows, columns)

    def _routed_seconds(self, num_tokens: float) -> tuple[float, Source]:
        """Seconds per layer and micro-batch in which tokens go to the ranks of their experts and come back.

        A copy of the hidden state goes to each expert of a token and returns, by one all-to-all each; backward does
        both again, and so does full recomputation. Under sequence parallelism a rank sends the copies of its own part
        of the tokens, and where experts are cut copies, not tokens, are gathered and scattered around them, spread or
        not, more bytes than `_tensor_seconds` counts (Megatron-core, `MoEAlltoAllTokenDispatcher`). Without it, where
        they are whole, a rank sends the copies for those that are on its counterparts in other replicas. All ranks wait
        for the busiest, which receives the most copies and sends as many back.
        """
        model, layout, trains = self.call.model, self.call.layout, self.call.stage.trains
        if model.experts is None or (layout.expert_replicas == 1 and not layout.sp):
            return 0.0, Source.ANALYTIC
        hidden_bytes = num_tokens * model.hidden_size * self.element_bytes
        copies = model.experts.experts_per_token
        busiest = model.experts.busiest(num_tokens * layout.expert_replicas, layout.ep)
        sent_bytes = busiest * copies * hidden_bytes / (layout.tp if layout.sp else layout.folded)
        passed, source = self.network.seconds(ALL_TO_ALL, self.groups.experts, sent_bytes)
        if layout.sp and layout.folded == 1:
            for operation in (ALL_GATHER, REDUCE_SCATTER):
                whole, part = (
                    self.network.seconds(operation, self.groups.tensor, n * hidden_bytes)[0] for n in (copies, 1)
                )
                passed += (whole - part) / 2
        num_passes = 2 * (1 + trains + (trains and self.call.schedule.recompute is Recompute.FULL))
        return model.expert_layers_share * num_passes * passed, source

    def _context_seconds(self, num_tokens: float) -> tuple[float, Source]:
        """Seconds per layer and micro-batch in which ranks with `num_tokens` tokens each exchange keys and values.

        Forward gathers them, as elements of the model's precision and for this rank's heads (Llama 3 report,
        arXiv:2407.21783, section 3.3.2). Nothing gathered is kept, so that backward gathers them again, and scatters
        the sum of their gradients; recomputation repeats the forward one.
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
        """One hidden state to the next stage; sequence parallelism sends each rank's part.

        Scattered messages send a part too, and gather it on arrival (Narayanan et al., arXiv:2104.04473, section 4.1).
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
        """Seconds that a scattered message is held up by other replicas on its node.

        An observation, not a mechanism: iterations of Megatron-DeepSpeed on 512 A100 (vTrain, Bang et al., MICRO 2024)
        take as much longer in every slot of the pipeline, whatever the micro-batch and the layers of a stage, for each
        further replica on the node, from 16 replicas on; with 8 or less, or one on a node, they do not.
        """
        tensor, data, layout = self.groups.tensor, self.groups.data, self.call.layout
        spread = data.size > tensor.size * data.per_node
        if not self.framework.scattered_messages or layout.sp or layout.pp == 1 or tensor.size == 1 or not spread:
            return 0.0
        return (data.per_node - 1) * self.framework.stall_seconds


def interleaved(plain: Sequence[Addend], layout: Layout, num_batches: int) -> list[Addend]:
    """A training stage whose ranks hold v = `layout.vpp` chunks each, from its `plain` seconds by 1F1B on the same
    ranks.

    Each micro-batch is sent v times as often. The first one passes a v-th of the other stages' layers before the
    slowest stage has work, and as many messages as before (Narayanan et al., arXiv:2104.04473, section 2.2.2).
    """
    once = sum([amount for name, amount, _ in plain if name == MESSAGES]) / num_batches
    passed, vpp = (layout.pp - 1) * once, layout.vpp

    def in_chunks(name: str, amount: float) -> float:
        if name == MESSAGES:
            return vpp * amount
        return passed + (amount - passed) / vpp if name == BUBBLE else amount

    return [(name, in_chunks(name, amount), source) for name, amount, source in plain]
