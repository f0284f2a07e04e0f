"""The legal pools of a cluster (sizes, first ranks, overlaps), and the rules for stages on pools of two kinds of nodes.

The search enumerates by these rules and the verifier checks by them; neither uses the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from meshwright.cost_models.sampling_waves import processes_all_samples
from meshwright.planner.job.job import Facts
from meshwright.profiles.errors import nearest
from meshwright.profiles.hardware import AnyCluster, Cluster, replicas_of_parts
from meshwright.profiles.layout import Layout, nearest_divisor
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import Stage

_MAX_POOL_STEPS = 8
"""Maximum number of steps into which the nodes of one kind, or the ranks of a single node, are divided; a larger pool
is a whole number of steps. With 16 instead of 8, the 7B job of `benchmarks/search/scale.py` took 147 s of processor
time to plan on 16 nodes instead of 33 s."""


def pool_sizes(cluster: AnyCluster) -> tuple[int, ...]:
    """The legal numbers of ranks of a pool, ascending: any number within a single node; with several nodes of a kind
    powers of two within a node, whole nodes of one kind, and all nodes of two neighbouring kinds.

    With more than eight nodes of a kind, or ranks of a single node, their numbers are multiples of a step, or powers of
    two below it. The step is the smallest power of two that is at least an eighth of them.
    """
    pairs = (len(ranks) for ranks in _pairs(cluster))
    return tuple(sorted({size for part in cluster.parts for size in _sizes(part)}.union(pairs)))


def first_ranks(cluster: AnyCluster, num_ranks: int) -> tuple[int, ...]:
    """The legal first ranks of a pool of this size: multiples of the step (or of the size, if smaller) among nodes of
    one kind, and the first rank of two neighbouring kinds that have this many ranks together."""
    starts = [
        before + first
        for before, part in zip(cluster.first_ranks, cluster.parts, strict=True)
        if num_ranks in _sizes(part)
        for first in range(0, part.num_ranks - num_ranks + 1, min(num_ranks, pool_step(part)))
    ]
    return tuple(sorted([*starts, *(ranks.start for ranks in _pairs(cluster) if len(ranks) == num_ranks)]))


def pool_step(part: Cluster) -> int:
    """The step of pool sizes on nodes of one kind, in ranks. Larger pools are multiples of it, or all ranks; the sizes
    of smaller pools divide it."""
    if part.nodes == 1:
        return _power_of_two(part.ranks_per_node)
    return _power_of_two(part.nodes) * part.ranks_per_node


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that divides a number into at most `_MAX_POOL_STEPS` steps, rounded up."""
    return 1 << (-(-number // _MAX_POOL_STEPS) - 1).bit_length()


def _pairs(cluster: AnyCluster) -> Iterator[range]:
    """The ranks of each pair of neighbouring parts."""
    for first, (one, other) in zip(cluster.first_ranks, pairwise(cluster.parts), strict=False):
        yield range(first, first + one.num_ranks + other.num_ranks)


def _sizes(part: Cluster) -> set[int]:
    step, per_node = pool_step(part), part.ranks_per_node
    whole_steps = {*range(step, part.num_ranks + 1, step), part.num_ranks}
    if part.nodes == 1:
        return whole_steps.union(2**k for k in range(step.bit_length()))
    within_node = (2**k for k in range(per_node.bit_length()) if per_node % 2**k == 0)
    within_step = (2**k * per_node for k in range((step // per_node).bit_length()))
    return whole_steps.union(within_node, within_step)


def _kinds_of_sizes(cluster: AnyCluster) -> str:
    """Return the kinds of legal sizes as words."""
    part = max(cluster.parts, key=pool_step)
    step = pool_step(part)
    if part.nodes == 1:
        return f"a power of two below {step} nor a multiple of it" if step > 1 else "within one node nor whole nodes"
    at_a_time = f", {step // part.ranks_per_node} at a time" if step > part.ranks_per_node else ""
    return f"a power of two within a node nor whole nodes{at_a_time}"


def pool_violations(cluster: AnyCluster, first_rank: int, num_ranks: int) -> tuple[str, ...]:
    """Sentences on rules that a pool breaks, whatever the other pools are."""
    if num_ranks not in pool_sizes(cluster):
        legal = nearest(num_ranks, pool_sizes(cluster))
        if num_ranks > cluster.num_ranks:
            return (f"{num_ranks} ranks are more than the {cluster.num_ranks} of the cluster; use {legal} ranks.",)
        return (f"{num_ranks} ranks are neither {_kinds_of_sizes(cluster)}; use {legal} ranks.",)
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


def overlap_violations(one: range, other: range) -> tuple[str, ...]:
    """The rule that two pools break if they overlap and neither contains the other."""
    common = range(max(one.start, other.start), min(one.stop, other.stop))
    if not common or common in (one, other):
        return ()
    return (
        f"ranks {one.start}-{one.stop - 1} and ranks {other.start}-{other.stop - 1} overlap in part; "
        "of two pools one must contain the other, or they must be disjoint.",
    )


def may_span_node_kinds(facts: Facts, stage: Stage) -> bool:
    """True if a stage may run on two kinds of nodes: all its rows exist when it starts, and the number of times that it
    runs in a step is fixed."""
    return not stage.generates and not (facts.workload.selects_samples and processes_all_samples(stage))


def mixed_pool_rules(facts: Facts, stage: Stage, layout: Layout, part: int) -> tuple[str, ...]:
    """Sentences on rules that a layout breaks on two kinds of nodes; each replica lies within one kind."""
    parts = facts.cluster.parts_of(part)
    if len(parts) == 1:
        return ()
    sentences, where = [], " and ".join(one.name for one in parts)
    if not may_span_node_kinds(facts, stage):
        sentences.append(f"{stage.name} runs on nodes of one kind, and its pool is {where}; use a pool within one.")
    if layout.pp > 1:
        sentences.append(f"pp={layout.pp} splits replicas over the kinds of nodes of a pool of {where}; use pp=1.")
    if layout.ep > 1:
        sentences.append(
            f"ep={layout.ep} needs equally many sequences on every replica, and on {where} some have more; use ep=1."
        )
    replica_ranks = layout.tp * layout.cp
    if any(one.num_ranks % replica_ranks for one in parts):
        legal = nearest_divisor(replica_ranks, *(one.num_ranks for one in parts))
        sentences.append(f"replicas of {replica_ranks} ranks do not fit {where} evenly; use tp x cp = {legal}.")
    return tuple(sentences)


def row_split_rules(facts: Facts, num_rows: int, layout: Layout, schedule: Schedule, part: int) -> tuple[str, ...]:
    """Sentences on rules that `schedule.rows` breaks: the rows of each kind of nodes, out of `num_rows` that all
    replicas take at once."""
    parts, rows = facts.cluster.parts_of(part), list(schedule.rows)
    if len(parts) == 1:
        return (f"rows={rows} on nodes of one kind, which split rows evenly; leave it out.",) if rows else ()
    min_rows = replicas_of_parts(facts.cluster, part, layout.num_ranks // layout.dp)
    if (
        len(rows) != len(min_rows)
        or sum(rows) != num_rows
        or any(count < minimum for count, minimum in zip(rows, min_rows, strict=True))
    ):
        return (
            f"rows={rows} does not split {num_rows} sequences over two kinds of nodes, at least {min_rows[0]} and "
            f"{min_rows[1]} of them; plan the job again.",
        )
    return ()
