"""What a configuration says in the words of a job and of pins, each with the keys that say it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Said:
    """A field of the job (`workload.batch_size`) or a pin (`actor_train.layout`), its value, and the keys behind it."""

    what: str
    value: Word
    keys: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Configured:
    """All that a configuration says, and sentences on what has no word of ours. `steps_ahead` is of the generation, and
    `unread` are keys of it that say nothing here."""

    said: tuple[Said, ...]
    steps_ahead: int
    notes: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def words(self) -> Mapping[str, Word]:
        """Every value by what it is of."""
        return {one.what: one.value for one in self.said}

    @property
    def algorithm(self) -> Algorithm:
        return cast(Algorithm, self.words.get("algorithm", "ppo"))


def layout_of(degrees: Mapping[str, int], num_ranks: int, *, sp: bool = False) -> Layout:
    """The layout on so many ranks whose replicas have these degrees, of which etp may be 0 for that of tp. Experts are
    dealt out to whole replicas alone: their degree is the largest that divides the one given and the replicas or, where
    etp is 1 and tp divides it, that deals whole ones to the ranks of as many.

    Raises BadInput where they do not divide the ranks.
    """
    each = degrees.get("tp", 1) * degrees.get("pp", 1) * degrees.get("cp", 1)
    if each < 1 or num_ranks % each:
        told = " x ".join(f"{axis}={degree}" for axis, degree in degrees.items() if axis in ("tp", "pp", "cp"))
        raise BadInput(f"{told} does not divide the {num_ranks} ranks that it is for; give degrees that do.")
    dp, tp, ep = num_ranks // each, degrees.get("tp", 1), degrees.get("ep", 1)
    folded = tp if degrees.get("etp") == 1 and ep % tp == 0 else 1
    experts = {"ep": folded * math.gcd(ep // folded, dp), "etp": tp // folded}
    return Layout(**{**degrees, **experts}, dp=dp, sp=sp and tp > 1)


def narrowed(key: str, ep: int, layout: Layout, etp: int = 0) -> Iterator[str]:
    """A sentence where experts are spread less wide than the key says, or cut where they are said to be whole."""
    if layout.ep != ep:
        yield f"{key}={ep} is read as {layout.ep}: experts are spread over replicas here, and there are {layout.dp}."
    elif etp == 1 < ep and layout.etp > 1:
        yield f"{key}={ep} is read as of experts cut by tp={layout.tp}: whole ones go to all {layout.tp} ranks here."


def pools_in_a_row(sizes: Iterable[tuple[str, int]]) -> Iterator[tuple[str, str]]:
    """Pools that follow each other, as names and pins' values."""
    first = 0
    for name, size in sizes:
        yield name, f"{first}:{size}"
        first += size


def cluster_of(pools: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """Nodes and ranks of each, of pools of so many nodes with so many ranks each that have nothing in common.

    Raises BadInput for pools that are neither whole nodes nor parts of one.
    """
    per_node = {ranks for _, ranks in pools.values()}
    if len(per_node) == 1:
        return sum(nodes for nodes, _ in pools.values()), per_node.pop()
    if all(nodes == 1 for nodes, _ in pools.values()):
        return 1, sum(ranks for _, ranks in pools.values())
    told = ", ".join(f"{name} {nodes} x {ranks}" for name, (nodes, ranks) in pools.items())
    raise BadInput(f"pools of several nodes with different numbers of ranks ({told}) are not planned; use whole nodes.")
