"""Why a step takes as long as it does: its critical path, what is idle, what costs most and what was guessed.

Everything is read off the plan; nothing is searched again.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.cost_models.cost import Source, Term
from meshwright.planner.evaluate import Task, ranks_of, resident_bytes, tasks
from meshwright.planner.evaluate import items as items_of
from meshwright.planner.evaluate import name_of as task_name
from meshwright.planner.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Wait:
    """One task of the critical path, and why it did not start before."""

    task: str
    start_seconds: float
    seconds: float
    because: str
    largest_terms: tuple[Term, ...]


@dataclass(frozen=True, kw_only=True)
class RankUse:
    """One rank: the share of the step in which nothing runs on it, and its memory at the worst instant."""

    rank: int
    idle_share: float
    peak_bytes: int
    largest_resident: str
    largest_resident_bytes: float


@dataclass(frozen=True, kw_only=True)
class Explanation:
    period_seconds: float
    bound_seconds: float
    gap: float
    critical_path: tuple[Wait, ...]
    ranks: tuple[RankUse, ...]
    device_bytes: int
    extrapolated: tuple[str, ...]
    pins: tuple[str, ...]


_NUM_TERMS = 3
_TOLERANCE = 1e-9


def explain(plan: Plan) -> Explanation:
    """The explanation of a valid plan."""
    return Explanation(
        period_seconds=plan.period_seconds,
        bound_seconds=plan.solver.bound_seconds,
        gap=plan.solver.gap,
        critical_path=_critical_path(plan),
        ranks=tuple(_rank_use(plan, rank) for rank in range(plan.facts.cluster.num_ranks)),
        device_bytes=plan.facts.cluster.device.usable_bytes,
        extrapolated=tuple(task_name(i) for i in items_of(plan) if i.cost.source is Source.EXTRAPOLATED),
        pins=plan.pins,
    )


def _critical_path(plan: Plan) -> tuple[Wait, ...]:
    """From the task that ends last back through what each one waited for, in order of time."""
    items = {task_name(item): item for item in items_of(plan)}
    by_name = {task.name: task for task in tasks(plan)}
    path: list[Wait] = []
    current: str | None = max(items, key=lambda name: items[name].end_seconds)
    while current is not None:
        item = items[current]
        before, because = _waited_for(plan, by_name[current], by_name)
        largest = sorted(item.cost.terms, key=lambda term: -term.amount)[:_NUM_TERMS]
        path.append(
            Wait(
                task=current,
                start_seconds=item.start_seconds,
                seconds=item.cost.total,
                because=because,
                largest_terms=tuple(largest),
            )
        )
        current = before
    return tuple(reversed(path))


def _waited_for(plan: Plan, task: Task, by_name: dict[str, Task]) -> tuple[str | None, str]:
    """The task that kept this one from starting, and how: as its input or on its ranks."""
    ends = {task_name(item): item.end_seconds for item in items_of(plan)}
    start = next(item.start_seconds for item in items_of(plan) if task_name(item) == task.name)
    if start <= _TOLERANCE:
        return None, "starts the step"
    inputs = {name: ends[name] + lag for name, lag in task.after}
    latest = max(inputs, key=inputs.__getitem__, default=None)
    if latest is not None and inputs[latest] >= start - _TOLERANCE * plan.period_seconds:
        return latest, f"needs what {latest} gives"
    shared = [name for name, other in by_name.items() if name != task.name and other.ranks & task.ranks]
    occupied = [name for name in shared if abs(ends[name] - start) <= _TOLERANCE * plan.period_seconds]
    if not occupied:
        return None, "is scheduled then"
    return occupied[0], f"takes its turn on rank {min(by_name[occupied[0]].ranks & task.ranks)} after {occupied[0]}"


def _rank_use(plan: Plan, rank: int) -> RankUse:
    busy = sum(item.cost.total for item in items_of(plan) if rank in ranks_of(plan, item))
    resident = {p.stage: resident_bytes(plan, p) for p in plan.placements if rank in plan.pool(p.pool).ranks}
    largest = max(resident, key=resident.__getitem__, default="")
    return RankUse(
        rank=rank,
        idle_share=1 - busy / plan.period_seconds,
        peak_bytes=plan.peak_bytes_per_rank[rank],
        largest_resident=largest,
        largest_resident_bytes=resident.get(largest, 0.0),
    )
