"""What a plan takes: the times of a turn by list scheduling in its own order, its period, and the bytes on every rank.

It reads placements, edges and refits, and knows nothing of how they were found.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias, TypeVar

from meshwright.cost_models.cost import WEIGHTS
from meshwright.planner.plan.plan import Edge, Placement, Plan, Refit
from meshwright.profiles.cluster import AnyCluster

_BISECTIONS = 60
"""Halvings after which a time is as exact as a float."""

Item: TypeAlias = Placement | Refit
_I = TypeVar("_I", Placement, Refit)


@dataclass(frozen=True, kw_only=True)
class Task:
    """Something that occupies ranks for a time. `after` gives the tasks whose end it waits for, each with a lag in
    seconds; `beside` gives those whose start it waits for; `not_before` is in seconds from the start of the turn."""

    name: str
    ranks: frozenset[int]
    seconds: float
    after: tuple[tuple[str, float], ...]
    beside: tuple[str, ...] = ()
    not_before: float = 0.0


@dataclass(frozen=True)
class Times:
    """When a task runs, in seconds since the start of the turn."""

    start: float
    end: float


def evaluate(plan: Plan) -> Plan:
    """The plan with the times, the period and the peak bytes that follow from its choices and its order."""
    times = _times(plan)
    placements = tuple(_timed(p, times[name_of(p)]) for p in plan.placements)
    refits = tuple(_timed(r, times[name_of(r)]) for r in plan.refits)
    return plan.model_copy(
        update={
            "placements": tuple(sorted(placements, key=lambda p: plan.graph.position[p.stage])),
            "refits": tuple(sorted(refits, key=lambda r: plan.graph.position[r.target])),
            "period_seconds": period_seconds(plan, times),
            "peak_bytes_per_rank": peak_bytes(plan),
        }
    )


def _times(plan: Plan) -> dict[str, Times]:
    """Each task as early as it may be in the shortest turn. Where what an earlier turn hands over would be late, what
    reads it is held: the turn grows with it, and what is late shrinks."""
    times = list_schedule(tasks(plan))
    low, high = _makespan(times), period_seconds(plan, times)
    if high <= low:
        return times
    if (shortest := _within(plan, low)) is not None:
        return shortest
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        found = _within(plan, middle)
        if found is None:
            low = middle
        else:
            high, times = middle, found
    return times


def _within(plan: Plan, seconds: float) -> dict[str, Times] | None:
    """The earliest times in a turn of so many seconds; None where it is too short.

    They are longest paths, which go through each hand-over to a later turn once at most.
    """
    held: dict[str, float] = {}
    for _ in range(sum(_turns(plan, edge) > 0 for edge in plan.edges) + 1):
        times = list_schedule(tasks(plan, held))
        if _makespan(times) > seconds:
            return None
        late = False
        for edge in plan.edges:
            if turns := _turns(plan, edge):
                ready = times[edge.producer].end + edge.cost.total - turns * seconds
                if times[edge.consumer].start < ready:
                    held[edge.consumer], late = max(ready, held.get(edge.consumer, 0.0)), True
        if not late:
            return times
    return None


def period_seconds(plan: Plan, times: Mapping[str, Times]) -> float:
    """From the start of one turn to the start of the next, when all turns are alike.

    A turn lasts until its last task ends. It lasts longer where what a stage hands to a later turn would arrive late.
    """
    late = [0.0]
    for edge in plan.edges:
        if turns := _turns(plan, edge):
            arrival = times[edge.producer].end + edge.cost.total
            late.append((arrival - times[edge.consumer].start) / turns)
    return max(*late, _makespan(times))


def _makespan(times: Mapping[str, Times]) -> float:
    return max(time.end for time in times.values())


def _turns(plan: Plan, edge: Edge) -> int:
    """By which a hand-over is read later than it is written."""
    return plan.placement(edge.producer).steps_ahead - plan.placement(edge.consumer).steps_ahead


def items(plan: Plan) -> tuple[Item, ...]:
    """All that occupies ranks during a turn."""
    return (*plan.refits, *plan.placements)


def name_of(item: Item) -> str:
    """The name of the task that a placement or a refit is."""
    return item.stage if isinstance(item, Placement) else refit_name(item.target)


def refit_name(target: str) -> str:
    """The name of the task that brings the trained weights to a stage's copy."""
    return f"refit {target}"


def ranks_of(plan: Plan, item: Item) -> frozenset[int]:
    """The ranks that a stage occupies, or that a refit occupies: those of both pools."""
    if isinstance(item, Placement):
        return frozenset(plan.pool(item.pool).ranks)
    return frozenset(plan.pool_of(item.source).ranks) | frozenset(plan.pool_of(item.target).ranks)


def tasks(plan: Plan, held: Mapping[str, float] | None = None) -> tuple[Task, ...]:
    """The refits and stages of one turn in the order of their start; those that are `held` do not begin before so many
    seconds have passed."""
    position, held = plan.graph.position, held or {}
    ordered = sorted(
        items(plan),
        key=lambda i: (i.start_seconds, i.end_seconds, isinstance(i, Placement), position[_stage(i)]),
    )
    return tuple(
        Task(
            name=name_of(item),
            ranks=ranks_of(plan, item),
            seconds=item.cost.total,
            after=_after(plan, item),
            beside=tuple(edge.producer for edge in inputs_of(plan, item) if _is_streamed(plan, edge)),
            not_before=held.get(name_of(item), 0.0),
        )
        for item in ordered
    )


def list_schedule(order: Sequence[Task]) -> dict[str, Times]:
    """Each task as early as its ranks and what it waits for allow, ranks taking the tasks in this order."""
    free: dict[int, float] = {}
    times: dict[str, Times] = {}
    for task in order:
        ready = max([task.not_before, *(times[name].end + lag for name, lag in task.after)])
        ready = max([ready, *(times[name].start for name in task.beside)])
        start = max(ready, max((free.get(rank, 0.0) for rank in task.ranks), default=0.0) if task.seconds else 0.0)
        times[task.name] = Times(start, start + task.seconds)
        if task.seconds:
            free.update(dict.fromkeys(task.ranks, start + task.seconds))
    return times


def peak_bytes(plan: Plan) -> tuple[int, ...]:
    """Bytes on every rank at its worst instant: each copy once, and the largest transient of the stages that use it."""
    edges = {0, plan.facts.cluster.num_ranks, *(edge for p in plan.pools for edge in (p.ranks.start, p.ranks.stop))}
    between = ((_bytes_on(plan, first), last - first) for first, last in pairwise(sorted(edges)))
    return tuple(num_bytes for num_bytes, num_ranks in between for _ in range(num_ranks))


def resident_bytes(plan: Plan, placement: Placement) -> float:
    """Bytes that a stage keeps on its ranks, without weights that another stage's copy already holds."""
    if plan.copy_of(placement.stage) == placement.stage:
        return placement.resident.total
    return private_bytes(placement)


def private_bytes(placement: Placement) -> float:
    """Bytes that a stage keeps on its ranks beside the weights."""
    return math.fsum(term.amount for term in placement.resident.terms if term.name != WEIGHTS)


def _bytes_on(plan: Plan, rank: int) -> int:
    here = [p for p in plan.placements if rank in plan.pool(p.pool).ranks]
    resident = math.fsum(resident_bytes(plan, p) for p in here)
    return math.ceil(resident + max((p.transient.total for p in here), default=0.0))


def fullest_rank(cluster: AnyCluster, peaks: Sequence[int]) -> int:
    """Of ranks with these peaks, in bytes, the one that has the least left of the memory that its device can use."""
    return max(range(len(peaks)), key=lambda rank: peaks[rank] - cluster.usable_bytes(rank))


def free_bytes(plan: Plan) -> int:
    """What the fullest rank has left; negative where it has too little."""
    rank = fullest_rank(plan.facts.cluster, plan.peak_bytes_per_rank)
    return plan.facts.cluster.usable_bytes(rank) - plan.peak_bytes_per_rank[rank]


def host_bytes(plan: Plan) -> float:
    """What waits in host memory, on the node with the most of it."""
    cluster, of_node = plan.facts.cluster, defaultdict[tuple[int, int], float](float)
    for placement in plan.placements:
        for rank in plan.pool(placement.pool).ranks:
            part = cluster.part_of(rank)
            node = (rank - cluster.first_ranks[part]) // cluster.parts[part].ranks_per_node
            of_node[part, node] += placement.host.total
    return max(of_node.values())


def inputs_of(plan: Plan, item: Item) -> tuple[Edge, ...]:
    """The edges over which a stage waits for others in its own turn."""
    if isinstance(item, Refit):
        return ()
    return tuple(e for e in plan.edges if e.consumer == item.stage and plan.waits(e.producer, e.consumer))


def _after(plan: Plan, item: Item) -> tuple[tuple[str, float], ...]:
    if isinstance(item, Refit):
        return ()
    inputs = [(edge.producer, edge.cost.total - _early_seconds(plan, edge)) for edge in inputs_of(plan, item)]
    refits = [(name_of(refit), 0.0) for refit in plan.refits if item.stage in plan.graph.refit_readers(refit.target)]
    return (*inputs, *refits)


def _is_streamed(plan: Plan, edge: Edge) -> bool:
    """Whether the consumer reads chunks while the producer goes on."""
    return plan.stage(edge.producer).generates and plan.placement(edge.consumer).schedule.chunk_tokens > 0


def _early_seconds(plan: Plan, edge: Edge) -> float:
    """How long before the end of what it reads a stage may start: all of its time but the tail."""
    consumer = plan.placement(edge.consumer)
    return consumer.cost.total - consumer.tail_seconds if _is_streamed(plan, edge) else 0.0


def _stage(item: Item) -> str:
    return item.stage if isinstance(item, Placement) else item.target


def _timed(item: _I, times: Times) -> _I:
    return item.model_copy(update={"start_seconds": times.start, "end_seconds": times.end})
