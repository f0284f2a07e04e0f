"""What a configuration says in the words of a job and of pins, each with the keys that say it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, cast

from meshwright.profiles.algorithms import Algorithm
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout

Word: TypeAlias = str | int | float | bool

MEGATRON_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
"""What Megatron-core calls the degrees of a layout."""

MEMORY_SHARE = "engine.memory_share"
"""The share of a device's memory that generation's weights and KV cache may take, as a configuration gives it."""

_USUAL_RANKS = 8
"""GPUs of a node where a configuration gives parts of one alone, as all of NVIDIA's HGX and DGX nodes with SXM have."""


@dataclass(frozen=True)
class Said:
    """A field of the job (`workload.batch_size`) or a pin (`actor_train.layout`), its value, and the keys behind it."""

    what: str
    value: Word
    keys: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Configured:
    """All that a configuration says, and sentences on what has no word of ours.

    `steps_ahead` is of the generation, `named` are keys that may change a step and have no word here, with what is to
    be known of each, `unread` keys that a plan does not depend on, and `asked` every key that was looked at, whether
    the configuration gives it or has its default.
    """

    said: tuple[Said, ...]
    steps_ahead: int
    notes: tuple[str, ...] = ()
    named: Mapping[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    asked: frozenset[str] = frozenset()

    @property
    def words(self) -> Mapping[str, Word]:
        """Every value by what it is of."""
        return {one.what: one.value for one in self.said}

    @property
    def algorithm(self) -> Algorithm:
        return cast(Algorithm, self.words.get("algorithm", "ppo"))


def layout_of(degrees: Mapping[str, int], num_ranks: int, *, sp: bool = False) -> Layout:
    """The layout on so many ranks whose replicas have these degrees, of which etp may be 0 for that of tp.

    Experts are dealt out to whole replicas alone: their degree is the largest that divides the one given and the
    replicas or, where etp is 1 and tp divides it, that deals whole ones to the ranks of as many. They take whole
    sequences, so that ranks which would share one are replicas. Raises BadInput where degrees do not divide the ranks.
    """
    each = degrees.get("tp", 1) * degrees.get("pp", 1) * degrees.get("cp", 1)
    if each < 1 or num_ranks % each:
        told = " x ".join(f"{axis}={degree}" for axis, degree in degrees.items() if axis in ("tp", "pp", "cp"))
        raise BadInput(f"{told} does not divide the {num_ranks} ranks that it is for; give degrees that do.")
    tp, ep = degrees.get("tp", 1), degrees.get("ep", 1)
    cp = 1 if ep > 1 else degrees.get("cp", 1)
    dp = num_ranks // (tp * degrees.get("pp", 1) * cp)
    folded = tp if degrees.get("etp") == 1 and ep % tp == 0 else 1
    experts = {"ep": folded * math.gcd(ep // folded, dp), "etp": tp // folded}
    return Layout(**{**degrees, **experts, "cp": cp}, dp=dp, sp=sp and tp > 1)


def narrowed(key: str, degrees: Mapping[str, int], layout: Layout) -> Iterator[str]:
    """A sentence where experts are spread less wide than the key says, or cut where they are said to be whole, and one
    where ranks share sequences that experts take whole here."""
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


def pools_in_a_row(sizes: Iterable[tuple[str, int]]) -> Iterator[tuple[str, str]]:
    """Pools that follow each other, as names and pins' values; the largest first where one would lie across nodes."""
    listed = list(sizes)
    if _crosses_nodes([size for _, size in listed]):
        listed.sort(key=lambda one: -one[1])
    first = 0
    for name, size in listed:
        yield name, f"{first}:{size}"
        first += size


def _crosses_nodes(sizes: Iterable[int]) -> bool:
    """Whether one of several pools that follow each other has parts of two nodes of 8."""
    first = 0
    for size in sizes:
        left = _USUAL_RANKS - first % _USUAL_RANKS
        if size > left and (first % _USUAL_RANKS or size % _USUAL_RANKS):
            return True
        first += size
    return False


def of_ranks(number: int) -> tuple[int, int]:
    """Nodes, and ranks on each, of a pool that a configuration gives as a number of ranks alone."""
    whole = number % _USUAL_RANKS == 0
    return (number // _USUAL_RANKS, _USUAL_RANKS) if whole else (1, number)


def cluster_of(pools: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """Nodes and ranks of each, of pools of so many nodes with so many ranks each that have nothing in common.

    Pools of one node each lie together on one that holds them, or fill nodes of 8. Raises BadInput for pools that are
    neither whole nodes nor parts of one.
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
    told = ", ".join(f"{name} {nodes} x {ranks}" for name, (nodes, ranks) in pools.items())
    raise BadInput(f"pools of several nodes with different numbers of ranks ({told}) are not planned; use whole nodes.")
