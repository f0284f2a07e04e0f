"""The times, the period and the bytes of a plan. Tasks are list-scheduled in the plan's own order.

Only the placements, edges and refits of the plan are read, so the result does not depend on the search that found it.
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
from meshwright.profiles.hardware import AnyCluster
from meshwright.profiles.stages import GENERATE

_BISECTIONS = 60
"""Bisection steps after which a time is as exact as a float."""

Item: TypeAlias = Placement | Refit
_I = TypeVar("_I", Placement, Refit)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task that occupies ranks for some seconds. `after` gives the tasks whose end it waits for, each with a lag in
    seconds; `after_start_of` those whose start it waits for; `not_before` is in seconds from the start of the
    period."""

    name: str
    ranks: frozenset[int]
    seconds: float
    after: tuple[tuple[str, float], ...]
    after_start_of: tuple[str, ...] = ()
    not_before: float = 0.0


@dataclass(frozen=True)
class Times:
    """The start and end of a task, in seconds since the start of the period."""

    start: float
    end: float


def evaluate(plan: Plan) -> Plan:
    """The plan with the times, the period and the peak bytes that follow from its choices and its order."""
    times = _times(plan)
    placements = tuple(_timed(p, times[task_name_of(p)]) for p in plan.placements)
    refits = tuple(_timed(r, times[task_name_of(r)]) for r in plan.refits)
    return plan.model_copy(
        update={
            "placements": tuple(sorted(placements, key=lambda p: plan.graph.position[p.stage])),
            "refits": tuple(sorted(refits, key=lambda r: plan.graph.position[r.target])),
            "period_seconds": period_seconds(plan, times),
            "peak_bytes_per_rank": peak_bytes(plan),
        }
    )


def _times(plan: Plan) -> dict[str, Times]:
    """The earliest times of all tasks in the shortest period.

    Where a transfer from an earlier period would arrive late, the stage that reads it is delayed. The period is found
    by bisection: a longer one makes the transfer less late.
    """
    times = list_schedule(tasks(plan))
    low, high = _makespan(times), period_seconds(plan, times)
    if high <= low:
        return times
    if (shortest := _times_within(plan, low)) is not None:
        return shortest
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        candidate = _times_within(plan, middle)
        if candidate is None:
            low = middle
        else:
            high, times = middle, candidate
    return times


def _times_within(plan: Plan, seconds: float) -> dict[str, Times] | None:
    """The earliest times in a period of this length; None where it is too short.

    They are longest paths, each of which goes through every transfer to a later period at most once, so they are found
    after one iteration for each such transfer and one more.
    """
    earliest: dict[str, float] = {}
    for _ in range(sum(_periods_between(plan, edge) > 0 for edge in plan.edges) + 1):
        times = list_schedule(tasks(plan, earliest))
        if _makespan(times) > seconds:
            return None
        late = False
        for edge in plan.edges:
            if periods := _periods_between(plan, edge):
                ready = times[edge.producer].end + edge.cost.total - periods * seconds
                if times[edge.consumer].start < ready:
                    earliest[edge.consumer], late = max(ready, earliest.get(edge.consumer, 0.0)), True
        if not late:
            return times
    return None


def period_seconds(plan: Plan, times: Mapping[str, Times]) -> float:
    """Seconds from the start of one period to the start of the next in the steady state.

    A period lasts until its last task ends, or longer if a transfer to a later period would otherwise arrive late.
    """
    late = [0.0]
    for edge in plan.edges:
        if periods := _periods_between(plan, edge):
            arrival = times[edge.producer].end + edge.cost.total
            late.append((arrival - times[edge.consumer].start) / periods)
    return max(*late, _makespan(times))


def _makespan(times: Mapping[str, Times]) -> float:
    return max(time.end for time in times.values())


def _periods_between(plan: Plan, edge: Edge) -> int:
    """The number of periods from the one in which a transfer is written to the one in which it is read."""
    return plan.placement(edge.producer).steps_ahead - plan.placement(edge.consumer).steps_ahead


def items(plan: Plan) -> tuple[Item, ...]:
    """The refits and placements of a plan: all that occupies ranks during a period."""
    return (*plan.refits, *plan.placements)


def task_name_of(item: Item) -> str:
    """The task name of a placement or a refit."""
    return item.stage if isinstance(item, Placement) else refit_name(item.target)


def refit_name(target: str) -> str:
    """The task name of the refit of a stage's copy of the weights."""
    return f"refit {target}"


def ranks_of(plan: Plan, item: Item) -> frozenset[int]:
    """The ranks that an item occupies; a refit occupies those of both pools."""
    if isinstance(item, Placement):
        return frozenset(plan.pool(item.pool).ranks)
    return frozenset(plan.pool_of(item.source).ranks) | frozenset(plan.pool_of(item.target).ranks)


def tasks(plan: Plan, earliest_starts: Mapping[str, float] | None = None) -> tuple[Task, ...]:
    """The refits and stages of one period in the order of their start; `earliest_starts` gives the earliest start of
    some, by name, in seconds."""
    position, earliest_starts = plan.graph.position, earliest_starts or {}
    ordered = sorted(
        items(plan),
        key=lambda i: (i.start_seconds, i.end_seconds, isinstance(i, Placement), position[_stage_of(i)]),
    )
    return tuple(
        Task(
            name=task_name_of(item),
            ranks=ranks_of(plan, item),
            seconds=item.cost.total,
            after=_predecessors(plan, item),
            after_start_of=tuple(edge.producer for edge in inputs_of(plan, item) if _is_streamed(plan, edge)),
            not_before=earliest_starts.get(task_name_of(item), 0.0),
        )
        for item in ordered
    )


def list_schedule(order: Sequence[Task]) -> dict[str, Times]:
    """Start each task as early as its ranks and inputs allow; every rank takes its tasks in this order."""
    free: dict[int, float] = {}
    times: dict[str, Times] = {}
    for task in order:
        ready = max([task.not_before, *(times[name].end + lag for name, lag in task.after)])
        ready = max([ready, *(times[name].start for name in task.after_start_of)])
        start = max(ready, max((free.get(rank, 0.0) for rank in task.ranks), default=0.0) if task.seconds else 0.0)
        times[task.name] = Times(start, start + task.seconds)
        if task.seconds:
            free.update(dict.fromkeys(task.ranks, start + task.seconds))
    return times


def peak_bytes(plan: Plan) -> tuple[int, ...]:
    """Peak bytes on every rank: each copy of weights once, and the largest transient bytes of a stage on the rank."""
    edges = {0, plan.facts.cluster.num_ranks, *(edge for p in plan.pools for edge in (p.ranks.start, p.ranks.stop))}
    between = ((_peak_bytes_on_rank(plan, first), last - first) for first, last in pairwise(sorted(edges)))
    return tuple(num_bytes for num_bytes, num_ranks in between for _ in range(num_ranks))


def resident_bytes(plan: Plan, placement: Placement) -> float:
    """Bytes that a stage keeps on each of its ranks, without weights that it shares with another stage."""
    if plan.copy_of(placement.stage) == placement.stage:
        return placement.resident.total
    return private_bytes(placement)


def private_bytes(placement: Placement) -> float:
    """Bytes that a stage keeps on each of its ranks besides the weights."""
    return math.fsum(term.amount for term in placement.resident.terms if term.name != WEIGHTS)


def _peak_bytes_on_rank(plan: Plan, rank: int) -> int:
    on_rank = [p for p in plan.placements if rank in plan.pool(p.pool).ranks]
    resident = math.fsum(resident_bytes(plan, p) for p in on_rank)
    return math.ceil(resident + max((p.transient.total for p in on_rank), default=0.0))


def fullest_rank(cluster: AnyCluster, peaks: Sequence[int]) -> int:
    """The rank with the least usable device memory left, given the peak bytes of every rank."""
    return max(range(len(peaks)), key=lambda rank: peaks[rank] - cluster.usable_bytes(rank))


def free_bytes(plan: Plan) -> int:
    """Bytes that the fullest rank has left; negative where it has too little memory."""
    rank = fullest_rank(plan.facts.cluster, plan.peak_bytes_per_rank)
    return plan.facts.cluster.usable_bytes(rank) - plan.peak_bytes_per_rank[rank]


def keeps_generator(plan: Plan) -> bool:
    """True if all that generation allocates while it runs fits beside the peak of every one of its ranks.

    A generator, with its KV cache and its CUDA graphs, may then stay between two periods.
    """
    generation, cluster = plan.placement(GENERATE), plan.facts.cluster
    ranks = plan.pool(generation.pool).ranks
    free = min(cluster.usable_bytes(rank) - plan.peak_bytes_per_rank[rank] for rank in ranks)
    return generation.transient.total <= free


def host_bytes(plan: Plan) -> float:
    """Bytes offloaded to host memory, on the node with most of them."""
    cluster, host_bytes_of_node = plan.facts.cluster, defaultdict[tuple[int, int], float](float)
    for placement in plan.placements:
        for rank in plan.pool(placement.pool).ranks:
            part = cluster.part_of(rank)
            node = (rank - cluster.first_ranks[part]) // cluster.parts[part].ranks_per_node
            host_bytes_of_node[part, node] += placement.host.total
    return max(host_bytes_of_node.values())


def inputs_of(plan: Plan, item: Item) -> tuple[Edge, ...]:
    """The edges over which a stage waits for others in its own period."""
    if isinstance(item, Refit):
        return ()
    return tuple(e for e in plan.edges if e.consumer == item.stage and plan.reads_same_period(e.producer, e.consumer))


def _predecessors(plan: Plan, item: Item) -> tuple[tuple[str, float], ...]:
    if isinstance(item, Refit):
        return ()
    inputs = [(edge.producer, edge.cost.total - _streaming_seconds(plan, edge)) for edge in inputs_of(plan, item)]
    refits = [
        (task_name_of(refit), 0.0) for refit in plan.refits if item.stage in plan.graph.refit_readers(refit.target)
    ]
    return (*inputs, *refits)


def _is_streamed(plan: Plan, edge: Edge) -> bool:
    """True if the consumer reads chunks while the producer generates."""
    return plan.stage(edge.producer).generates and plan.placement(edge.consumer).schedule.chunk_tokens > 0


def _streaming_seconds(plan: Plan, edge: Edge) -> float:
    """Seconds by which a streaming stage may start before its producer ends: all of its time but the tail."""
    consumer = plan.placement(edge.consumer)
    return consumer.cost.total - consumer.tail_seconds if _is_streamed(plan, edge) else 0.0


def _stage_of(item: Item) -> str:
    return item.stage if isinstance(item, Placement) else item.target


def _timed(item: _I, times: Times) -> _I:
    return item.model_copy(update={"start_seconds": times.start, "end_seconds": times.end})
