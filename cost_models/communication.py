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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from meshwright.cost_models.cost import Cost, Source, Tally
from meshwright.cost_models.measured import Curve
from meshwright.cost_models.memory_cost import offloaded_state
from meshwright.cost_models.params import fullest_part
from meshwright.cost_models.protocol import Call, Move
from meshwright.profiles.efficiency import Efficiency, Protocol
from meshwright.profiles.frameworks import Engine
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.layout import Layout, layers_per_stage
from meshwright.profiles.model_parts.fp8_weights import linears_of
from meshwright.profiles.schedule import Offload
from meshwright.profiles.table import Collective

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, SEND_RECEIVE = "all_reduce", "all_gather", "reduce_scatter", "send_receive"
ALL_TO_ALL = "all_to_all"


SecondsByBytes: TypeAlias = Callable[[float], tuple[float, Source]]
"""Return the seconds for the bytes of a tensor, and their source."""


class Group(NamedTuple):
    """The ranks of a collective: how many there are, and how many of them are in each node."""

    size: int
    per_node: int


@dataclass(frozen=True)
class Groups:
    """The process groups of one layout on consecutive ranks: tp varies fastest, then cp, dp and pp (see `Layout`)."""

    tensor: Group
    context: Group  # ranks with parts of the same sequences
    data: Group  # ranks with the same weights: replicas, and the context-parallel ranks of each
    neighbours: Group  # two ranks of adjacent pipeline stages, over the slowest boundary
    experts: Group  # ranks that send each other tokens, for the experts spread over them
    expert_data: Group  # ranks with the same experts


def groups_of(layout: Layout, cluster: Cluster) -> Groups:
    """Return the process groups of the smallest range of ranks that holds the layout."""
    per_node = cluster.ranks_per_node
    tensor = Group(layout.tp, min(layout.tp, per_node))
    context = Group(layout.cp, max(1, min(layout.cp, per_node // layout.tp)))
    sharers = layout.dp * layout.cp
    data = Group(sharers, max(1, min(sharers, per_node // layout.tp)))
    neighbours = Group(2, 2 if layout.num_ranks <= per_node else 1)
    # Without sequence parallelism the ranks of a replica have the same tokens, and each sends those for its own column.
    spread, stride = (layout.ep, layout.etp) if layout.sp else (layout.expert_replicas, layout.tp)
    experts = Group(spread, max(1, min(spread, per_node // stride)))
    holders, holder_stride = layout.dp // layout.expert_replicas, layout.tp * layout.expert_replicas
    return Groups(
        tensor, context, data, neighbours, experts, Group(holders, max(1, min(holders, per_node // holder_stride)))
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
        self._functions: dict[tuple[str, Group], SecondsByBytes] = {}

    def seconds(self, operation: str, group: Group, num_bytes: float) -> tuple[float, Source]:
        """Return the seconds of one operation on a tensor of `num_bytes`, as in `table.Exchange`; 0 for one rank."""
        return self.seconds_by_bytes(operation, group)(num_bytes)

    def seconds_by_bytes(self, operation: str, group: Group) -> SecondsByBytes:
        """Return the seconds as a function of bytes, for repeated use with one group."""
        cached = self._functions.get((operation, group))
        if cached is None:
            cached = self._functions[operation, group] = self._time_function(operation, group)
        return cached

    def _time_function(self, operation: str, group: Group) -> SecondsByBytes:
        zero = 0.0, Source.ANALYTIC
        curve = self._curves.get((operation, group.size)) if 1 < group.size <= group.per_node else None
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

    def _algorithms(self, operation: str, group: Group) -> Iterator[tuple[float, float]]:
        """Yield (latency, seconds per byte) of each algorithm and protocol.

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
        if self._peer and operation == ALL_REDUCE and group.size <= group.per_node:
            yield self._ring(operation, group, self._peer)
        multicast = self._efficiency.multicast
        if multicast and operation == ALL_REDUCE and 2 < group.size <= group.per_node:
            bandwidth = multicast.link_bytes * self._cluster.intra_node.bytes_per_second
            yield multicast.start_seconds, 1 / bandwidth

    def _all_to_all_algorithms(self, group: Group) -> Iterator[tuple[float, float]]:
        """Yield (latency, seconds per byte) of an all-to-all for each protocol."""
        intra, inter = self._cluster.intra_node, self._cluster.inter_node
        num_nodes, per_node = -(-group.size // group.per_node), min(group.size, group.per_node)
        for protocol in self._efficiency.protocols:
            hops = (num_nodes - 1) * inter.seconds + (per_node - 1) * intra.seconds * protocol.step
            within = (per_node - 1) / group.size / (intra.bytes_per_second * protocol.link_bytes)
            beyond = (group.size - per_node) / group.size / (inter.bytes_per_second * protocol.fabric_bytes)
            yield protocol.start_seconds + hops, max(within, beyond)

    def _ring(self, operation: str, group: Group, protocol: Protocol) -> tuple[float, float]:
        intra, inter = self._cluster.intra_node, self._cluster.inter_node
        num_nodes = -(-group.size // group.per_node)
        bandwidth = intra.bytes_per_second * protocol.link_bytes
        if num_nodes > 1:
            bandwidth = min(bandwidth, group.per_node * inter.bytes_per_second * protocol.fabric_bytes)
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

_TENSORS_PER_ADAPTED = 2
"""Messages of an adapter per adapted linear: A and B."""


def refit_seconds(
    move: Move, cluster: Cluster, efficiency: Efficiency, element_bytes: int, engine: Engine | None = None
) -> Cost:
    """Return the seconds of a refit: `loader_refit_seconds` through the loader of a generation engine, else
    `sharded_refit_seconds`.

    Quantising to 8-bit floats on arrival is added if the move does so.
    """
    if move.generates and engine and not engine.refit.in_place:
        moved = loader_refit_seconds(move, cluster, efficiency, element_bytes)
    else:
        moved = sharded_refit_seconds(move, cluster, efficiency, element_bytes)
    return moved + _quantising_seconds(move, cluster, efficiency, element_bytes) if move.quantises else moved


def _quantising_seconds(move: Move, cluster: Cluster, efficiency: Efficiency, element_bytes: int) -> Cost:
    """Return the seconds of the fullest rank, which reads the weights twice (scales, rounding) and writes 8 bits."""
    model, target = move.model, move.target
    num_weights = max(layers_per_stage(model, target.pp)) * linears_of(model.shard(target.tp)).num_weights
    bandwidth = cluster.device.memory_bytes_per_second * efficiency.elementwise_bytes
    tally = Tally()
    tally.add("quantising", num_weights * (2 * element_bytes + 1) / bandwidth)
    return tally.cost()


def loader_refit_seconds(move: Move, cluster: Cluster, efficiency: Efficiency, element_bytes: int) -> Cost:
    """Return the seconds of a refit through an engine's weight loader: message latencies + all weights / bandwidth.

    Whole tensors are broadcast; every rank of the engine receives all of them and keeps its part. A broadcast passes
    from rank to rank, so tensors cross each link once however many ranks receive them (Patarasuk and Yuan, JPDC 69(2),
    2009, section 3). Each expert is a tensor. Gathering the source's shards and loading a tensor are not included.
    """
    model = move.model
    link = cluster.link(move.source.num_ranks + move.target.num_ranks - move.overlap)
    tensors = _TENSORS_PER_LAYER * model.num_layers
    if model.experts:
        tensors += 2 * model.experts.num_experts * (model.num_layers - model.num_dense_layers)
    bandwidth = link.bytes_per_second * efficiency.transfer_bytes
    tally = Tally()
    tally.add("weight messages", tensors * (link.seconds + cluster.device.launch_seconds))
    tally.add("weight bytes", element_bytes * model.num_params / bandwidth)
    return tally.cost()


def sharded_refit_seconds(move: Move, cluster: Cluster, efficiency: Efficiency, element_bytes: int) -> Cost:
    """Return the seconds of a refit of trained weights: message latencies + bytes / bandwidth.

    The bytes are the larger of what one rank receives and what one rank sends. Every target rank receives its shard;
    replicas of the source share the sending. Ranks in both pools whose layout does not change copy their shard within
    the device.
    """
    model, source, target = move.model, move.source, move.target
    shard_bytes = element_bytes * fullest_part(model, target.tp, target.pp, target.expert_replicas).trained.num_params
    tensors = _TENSORS_PER_ADAPTED * len(model.adapted_linears) or _TENSORS_PER_LAYER
    num_unmoved = move.overlap if source == target else 0
    tally = Tally()
    if num_unmoved:
        tally.add(
            "weight copy", 2 * shard_bytes / (cluster.device.memory_bytes_per_second * efficiency.elementwise_bytes)
        )
    num_remote = target.num_ranks - num_unmoved
    if num_remote > 0:
        sent_bytes = shard_bytes * num_remote / source.num_ranks
        link = cluster.link(source.num_ranks + target.num_ranks - move.overlap)
        messages = source.max_overlapping_shards(target) * tensors * max(layers_per_stage(model, target.pp))
        tally.add("weight messages", messages * (link.seconds + cluster.device.launch_seconds))
        tally.add("weight bytes", max(shard_bytes, sent_bytes) / (link.bytes_per_second * efficiency.transfer_bytes))
    return tally.cost()


def experience_seconds(num_bytes: float, cluster: Cluster, efficiency: Efficiency) -> Cost:
    """Return the seconds to transfer experience from one rank to another over the slowest link of the cluster."""
    link = cluster.link(cluster.num_ranks)
    tally = Tally()
    tally.add(
        "experience", link.seconds + num_bytes / (link.bytes_per_second * efficiency.transfer_bytes), Source.ANALYTIC
    )
    return tally.cost()


def offload_seconds(call: Call, cluster: Cluster, efficiency: Efficiency, element_bytes: int) -> Cost:
    """Return the seconds to reload offloaded state before the stage and, if the stage changes it, offload it again.

    Each rank uses its own link to the host, tensor by tensor, without overlap with compute.
    """
    layout, model = call.layout, call.model
    part = fullest_part(model, layout.tp, layout.pp, layout.expert_replicas)
    state = offloaded_state(call, call.schedule.offload, part, element_bytes)
    messages = len(state.terms) * _TENSORS_PER_LAYER * max(layers_per_stage(model, layout.pp))
    bandwidth = cluster.host.bytes_per_second * efficiency.transfer_bytes
    one_way = messages * cluster.host.seconds + state.total / bandwidth
    tally = Tally()
    tally.add("reload", one_way)
    if call.schedule.offload is Offload.OPTIMIZER:
        tally.add("offload", one_way)
    return tally.cost()
