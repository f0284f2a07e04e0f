"""Seconds to move weights between layouts, experience between pools, and state between a device and its host."""

from __future__ import annotations

from meshwright.cost_models.cost import Cost, Source, Tally
from meshwright.cost_models.memory_cost import offloaded_state
from meshwright.cost_models.params import fullest_part
from meshwright.cost_models.question import Call, Move
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.efficiency import Efficiency
from meshwright.profiles.frameworks import Engine
from meshwright.profiles.layout import layers_per_stage
from meshwright.profiles.model_parts.eight_bit_floats import linears_of
from meshwright.profiles.schedule import Offload

_TENSORS_PER_LAYER = 6
"""Messages per layer: QKV, attention output, gate and up projection, down projection, and two norms."""

_TENSORS_PER_ADAPTED = 2
"""Messages of an adapter per adapted linear: A and B."""


def refit_seconds(
    move: Move, cluster: Cluster, efficiency: Efficiency, element_bytes: int, engine: Engine | None = None
) -> Cost:
    """Return the seconds of a refit: `loaded_seconds` through the loader of a generation engine, else `move_seconds`.

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
    kept = move.overlap if source == target else 0
    tally = Tally()
    if kept:
        tally.add(
            "weight copy", 2 * shard_bytes / (cluster.device.memory_bytes_per_second * efficiency.elementwise_bytes)
        )
    num_remote = target.num_ranks - kept
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
