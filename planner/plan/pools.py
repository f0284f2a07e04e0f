"""Which ranks may be a pool: how many, from which on, and beside which others; and what a pool of two kinds of nodes
asks of a stage.

The search enumerates by these rules and the verifier checks by them; neither knows of the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from meshwright.cost_models.waves import sees_waves
from meshwright.planner.plan.job import Facts
from meshwright.profiles.cluster import AnyCluster, Cluster, replicas_of_parts
from meshwright.profiles.errors import nearest
from meshwright.profiles.layout import Layout, nearest_divisor
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import Stage

_STEPS = 8
"""A pool has a number of these parts of the cluster, or a power of two of nodes that divides one. With 16 of them the
7B job of `benchmarks/search/scale.py` took 147 s of processor time to plan on 16 nodes, where it takes 33 s."""


def pool_sizes(cluster: AnyCluster) -> tuple[int, ...]:
    """How many ranks a pool may have: powers of two within a node, any number of whole nodes of one kind, and all of
    two neighbouring kinds.

    Of more than eight nodes they are whole steps: the least power of two of nodes that is an eighth of all or more, and
    the powers of two below it.
    """
    pairs = (len(ranks) for ranks in _pairs(cluster))
    return tuple(sorted({size for part in cluster.parts for size in _sizes(part)}.union(pairs)))


def first_ranks(cluster: AnyCluster, num_ranks: int) -> tuple[int, ...]:
    """Where a pool of this size may start: among nodes of one kind at every step, and within one at multiples of its
    size; and where two kinds begin that have so many ranks together."""
    found = [
        before + first
        for before, part in zip(cluster.first_ranks, cluster.parts, strict=True)
        if num_ranks in _sizes(part)
        for first in range(0, part.num_ranks - num_ranks + 1, min(num_ranks, pool_step(part)))
    ]
    return tuple(sorted([*found, *(ranks.start for ranks in _pairs(cluster) if len(ranks) == num_ranks)]))


def pool_step(part: Cluster) -> int:
    """Ranks of which every larger pool on nodes of one kind has a multiple, unless it has all, and which every smaller
    one divides."""
    power_of_two: int = 1 << (-(-part.nodes // _STEPS) - 1).bit_length()
    return power_of_two * part.ranks_per_node


def _pairs(cluster: AnyCluster) -> Iterator[range]:
    """The ranks of every two neighbouring parts."""
    for first, (one, other) in zip(cluster.first_ranks, pairwise(cluster.parts), strict=False):
        yield range(first, first + one.num_ranks + other.num_ranks)


def _sizes(part: Cluster) -> set[int]:
    step, per_node = pool_step(part), part.ranks_per_node
    within_node = (2**k for k in range(per_node.bit_length()) if part.nodes == 1 or per_node % 2**k == 0)
    within_step = (2**k * per_node for k in range((step // per_node).bit_length()))
    return {*within_node, *within_step, *range(step, part.num_ranks + 1, step), part.num_ranks}


def pool_violations(cluster: AnyCluster, first_rank: int, num_ranks: int) -> tuple[str, ...]:
    """Rules that a pool breaks."""
    if num_ranks not in pool_sizes(cluster):
        legal, most = nearest(num_ranks, pool_sizes(cluster)), max(map(pool_step, cluster.parts))
        steps = f", {most // cluster.ranks_per_node} at a time" if most > cluster.ranks_per_node else ""
        return (
            f"{num_ranks} ranks are neither a power of two within a node nor whole nodes{steps}; use {legal} ranks.",
        )
    if first_rank + num_ranks > cluster.num_ranks:
        legal = nearest(first_rank, first_ranks(cluster, num_ranks))
        return (
            f"ranks {first_rank}-{first_rank + num_ranks - 1} leave the cluster of {cluster.num_ranks} ranks; "
            f"start at rank {legal}.",
        )
    if first_rank not in first_ranks(cluster, num_ranks):
        legal = nearest(first_rank, first_ranks(cluster, num_ranks))
        return (f"a pool of {num_ranks} ranks cannot start at rank {first_rank}; start at rank {legal}.",)
    return ()


def crossing_violations(one: range, other: range) -> tuple[str, ...]:
    """The rule that two pools break when they have some ranks in common, and each has others."""
    common = range(max(one.start, other.start), min(one.stop, other.stop))
    if not common or common in (one, other):
        return ()
    return (
        f"ranks {one.start}-{one.stop - 1} and ranks {other.start}-{other.stop - 1} have only a part in common; "
        "of two pools one lies in the other, or they are apart.",
    )


def may_deal(facts: Facts, stage: Stage) -> bool:
    """Whether a stage may run on two kinds of nodes: it takes rows that are all there when it begins, as often as it is
    planned to."""
    return not stage.generates and not (facts.workload.chooses and sees_waves(stage))


def pair_rules(facts: Facts, stage: Stage, layout: Layout, part: int) -> tuple[str, ...]:
    """Rules that a layout breaks on two kinds of nodes, which hold whole replicas."""
    parts = facts.cluster.parts_of(part)
    if len(parts) == 1:
        return ()
    found, where = [], " and ".join(one.name for one in parts)
    if not may_deal(facts, stage):
        found.append(f"{stage.name} runs on nodes of one kind, and its pool is {where}; use a pool within one.")
    if layout.pp > 1:
        found.append(f"pp={layout.pp} cuts replicas over the kinds of nodes of a pool of {where}; use pp=1.")
    if layout.ep > 1:
        found.append(
            f"ep={layout.ep} needs as many sequences on every replica, and on {where} some have more; use ep=1."
        )
    replica_ranks = layout.tp * layout.cp
    if any(one.num_ranks % replica_ranks for one in parts):
        legal = nearest_divisor(replica_ranks, *(one.num_ranks for one in parts))
        found.append(f"replicas of {replica_ranks} ranks do not come out even on {where}; use tp x cp = {legal}.")
    return tuple(found)


def dealing_rules(facts: Facts, num_rows: int, layout: Layout, schedule: Schedule, part: int) -> tuple[str, ...]:
    """Rules that rows dealt by speed break, of `num_rows` that all replicas take at once."""
    parts, rows = facts.cluster.parts_of(part), list(schedule.rows)
    if len(parts) == 1:
        return (f"rows={rows} on nodes of one kind, where replicas take as many; leave it out.",) if rows else ()
    least = replicas_of_parts(facts.cluster, part, layout.num_ranks // layout.dp)
    if len(rows) != len(least) or sum(rows) != num_rows or any(n < few for n, few in zip(rows, least, strict=True)):
        return (
            f"rows={rows} does not deal {num_rows} sequences to two kinds of nodes, {least[0]} and {least[1]} of them "
            "at least; plan the job again.",
        )
    return ()
