"""Seconds of communication: collectives (latency + bytes / bandwidth of the fastest algorithm, or a measured table),
refits between layouts, experience between pools, and state between a device and its host.

A ring over n ranks takes n-1 steps to gather or to reduce-scatter and 2(n-1) to all-reduce, and each rank passes
(n-1)/n of the tensor once or twice (Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005; the same factors define bus
bandwidth in NCCL's tests, doc/PERFORMANCE.md). A switch that reduces (NVLink SHARP) receives the tensor from each rank
once and sends it once, whatever n (Klenk et al., ISCA 2020). Between nodes, the ranks of a group that share a node use
their network adapters in parallel, so a group moves `per_node` times one rank's share.

In an all-to-all each rank keeps 1/n of its tensor and sends 1/n to every other rank (Thakur et al., section 4.3):
messages within the node use its links and, in parallel, messages to other nodes use the rank's own adapter. Messages
to the ranks of one node are combined (NCCL 2.12, PXN), so that a rank sends one to each other node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeAlias

import numpy as np

from meshwright.cost_models.cost import Cost, Source, Tally, TermSums, cost_of, least_trusted
from meshwright.cost_models.measured import Curve
from meshwright.cost_models.memory_cost import offloaded_state
from meshwright.cost_models.params import ShardedModel, fullest_part
from meshwright.cost_models.protocol import RefitQuery, RefitTable
from meshwright.profiles.choice_table import Degrees
from meshwright.profiles.efficiency import Efficiency, Protocol
from meshwright.profiles.elementwise import FloatArray, IntArray, N, maximum, minimum, where
from meshwright.profiles.frameworks import Engine, Framework
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.layout import Layout, layers_per_stage
from meshwright.profiles.model_parts.adapter import ATTENTION_LINEARS, MLP_LINEARS, Linear
from meshwright.profiles.model_parts.fp8_weights import linears_of
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.schedule import Offload
from meshwright.profiles.stages import Stage
from meshwright.profiles.table import Collective

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, SEND_RECEIVE = "all_reduce", "all_gather", "reduce_scatter", "send_receive"
ALL_TO_ALL = "all_to_all"


_MOST_PEERS = 8
"""Ranks of the largest group whose engine reduces through peer memory (vLLM and SGLang, custom_all_reduce.py)."""

SecondsByBytes: TypeAlias = Callable[[float], tuple[float, Source]]
"""Return the seconds for the bytes of a tensor, and their source."""


class Group(NamedTuple, Generic[N]):
    """The ranks of a collective: how many there are, and how many of them are in each node."""

    size: N
    per_node: N


@dataclass(frozen=True)
class Groups(Generic[N]):
    """The process groups of one layout, or of several, on consecutive ranks: tp varies fastest, then cp, dp and pp (see
    `Layout`)."""

    tensor: Group[N]
    context: Group[N]  # ranks with parts of the same sequences
    data: Group[N]  # ranks with the same weights: replicas, and the context-parallel ranks of each
    neighbours: Group[N]  # two ranks of adjacent pipeline stages, over the slowest boundary
    experts: Group[N]  # ranks that send each other tokens, for the experts spread over them
    expert_data: Group[N]  # ranks with the same experts


def groups_of(layout: Degrees[N], cluster: Cluster) -> Groups[N]:
    """Return the process groups of the smallest range of ranks that holds the layout."""
    per_node = cluster.ranks_per_node
    sharers = layout.dp * layout.cp
    # Without sequence parallelism the ranks of a replica have the same tokens, and each exchanges them only with ranks
    # with the same tensor-parallel rank.
    spread = where(layout.sp, layout.ep, layout.expert_replicas)
    stride = where(layout.sp, layout.etp, layout.tp)
    holders, holder_stride = layout.dp // layout.expert_replicas, layout.tp * layout.expert_replicas

    def strided(size: N, stride: N) -> Group[N]:
        return Group(size, maximum(minimum(size, per_node // stride), 1))

    return Groups(
        tensor=Group(layout.tp, minimum(layout.tp, per_node)),
        context=strided(layout.cp, layout.tp),
        data=strided(sharers, layout.tp),
        neighbours=Group(2 + 0 * layout.tp, where(layout.num_ranks <= per_node, 2, 1 + 0 * layout.tp)),
        experts=strided(spread, stride),
        expert_data=strided(holders, holder_stride),
    )


class Network:
    """Collective times on one cluster: measured if the group is among `measured`, analytic otherwise.

    With `peer_reductions`, all-reduces within a node may also go through peer memory, as in an engine's custom
    all-reduce.
    """

    def __init__(
        self,
        cluster: Cluster,
        efficiency: Efficiency,
        measured: Iterable[Collective] = (),
        *,
        peer_reductions: bool = False,
    ) -> None:
        self._cluster, self._efficiency = cluster, efficiency
        self._peer = efficiency.peer if peer_reductions else None
        self._curves = _curves(measured)
        self._functions: dict[tuple[str, Group[float]], SecondsByBytes] = {}

    def seconds(self, operation: str, group: Group[N], num_bytes: N) -> tuple[N, Source]:
        """Return the seconds of one operation on a tensor of `num_bytes`, as in `table.Exchange`; 0 for one rank.

        For groups and bytes of several choices, [choices], it returns their seconds and the least trusted source.
        """
        if isinstance(num_bytes, np.ndarray):
            return self._columns(operation, group, num_bytes)
        return self.seconds_by_bytes(operation, group)(num_bytes)

    def seconds_by_bytes(self, operation: str, group: Group[float]) -> SecondsByBytes:
        """Return the seconds as a function of bytes, for repeated use with one group."""
        cached = self._functions.get((operation, group))
        if cached is None:
            cached = self._functions[operation, group] = self._time_function(operation, group)
        return cached

    def _time_function(self, operation: str, group: Group[float]) -> SecondsByBytes:
        zero = 0.0, Source.ANALYTIC
        curve = self._curves.get((operation, int(group.size))) if 1 < group.size <= group.per_node else None
        if curve:
            return lambda num_bytes: curve.at(num_bytes) if num_bytes > 0 else zero
        lines = ((0.0, 0.0),) if group.size == 1 else tuple(self._algorithms(operation, group))

        def fastest(num_bytes: float) -> tuple[float, Source]:
            if num_bytes <= 0:
                return zero
            fewest_seconds = math.inf
            for latency, per_byte in lines:
                seconds = latency + num_bytes * per_byte
                fewest_seconds = seconds if seconds < fewest_seconds else fewest_seconds
            return fewest_seconds, Source.ANALYTIC

        return fastest

    def _columns(self, operation: str, group: Group[FloatArray], num_bytes: FloatArray) -> tuple[FloatArray, Source]:
        """Return the seconds of each choice, [choices], and the least trusted of their sources."""
        lines = [latency + num_bytes * per_byte for latency, per_byte in self._algorithms(operation, group)]
        seconds, sources = np.minimum.reduce(lines), {Source.ANALYTIC}
        is_used = (group.size > 1) & (num_bytes > 0)
        for (measured_operation, size), curve in self._curves.items():
            is_measured = is_used & (group.size == size) & (group.per_node >= size)
            if measured_operation == operation and is_measured.any():
                seconds[is_measured], source = curve.at_each(num_bytes[is_measured])
                sources.add(source)
        return np.where(is_used, seconds, 0.0), least_trusted(sources)

    def _algorithms(self, operation: str, group: Group[N]) -> Iterator[tuple[N, N]]:
        """Yield (latency, seconds per byte) of each algorithm and protocol; an infinite latency where one cannot be
        used.

        NCCL too takes the one that it expects to be fastest (NCCL docs, NCCL_PROTO and NCCL_ALGO; its
        src/graph/tuning.cc).
        """
        if operation == ALL_TO_ALL:
            yield from self._all_to_all_algorithms(group)
            return
        message = self._efficiency.message
        if message and operation == SEND_RECEIVE:
            yield self._ring(operation, group, message)
            return
        for protocol in self._efficiency.protocols:
            yield self._ring(operation, group, protocol)
        is_within_node, never = group.size <= group.per_node, math.inf + 0 * group.size
        if self._peer and operation == ALL_REDUCE:
            latency, per_byte = self._ring(operation, group, self._peer)
            yield where(is_within_node & (group.size <= _MOST_PEERS), latency, never), per_byte
        multicast = self._efficiency.multicast
        if multicast and operation == ALL_REDUCE:
            bandwidth = multicast.link_bytes * self._cluster.intra_node.bytes_per_second
            has_switch = is_within_node & (group.size > 2)
            yield where(has_switch, multicast.start_seconds, never), 1 / bandwidth + 0 * group.size

    def _all_to_all_algorithms(self, group: Group[N]) -> Iterator[tuple[N, N]]:
        """Yield (latency, seconds per byte) of an all-to-all for each protocol."""
        intra, inter = self._cluster.intra_node, self._cluster.inter_node
        num_nodes, per_node = -(-group.size // group.per_node), minimum(group.size, group.per_node)
        for protocol in self._efficiency.protocols:
            hops = (num_nodes - 1) * inter.seconds + (per_node - 1) * intra.seconds * protocol.step
            within = (per_node - 1) / group.size / (intra.bytes_per_second * protocol.link_bytes)
            beyond = (group.size - per_node) / group.size / (inter.bytes_per_second * protocol.fabric_bytes)
            yield protocol.start_seconds + hops, maximum(within, beyond)

    def _ring(self, operation: str, group: Group[N], protocol: Protocol) -> tuple[N, N]:
        intra, inter = self._cluster.intra_node, self._cluster.inter_node
        num_nodes = -(-group.size // group.per_node)
        inside = intra.bytes_per_second * protocol.link_bytes
        outside = group.per_node * inter.bytes_per_second * protocol.fabric_bytes
        bandwidth = where(num_nodes > 1, minimum(outside, inside), inside + 0 * group.size)
        hops = (num_nodes - 1) * inter.seconds + (group.size - num_nodes) * intra.seconds * protocol.step
        if operation == SEND_RECEIVE:
            return protocol.start_seconds + hops, 1 / bandwidth
        passes = 2 if operation == ALL_REDUCE else 1
        return protocol.start_seconds + passes * hops, passes * (group.size - 1) / group.size / bandwidth


def _curves(measured: Iterable[Collective]) -> dict[tuple[str, int], Curve]:
    """Return a curve of seconds over bytes for each measured operation and group size."""
    seconds_by_bytes: dict[tuple[str, int], dict[float, float]] = {}
    for collective in measured:
        if collective.seconds is not None:
            key = (collective.exchange.operation, collective.exchange.num_ranks)
            seconds_by_bytes.setdefault(key, {})[collective.exchange.num_bytes] = collective.seconds
    return {key: Curve(values) for key, values in seconds_by_bytes.items()}


_TENSORS_PER_LAYER = 6
"""Messages per layer: QKV, attention output, gate and up projection, down projection, and two norms."""

_TENSORS_PER_EXPERT = 3
"""Messages per expert: gate, up and down projection."""


def num_whole_tensors(model: ModelSpec) -> int:
    """Return the tensors of the layers of a model, of which each matrix of an expert is one."""
    tensors = _TENSORS_PER_LAYER * model.num_layers
    if model.experts:
        tensors += _TENSORS_PER_EXPERT * model.experts.num_experts * model.expert_layers_between(0, model.num_layers)
    return tensors


_TENSORS_PER_ADAPTED = 2
"""Messages of an adapter per adapted linear: A and B."""

_STORED_PARTS: Mapping[Linear, int] = {"linear_qkv": 3, "linear_proj": 1, "linear_fc1": 2, "linear_fc2": 1}
"""The number of linears of a Hugging Face checkpoint that one linear here joins, in the order of a layer. In PEFT's
format each of them has an A of its own."""


def stored_adapter_size(model: ModelSpec) -> tuple[int, int]:
    """Return the number of tensors and the number of elements of an adapter in PEFT's format."""
    assert model.adapter is not None, model.name
    adapter, experts = model.adapter, model.experts
    attention, mlp = (
        [number for name, number in _STORED_PARTS.items() if name in names and name in adapter.targets]
        for names in (ATTENTION_LINEARS, MLP_LINEARS)
    )
    num_experts = model.expert_layers_between(0, model.num_layers)
    blocks = [(attention, model.adapted_attention, model.num_layers)]
    blocks.append((mlp, model.adapted_mlp(model.ffn_size), model.num_dense_layers))
    if experts:
        blocks.append((mlp, model.adapted_mlp(experts.ffn_size), num_experts * experts.num_experts))
        blocks.append((mlp if experts.shared_ffn_size else [], model.adapted_mlp(experts.shared_ffn_size), num_experts))
    tensors = sum(_TENSORS_PER_ADAPTED * sum(parts) * number for parts, _, number in blocks)
    elements = sum(
        adapter.rank * (part * inner + outer) * number
        for parts, linears, number in blocks
        for part, (inner, outer) in zip(parts, linears, strict=True)
    )
    return tensors, elements


def refit_seconds(
    move: RefitQuery,
    cluster: Cluster,
    efficiency: Efficiency,
    element_bytes: int,
    *,
    trainer: Framework,
    engine: Engine | None = None,
) -> Cost:
    """Return the seconds of a refit; see `refit_terms`."""
    terms = refit_terms(
        move,
        transfer_of(move),
        cluster,
        efficiency,
        element_bytes=element_bytes,
        trainer=trainer,
        engine=engine,
    )
    return cost_of(terms.addends)


def seconds_of_refits(
    refits: RefitTable,
    cluster: Cluster,
    efficiency: Efficiency,
    element_bytes: int,
    *,
    trainer: Framework,
    engine: Engine | None = None,
) -> FloatArray:
    """Return the seconds of several refits, [refits]; see `refit_terms`."""
    return refit_terms(
        refits,
        transfers_of(refits),
        cluster,
        efficiency,
        element_bytes=element_bytes,
        trainer=trainer,
        engine=engine,
    ).total


@dataclass(frozen=True)
class WeightTransfer(Generic[N]):
    """The sizes that the seconds of a refit depend on, for one refit or for several, [refits].

    `num_params` are the trained parameters that a target rank receives, `num_slices` the source ranks that send to it,
    and `num_layers` its layers. `num_unmoved` target ranks keep the shard that they have. `num_quantised` weights of a
    target rank become 8-bit floats.
    """

    num_params: N
    num_slices: N
    num_layers: N
    source_ranks: N
    target_ranks: N
    union_ranks: N
    num_unmoved: N
    num_quantised: N


def transfer_of(move: RefitQuery) -> WeightTransfer[float]:
    """Return the sizes that the seconds of a refit depend on."""
    source, target = move.source, move.target
    num_params, num_layers, num_quantised = _target_sizes(move.model, target, move.quantises)
    return WeightTransfer(
        num_params=num_params,
        num_slices=source.max_overlapping_shards(target),
        num_layers=num_layers,
        source_ranks=source.num_ranks,
        target_ranks=target.num_ranks,
        union_ranks=source.num_ranks + target.num_ranks - move.overlap,
        num_unmoved=move.overlap if source == target else 0,
        num_quantised=num_quantised,
    )


def transfers_of(refits: RefitTable) -> WeightTransfer[FloatArray]:
    """Return the sizes that the seconds of several refits depend on, each [refits]."""
    sources, targets = ([placed.layout for placed in end] for end in (refits.sources, refits.targets))
    sizes = [_target_sizes(refits.model, target, refits.quantises) for target in targets]
    num_params, num_layers, num_quantised = np.array(sizes, dtype=np.float64)[refits.target_index].T
    source_ranks = np.array([source.num_ranks for source in sources], dtype=np.float64)[refits.source_index]
    target_ranks = np.array([target.num_ranks for target in targets], dtype=np.float64)[refits.target_index]
    position = {layout: index for index, layout in enumerate((*sources, *targets))}
    source_layout = np.array([position[source] for source in sources])[refits.source_index]
    target_layout = np.array([position[target] for target in targets])[refits.target_index]
    return WeightTransfer(
        num_params=num_params,
        num_slices=_slices_of_each(sources, targets, refits),
        num_layers=num_layers,
        source_ranks=source_ranks,
        target_ranks=target_ranks,
        union_ranks=source_ranks + target_ranks - refits.overlap,
        num_unmoved=np.where(source_layout == target_layout, refits.overlap, 0.0),
        num_quantised=num_quantised,
    )


def _slices_of_each(sources: Sequence[Layout], targets: Sequence[Layout], refits: RefitTable) -> FloatArray:
    """Return the source ranks that send to one target rank in each refit, [refits].

    Layouts that shard the weights equally have equal ones, so that few pairs are computed.
    """
    (first_sources, source_way), (first_targets, target_way) = (_by_weight_axes(end) for end in (sources, targets))
    slices = np.array(
        [[source.max_overlapping_shards(target) for target in first_targets] for source in first_sources],
        dtype=np.float64,
    )
    num_slices: FloatArray = slices[source_way[refits.source_index], target_way[refits.target_index]]
    return num_slices


def _by_weight_axes(layouts: Sequence[Layout]) -> tuple[list[Layout], IntArray]:
    """Return a layout for each way to shard weights, and the position of the way of each of the layouts, [layouts]."""
    axes = [(layout.tp, layout.pp, layout.ep, layout.etp) for layout in layouts]
    first = dict(zip(reversed(axes), reversed(layouts), strict=True))
    position = {way: index for index, way in enumerate(first)}
    return list(first.values()), np.array([position[way] for way in axes])


def _target_sizes(model: ModelSpec, target: Layout, quantises: bool) -> tuple[float, float, float]:
    """Return the parameters that a target rank receives, its layers, and how many weights it quantises."""
    num_layers = max(layers_per_stage(model, target.pp))
    num_quantised = num_layers * linears_of(model.shard(target.tp)).num_weights if quantises else 0
    part = fullest_part(model, target.tp, target.pp, target.expert_replicas, folded=target.fold_size)
    num_params = part.trained.num_params
    return num_params, num_layers, num_quantised


def refit_terms(
    refits: RefitQuery | RefitTable,
    transfer: WeightTransfer[N],
    cluster: Cluster,
    efficiency: Efficiency,
    *,
    element_bytes: int,
    trainer: Framework,
    engine: Engine | None,
) -> TermSums[N]:
    """Return the seconds of a refit: `loader_refit` through the loader of a generation engine, else `sharded_refit`.

    If the target quantises to 8-bit floats on arrival, its fullest rank reads the weights twice (scales, rounding) and
    writes 8 bits.
    """
    if refits.generates and engine and not engine.refit.in_place:
        tally = loader_refit(
            transfer, refits.model, cluster, efficiency, element_bytes=element_bytes, trainer=trainer, engine=engine
        )
    else:
        tally = sharded_refit(transfer, refits.model, cluster, efficiency, element_bytes)
    if refits.quantises:
        bandwidth = cluster.device.memory_bytes_per_second * efficiency.elementwise_bytes
        tally.add("quantising", transfer.num_quantised * (2 * element_bytes + 1) / bandwidth)
    return tally


def loader_refit(
    transfer: WeightTransfer[N],
    model: ModelSpec,
    cluster: Cluster,
    efficiency: Efficiency,
    *,
    element_bytes: int,
    trainer: Framework,
    engine: Engine,
) -> TermSums[N]:
    """Return the seconds of a refit through an engine's weight loader: a time for each tensor + all weights / rate.

    Whole tensors are broadcast; every rank of the engine receives all of them and keeps its part. A broadcast passes
    from rank to rank, so tensors cross each link once however many ranks receive them (Patarasuk and Yuan, JPDC 69(2),
    2009, section 3). Each matrix of an expert is a tensor. If an adapter is not merged, only its tensors are sent, in
    PEFT's format. The rate is that of the link, or that at which the trainer gathers whole tensors.
    """
    protocol = efficiency.protocols[-1]
    tensors, elements = num_whole_tensors(model), model.num_params
    if model.adapter and not trainer.merged_adapters:
        tensors, elements = stored_adapter_size(model)
    link_seconds, link_bandwidth = _slowest_link(transfer, cluster)
    is_within_node = transfer.union_ranks <= cluster.ranks_per_node
    rate = link_bandwidth * where(is_within_node, protocol.link_bytes, protocol.fabric_bytes + 0 * link_bandwidth)
    if trainer.gather_bytes_per_second:
        rate = minimum(rate, trainer.gather_bytes_per_second)
    tally = TermSums[N]()
    tally.add("weight messages", tensors * (link_seconds + cluster.device.launch_seconds + engine.refit.tensor_seconds))
    tally.add("weight bytes", element_bytes * elements / rate)
    return tally


def _slowest_link(transfer: WeightTransfer[N], cluster: Cluster) -> tuple[N, N]:
    """Return the seconds of a message and the bytes per second on the slowest link between the ranks of both pools."""
    within_node, beyond = cluster.link(1), cluster.link(cluster.ranks_per_node + 1)
    is_within_node, zero = transfer.union_ranks <= cluster.ranks_per_node, 0 * transfer.union_ranks
    return (
        where(is_within_node, within_node.seconds, beyond.seconds + zero),
        where(is_within_node, within_node.bytes_per_second, beyond.bytes_per_second + zero),
    )


def sharded_refit(
    transfer: WeightTransfer[N], model: ModelSpec, cluster: Cluster, efficiency: Efficiency, element_bytes: int
) -> TermSums[N]:
    """Return the seconds of a refit of trained weights: message latencies + bytes / bandwidth.

    The bytes are the larger of what one rank receives and what one rank sends. Every target rank receives its shard;
    replicas of the source share the sending. Ranks in both pools whose layout does not change copy their shard within
    the device.
    """
    shard_bytes = element_bytes * transfer.num_params
    tensors = _TENSORS_PER_ADAPTED * len(model.adapted_linears) or _TENSORS_PER_LAYER
    copied_bytes = where(transfer.num_unmoved > 0, 2 * shard_bytes, 0 * shard_bytes)
    num_remote = transfer.target_ranks - transfer.num_unmoved
    sent_bytes = shard_bytes * num_remote / transfer.source_ranks
    link_seconds, bandwidth = _slowest_link(transfer, cluster)
    messages = transfer.num_slices * tensors * transfer.num_layers
    waiting_seconds = messages * (link_seconds + cluster.device.launch_seconds)
    sending_seconds = maximum(shard_bytes, sent_bytes) / (bandwidth * efficiency.transfer_bytes)
    tally = TermSums[N]()
    tally.add("weight copy", copied_bytes / (cluster.device.memory_bytes_per_second * efficiency.elementwise_bytes))
    tally.add("weight messages", where(num_remote > 0, waiting_seconds, 0 * waiting_seconds))
    tally.add("weight bytes", where(num_remote > 0, sending_seconds, 0 * sending_seconds))
    return tally


def experience_seconds(num_bytes: float, cluster: Cluster, efficiency: Efficiency) -> Cost:
    """Return the seconds to transfer experience from one rank to another over the slowest link of the cluster."""
    link = cluster.link(cluster.num_ranks)
    tally = Tally()
    tally.add(
        "experience", link.seconds + num_bytes / (link.bytes_per_second * efficiency.transfer_bytes), Source.ANALYTIC
    )
    return tally.cost()


def offload_seconds(
    stage: Stage,
    shards: ShardedModel[N],
    offload: Offload,
    *,
    cluster: Cluster,
    efficiency: Efficiency,
    element_bytes: int,
) -> TermSums[N]:
    """Return the seconds to reload offloaded state before the stage and, if the stage changes it, offload it again.

    Each rank uses its own link to the host, tensor by tensor, without overlap with compute. Raises BadInput if the
    stage has no such state.
    """
    state = offloaded_state(stage, shards, offload, shards.fullest, element_bytes)
    messages = len(state.amounts) * _TENSORS_PER_LAYER * shards.layer_counts.most
    bandwidth = cluster.host.bytes_per_second * efficiency.transfer_bytes
    one_way = messages * cluster.host.seconds + state.total / bandwidth
    tally = TermSums[N]()
    tally.add("reload", one_way)
    if offload is Offload.OPTIMIZER:
        tally.add("offload", one_way)
    return tally
