"""What facts no job of any use has: a typo would take all of a machine's memory, or never end.

The limits lie far above what is planned today, and every command looks at them before it begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.profiles.cluster import AnyCluster, Cluster, Link
from meshwright.profiles.errors import require_none
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.workload import Workload

_TINY, _HUGE = 1e-12, 1e24
"""Between which rates, times above 0 and weights are: beyond, sums of them overflow or vanish."""

MOST_NODES, MOST_RANKS_PER_NODE, _MOST_RANKS = 2**17, 2**12, 2**20
"""Of a cluster, far above any that is planned; a plan tells something of every rank."""

_CLUSTER = {"nodes": MOST_NODES, "ranks_per_node": MOST_RANKS_PER_NODE, "host_memory_bytes": 2**60}
_DEVICE = {"memory_bytes": 2**60, "num_processors": 2**20}
_MODEL = {
    "num_layers": 10_000,
    "hidden_size": 2**20,
    "ffn_size": 2**24,
    "num_heads": 2**16,
    "head_dim": 2**16,
    "vocab_size": 2**26,
    "vocab_multiple": 2**20,
    "max_positions": 2**40,
}
_WORKLOAD = {"batch_size": 2**24, "group_size": 2**24, "best_of": 2**24, "num_minibatches": 2**20, "num_epochs": 1024}
"""Of each field, the largest value: far above any use, and small enough for memory and for exact sums."""

_MOST_TOKENS = 2**24
"""Of a prompt or a response, far above what models take."""

_MOST_PAIRS = 1024
"""Of a histogram: the sum of two lengths may have as many as their product."""

_LONGEST_SECONDS = 3600.0
"""Of a launch or a message: whoever gives more meant another unit."""


def require_possible(models: Mapping[str, ModelSpec], cluster: AnyCluster, workload: Workload, what: str) -> None:
    """Raises BadInput, beginning with `what`, for the first number that is beyond all use."""
    require_none((*_of_cluster(cluster), *_of_models(models), *_of_workload(workload)), what)


def position_violations(models: Mapping[str, ModelSpec], workload: Workload) -> tuple[str, ...]:
    """One sentence where sequences may be longer than the positions of a model."""
    shortest = min(models.values(), key=lambda spec: spec.max_positions)
    if workload.max_tokens <= shortest.max_positions:
        return ()
    left = shortest.max_positions - workload.prompt.max
    way = f"response.max to {left}" if left > 0 else "prompt.max and response.max"
    return (
        f"prompt.max + response.max = {workload.max_tokens} exceeds the {shortest.max_positions} positions of "
        f"{shortest.name}; shorten {way}.",
    )


def _above(where: str, owner: Any, limits: dict[str, int]) -> Iterator[str]:
    for name, most in limits.items():
        value = getattr(owner, name)
        if value is not None and value > most:
            yield f"{where}.{name}={value} is above {most}, the most that is planned; use a smaller one."


def _beyond(where: str, value: float, least: float = _TINY, most: float = _HUGE) -> Iterator[str]:
    if value and not least <= value <= most:
        yield f"{where}={value:g} is not between {least:g} and {most:g}; check its unit."


def _of_cluster(cluster: AnyCluster) -> Iterator[str]:
    for part in cluster.parts:
        yield from _above("cluster", part, _CLUSTER)
        yield from _of_device(part)
        for name in ("intra_node", "inter_node", "host"):
            yield from _of_link(f"cluster.{name}", getattr(part, name))
    if cluster.num_ranks > _MOST_RANKS:
        yield (
            f"the cluster has {cluster.num_ranks} ranks, above {_MOST_RANKS}, the most that is planned; use fewer "
            "nodes or ranks_per_node."
        )


def _of_device(part: Cluster) -> Iterator[str]:
    device = part.device
    yield from _above("cluster.device", device, _DEVICE)
    yield from _beyond("cluster.device.memory_bytes_per_second", device.memory_bytes_per_second, least=1.0)
    for name, flops in device.flops_per_second.items():
        if flops <= 0:
            yield f"cluster.device.flops_per_second.{name}={flops:g} is not above 0; give the dense peak."
        yield from _beyond(f"cluster.device.flops_per_second.{name}", flops, least=1.0)
    yield from _beyond("cluster.device.launch_seconds", device.launch_seconds, most=_LONGEST_SECONDS)


def _of_link(where: str, link: Link) -> Iterator[str]:
    yield from _beyond(f"{where}.seconds", link.seconds, most=_LONGEST_SECONDS)
    yield from _beyond(f"{where}.bytes_per_second", link.bytes_per_second, least=1.0)


def _of_models(models: Mapping[str, ModelSpec]) -> Iterator[str]:
    for role, spec in models.items():
        yield from _of_model(f"models.{role}", spec)


def _of_model(where: str, spec: ModelSpec) -> Iterator[str]:
    yield from _above(where, spec, _MODEL)
    if spec.experts:
        limits = {"num_experts": 2**16, "ffn_size": _MODEL["ffn_size"], "shared_ffn_size": _MODEL["ffn_size"]}
        yield from _above(f"{where}.experts", spec.experts, limits)
    if spec.latent:
        names = ("query_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim")
        yield from _above(f"{where}.latent", spec.latent, dict.fromkeys(names, _MODEL["hidden_size"]))


def _of_workload(workload: Workload) -> Iterator[str]:
    yield from _above("workload", workload, _WORKLOAD)
    for name in ("prompt", "response"):
        yield from _of_lengths(f"workload.{name}", getattr(workload, name))


def _of_lengths(where: str, lengths: LengthSpec) -> Iterator[str]:
    yield from _above(where, lengths, {"max": _MOST_TOKENS})
    pairs = lengths.histogram or ()
    if len(pairs) > _MOST_PAIRS:
        yield f"{where}.histogram has {len(pairs)} pairs, above {_MOST_PAIRS}; put lengths that are near together."
    for _, weight in pairs:
        yield from _beyond(f"a weight of {where}.histogram", weight)
    for name in ("median", "p99"):
        yield from _beyond(f"{where}.{name}", getattr(lengths, name) or 0.0, least=1e-3, most=1e12)
