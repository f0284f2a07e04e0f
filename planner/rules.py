"""What is legal: which pools exist, which layouts a stage may have there, which schedules a layout may have.

Each function gives one sentence per broken rule, with the value, the rule and the nearest legal value. The search
enumerates by these rules and the verifier checks by them; neither knows of the other.
"""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.planner.job import Facts
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.layout import Layout, divisors, layout_violations, nearest_divisor
from meshwright.profiles.schedule import Recompute, Schedule
from meshwright.profiles.stages import Stage


def pool_sizes(cluster: Cluster) -> tuple[int, ...]:
    """How many ranks a pool may have: powers of two, and the whole cluster."""
    powers = [2**k for k in range(cluster.num_ranks.bit_length()) if 2**k <= cluster.num_ranks]
    return tuple(sorted({*powers, cluster.num_ranks}))


def first_ranks(cluster: Cluster, num_ranks: int) -> tuple[int, ...]:
    """Where a pool of this size may start: at multiples of its size, and not across a node that could hold it."""
    starts = range(0, cluster.num_ranks - num_ranks + 1, num_ranks)
    return tuple(first for first in starts if not _straddles(cluster, first, num_ranks))


def pool_violations(cluster: Cluster, first_rank: int, num_ranks: int) -> tuple[str, ...]:
    """Rules that a pool breaks."""
    if num_ranks not in pool_sizes(cluster):
        legal = _nearest(num_ranks, pool_sizes(cluster))
        return (
            f"{num_ranks} ranks is neither a power of two nor the whole cluster of {cluster.num_ranks}; "
            f"use {legal} ranks.",
        )
    if first_rank + num_ranks > cluster.num_ranks:
        legal = _nearest(first_rank, first_ranks(cluster, num_ranks))
        return (
            f"ranks {first_rank} to {first_rank + num_ranks - 1} leave the cluster of {cluster.num_ranks} ranks; "
            f"start at rank {legal}.",
        )
    if first_rank not in first_ranks(cluster, num_ranks):
        legal = _nearest(first_rank, first_ranks(cluster, num_ranks))
        return (f"a pool of {num_ranks} ranks cannot start at rank {first_rank}; start at rank {legal}.",)
    return ()


def rows_per_update(facts: Facts, stage: Stage) -> int:
    """The sequences that all replicas together take at once: a minibatch when training, else the batch."""
    workload = facts.workload
    return workload.batch_size // workload.num_minibatches if stage.trains else workload.batch_size


def rows_per_replica(facts: Facts, stage: Stage, layout: Layout) -> int:
    """The sequences that one replica takes at once."""
    return rows_per_update(facts, stage) // layout.dp


def workload_violations(facts: Facts) -> tuple[str, ...]:
    """Rules that the workload itself breaks, whatever is planned."""
    batch_size, num_minibatches = facts.workload.batch_size, facts.workload.num_minibatches
    if batch_size % num_minibatches:
        legal = nearest_divisor(num_minibatches, batch_size)
        return (f"num_minibatches={num_minibatches} does not divide batch_size={batch_size}; use {legal}.",)
    return ()


def layout_rules(facts: Facts, stage: Stage, layout: Layout) -> tuple[str, ...]:
    """Rules that a stage's layout breaks."""
    found = [
        *(workload_violations(facts) if stage.trains else ()),
        *layout_violations(layout, facts.models.spec(stage.role)),
    ]
    per_node, rows = facts.cluster.ranks_per_node, rows_per_update(facts, stage)
    if per_node % layout.tp:
        legal = nearest_divisor(layout.tp, per_node)
        found.append(f"tp={layout.tp} does not divide the {per_node} ranks of a node; use tp={legal}.")
    if rows % layout.dp:
        legal = nearest_divisor(layout.dp, rows)
        what = "minibatch" if stage.trains else "batch"
        found.append(f"dp={layout.dp} does not divide the {rows} sequences of a {what}; use dp={legal}.")
    if stage.generates and layout.sp:
        found.append("sp is on, and a single new token cannot be divided along the sequence; turn sp off.")
    return tuple(found)


def schedule_rules(facts: Facts, stage: Stage, layout: Layout, schedule: Schedule) -> tuple[str, ...]:
    """Rules that a stage's schedule breaks on a legal layout."""
    found = []
    rows = rows_per_replica(facts, stage, layout)
    if rows % schedule.micro_batch_size:
        legal = nearest_divisor(schedule.micro_batch_size, rows)
        found.append(
            f"micro_batch_size={schedule.micro_batch_size} does not divide the {rows} sequences of a replica; "
            f"use {legal}."
        )
    if schedule.recompute is not Recompute.NONE and not stage.trains:
        found.append(f"recompute={schedule.recompute} on a stage that does not train; use none.")
    slots = schedule.generation_slots
    if stage.generates and slots not in slot_counts(rows, layout.pp):
        legal = _nearest(slots, slot_counts(rows, layout.pp))
        found.append(
            f"generation_slots={slots} is not a power of two between pp={layout.pp} and the {rows} sequences of a "
            f"replica, nor that number; use {legal}."
        )
    if slots and not stage.generates:
        found.append(f"generation_slots={slots} on a stage that does not generate; use 0.")
    return tuple(found)


def slot_counts(num_rows: int, pp: int) -> tuple[int, ...]:
    """How many sequences a replica may have in flight: powers of two and all rows, one per pipeline stage at least."""
    counts = {2**k for k in range(num_rows.bit_length()) if 2**k <= num_rows} | {num_rows}
    return tuple(sorted(count for count in counts if count >= pp)) or (num_rows,)


def schedules(facts: Facts, stage: Stage, layout: Layout) -> tuple[Schedule, ...]:
    """Every legal schedule of a stage on a legal layout. Generation admits what slots are free: no micro-batches."""
    rows = rows_per_replica(facts, stage, layout)
    if stage.generates:
        return tuple(Schedule(generation_slots=slots) for slots in slot_counts(rows, layout.pp))
    kinds = tuple(Recompute) if stage.trains else (Recompute.NONE,)
    return tuple(Schedule(micro_batch_size=size, recompute=kind) for size in divisors(rows) for kind in kinds)


def _nearest(value: int, legal: Iterable[int]) -> int:
    return min(legal, key=lambda other: (abs(other - value), other))


def _straddles(cluster: Cluster, first: int, num_ranks: int) -> bool:
    per_node = cluster.ranks_per_node
    return num_ranks <= per_node and first // per_node != (first + num_ranks - 1) // per_node
