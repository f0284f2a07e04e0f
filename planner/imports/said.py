"""A trainer's configuration as fields of a job and as pins, each with the trainer's keys that it comes from.

Also the rules that all readers share: which layout a set of degrees gives, and how pools are placed on nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, cast

from meshwright.profiles.algorithms import Algorithm
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout

FieldValue: TypeAlias = str | int | float | bool
"""The value of a field or a pin."""

MEGATRON_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
"""Megatron-core's names of the degrees of a layout."""

MEMORY_SHARE = "engine.memory_share"
"""The share of a device's memory that generation's weights and KV cache may take, as a configuration gives it."""

_USUAL_RANKS = 8
"""GPUs of a node where a configuration uses only part of one; all of NVIDIA's HGX and DGX nodes with SXM have 8."""


@dataclass(frozen=True)
class ParsedField:
    """A field of the job (`workload.batch_size`) or a pin (`actor_train.layout`), its value, and the keys it comes
    from."""

    what: str
    value: FieldValue
    keys: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ParsedConfig:
    """A configuration in our fields, with sentences on what could not be expressed in them.

    `steps_ahead` says how many steps generation works ahead. `named` are keys that may change a step and are not read,
    with the reason; `unread` are keys that a plan does not depend on; `asked` is every key that was read, whether the
    configuration gives it or has its default.
    """

    fields: tuple[ParsedField, ...]
    steps_ahead: int
    notes: tuple[str, ...] = ()
    unmodelled: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    read_keys: frozenset[str] = frozenset()

    @property
    def by_name(self) -> Mapping[str, FieldValue]:
        """The values by the name of their field or pin."""
        return {field.what: field.value for field in self.fields}

    @property
    def algorithm(self) -> Algorithm:
        return cast(Algorithm, self.by_name.get("algorithm", "ppo"))


def layout_of(degrees: Mapping[str, int], num_ranks: int, *, sp: bool = False) -> Layout:
    """The layout of `num_ranks` ranks whose replicas have these degrees; an etp of 0 means that of tp.

    Experts are sharded over whole replicas only: the given ep becomes gcd(ep, dp) or, where etp is 1 and tp divides
    ep, tp x gcd(ep / tp, dp) with whole experts on each rank. With ep > 1 there is no context parallelism, so its ranks
    become replicas. Raises BadInput where the degrees do not divide the ranks.
    """
    ranks_per_replica = degrees.get("tp", 1) * degrees.get("pp", 1) * degrees.get("cp", 1)
    if ranks_per_replica < 1 or num_ranks % ranks_per_replica:
        degrees_text = " x ".join(f"{axis}={degree}" for axis, degree in degrees.items() if axis in ("tp", "pp", "cp"))
        raise BadInput(f"{degrees_text} does not divide the {num_ranks} ranks that it is for; give degrees that do.")
    tp, ep = degrees.get("tp", 1), degrees.get("ep", 1)
    cp = 1 if ep > 1 else degrees.get("cp", 1)
    dp = num_ranks // (tp * degrees.get("pp", 1) * cp)
    folded_tp = tp if degrees.get("etp") == 1 and ep % tp == 0 else 1
    experts = {"ep": folded_tp * math.gcd(ep // folded_tp, dp), "etp": tp // folded_tp}
    return Layout(**{**degrees, **experts, "cp": cp}, dp=dp, sp=sp and tp > 1)


def layout_notes(key: str, degrees: Mapping[str, int], layout: Layout) -> Iterator[str]:
    """Sentences on expert and context parallelism that `layout_of` changed: a smaller ep, experts sharded by tp that
    the configuration keeps whole, and context parallelism of a model with experts."""
    ep, cp = degrees.get("ep", 1), degrees.get("cp", 1)
    if layout.ep != ep:
        yield f"{key}={ep} is read as {layout.ep}: expert parallelism is over replicas here, and there are {layout.dp}."
    elif degrees.get("etp", 0) == 1 < ep and layout.etp > 1:
        yield f"{key}={ep} is read with experts cut by tp={layout.tp}: of whole ones the degree is a multiple of it."
    if layout.cp != cp:
        yield (
            f"{key}={ep} with context parallelism of {cp}: that of a mixture-of-experts model is not modelled, and is "
            f"read as {cp} times as many replicas, each with a rank's budget of tokens."
        )


def consecutive_pools(sizes: Iterable[tuple[str, int]]) -> Iterator[tuple[str, str]]:
    """Place pools one after the other, as names and pin values; the largest first where one would cross nodes."""
    ordered = list(sizes)
    if _crosses_nodes([size for _, size in ordered]):
        ordered.sort(key=lambda pool: -pool[1])
    first = 0
    for name, size in ordered:
        yield name, f"{first}:{size}"
        first += size


def _crosses_nodes(sizes: Iterable[int]) -> bool:
    """True if one of several consecutive pools has parts of two nodes of 8."""
    first = 0
    for size in sizes:
        ranks_left = _USUAL_RANKS - first % _USUAL_RANKS
        if size > ranks_left and (first % _USUAL_RANKS or size % _USUAL_RANKS):
            return True
        first += size
    return False


def nodes_of_ranks(number: int) -> tuple[int, int]:
    """Nodes and ranks per node of a pool that a configuration gives as a number of ranks alone."""
    is_whole_nodes = number % _USUAL_RANKS == 0
    return (number // _USUAL_RANKS, _USUAL_RANKS) if is_whole_nodes else (1, number)


def cluster_of(pools: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """Nodes and ranks per node of a cluster that holds disjoint pools, each given as (nodes, ranks per node).

    Pools of one node each share a node if they fit, or fill nodes of 8. Raises BadInput for pools that are neither
    whole nodes nor parts of one.
    """
    per_node = {ranks for _, ranks in pools.values()}
    if all(nodes == 1 for nodes, _ in pools.values()):
        total = sum(ranks for _, ranks in pools.values())
        if total <= _USUAL_RANKS or len(pools) == 1:
            return 1, total
        if max(per_node) <= _USUAL_RANKS and total % _USUAL_RANKS == 0:
            return total // _USUAL_RANKS, _USUAL_RANKS
    if len(per_node) == 1:
        return sum(nodes for nodes, _ in pools.values()), per_node.pop()
    if max(per_node) == _USUAL_RANKS and all(ranks * nodes % _USUAL_RANKS == 0 for nodes, ranks in pools.values()):
        return sum(nodes * ranks for nodes, ranks in pools.values()) // _USUAL_RANKS, _USUAL_RANKS
    listed = ", ".join(f"{name} {nodes} x {ranks}" for name, (nodes, ranks) in pools.items())
    raise BadInput(
        f"pools of several nodes with different numbers of ranks ({listed}) are not planned; use whole nodes."
    )
