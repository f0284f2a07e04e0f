"""Explanation of a plan's period: critical path, use and idle time of pools, memory of ranks, and extrapolated costs.

Everything is computed from the plan; nothing is searched again. The items of a plan are the placements of its stages
and the refits of its weights; each is a task of the period.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshwright.cost_models.cost import Source, Term
from meshwright.planner.analysis.optional_features import (
    AdapterSummary,
    BestSamples,
    CallLatencies,
    EngineChoice,
    HostRewards,
    QuantisedCopy,
    SamplingMask,
    SkippedLogprobs,
    adapter_summary,
    best_samples,
    call_latencies,
    engine_choice,
    host_rewards,
    quantised_copy,
    sampling_mask,
    skipped_logprobs,
)
from meshwright.planner.plan.evaluate import Task, ranks_of, resident_bytes, tasks
from meshwright.planner.plan.evaluate import items as items_of
from meshwright.planner.plan.evaluate import task_name_of as task_name
from meshwright.planner.plan.plan import Plan, Pool
from meshwright.planner.plan.reward_workers import host_seconds
from meshwright.profiles.hardware import max_usable_bytes
from meshwright.profiles.stages import Role


@dataclass(frozen=True, kw_only=True)
class CriticalTask:
    """One task of the critical path, and why it did not start earlier."""

    task: str
    start_seconds: float
    seconds: float
    because: str
    largest_terms: tuple[Term, ...]


@dataclass(frozen=True, kw_only=True)
class PoolUse:
    """One pool: its stages, the share of the period in which its ranks are idle, and the memory of its fullest rank.

    `critical_seconds` is the time of its stages on the critical path; the pool with the most is the critical pool.
    """

    name: str
    stages: tuple[str, ...]
    idle_share: float
    critical_seconds: float
    peak_bytes: int
    free_bytes: int


@dataclass(frozen=True, kw_only=True)
class RankUse:
    """One rank: the share of the period in which it is idle, its peak memory, and the stage with the most resident
    bytes on it."""

    rank: int
    idle_share: float
    peak_bytes: int
    largest_resident: str
    largest_resident_bytes: float


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The explanation of a plan: why its period is as long as it is, what fills its ranks, and which costs are
    uncertain. `work` holds the fields of `planner.plan.plan.SearchWork`."""

    period_seconds: float
    bound_seconds: float
    gap: float
    status: str
    critical_path: tuple[CriticalTask, ...]
    pools: tuple[PoolUse, ...]
    ranks: tuple[RankUse, ...]
    device_bytes: int
    extrapolated: tuple[str, ...]
    pins: tuple[str, ...]
    work: Mapping[str, float]
    rewards: HostRewards | None = None
    latencies: CallLatencies | None = None
    engine: EngineChoice | None = None
    adapter: AdapterSummary | None = None
    critic_adapter: AdapterSummary | None = None
    best: BestSamples | None = None
    quantised: QuantisedCopy | None = None
    old_logprobs: SkippedLogprobs | None = None
    mask: SamplingMask | None = None

    @property
    def sentences(self) -> Iterator[str]:
        """Report lines on the choice of an engine, adapters, 8-bit floats, old log-probabilities, sampling masks,
        best-of-n, rewards on hosts and latencies of calls, where the plan has them."""
        copies = (self.adapter, self.critic_adapter, self.quantised)
        for part in (self.engine, *copies, self.old_logprobs, self.mask, self.best, self.rewards, self.latencies):
            yield from part.sentences if part else ()


_MAX_TERMS = 3
"""The number of largest cost terms that are reported for a task on the critical path."""

_TOLERANCE = 1e-9
"""Times that differ by less than this fraction of the period are equal; rounding depends on the order of a sum."""


def explain(plan: Plan) -> Explanation:
    """The explanation of a valid plan."""
    path = _critical_path(plan)
    return Explanation(
        period_seconds=plan.period_seconds,
        bound_seconds=plan.solver.bound_seconds,
        gap=plan.solver.gap,
        status=plan.solver.status,
        critical_path=path,
        pools=tuple(
            sorted((_pool_use(plan, pool, path) for pool in plan.pools), key=lambda use: -use.critical_seconds)
        ),
        ranks=tuple(_rank_use(plan, rank) for rank in range(plan.facts.cluster.num_ranks)),
        device_bytes=max_usable_bytes(plan.facts.cluster),
        extrapolated=tuple(task_name(i) for i in items_of(plan) if i.cost.source is Source.EXTRAPOLATED),
        pins=plan.pins,
        work=plan.solver.work.model_dump(),
        rewards=host_rewards(plan),
        latencies=call_latencies(plan.facts),
        engine=engine_choice(plan),
        adapter=adapter_summary(plan),
        critic_adapter=adapter_summary(plan, Role.CRITIC),
        best=best_samples(plan),
        quantised=quantised_copy(plan),
        old_logprobs=skipped_logprobs(plan),
        mask=sampling_mask(plan),
    )


def _critical_path(plan: Plan) -> tuple[CriticalTask, ...]:
    """The critical path, in order of time: the task that ends last, before it the one that it waited for, and so on.

    A task is a stage or a refit.
    """
    items = {task_name(item): item for item in items_of(plan)}
    by_name = {task.name: task for task in tasks(plan)}
    path: list[CriticalTask] = []
    current: str | None = max(items, key=lambda name: items[name].end_seconds)
    while current is not None:
        item = items[current]
        before, because = _blocker(plan, by_name[current], by_name)
        largest = sorted(item.cost.terms, key=lambda term: -term.amount)[:_MAX_TERMS]
        path.append(
            CriticalTask(
                task=current,
                start_seconds=item.start_seconds,
                seconds=item.cost.total,
                because=because,
                largest_terms=tuple(largest),
            )
        )
        current = before
    return tuple(reversed(path))


def _blocker(plan: Plan, task: Task, by_name: dict[str, Task]) -> tuple[str | None, str]:
    """The task that kept this one from starting, if any, and the reason: an input, or shared ranks."""
    ends = {task_name(item): item.end_seconds for item in items_of(plan)}
    starts = {task_name(item): item.start_seconds for item in items_of(plan)}
    start = starts[task.name]
    if start <= _TOLERANCE * plan.period_seconds:
        return None, "starts the period"
    inputs = {name: ends[name] + lag for name, lag in task.after}
    latest = max(inputs, key=inputs.__getitem__, default=None)
    if latest is not None and inputs[latest] >= start - _TOLERANCE * plan.period_seconds:
        reward_seconds = sum(
            map(host_seconds, (e for e in plan.edges if (e.producer, e.consumer) == (latest, task.name)))
        )
        return latest, f"needs {'rewards for ' if reward_seconds else ''}the output of {latest}"
    streams = next(
        (name for name in task.after_start_of if starts[name] >= start - _TOLERANCE * plan.period_seconds), None
    )
    if streams is not None:
        return streams, f"reads what {streams} writes while it runs"
    shared = [name for name, other in by_name.items() if name != task.name and other.ranks & task.ranks]
    occupied = [name for name in shared if abs(ends[name] - start) <= _TOLERANCE * plan.period_seconds]
    if not occupied:
        reads_rewards = task.name in {edge.consumer for edge in plan.graph.host_edges}
        return None, "needs rewards of an earlier period" if reads_rewards else "needs an input from an earlier period"
    return occupied[0], f"runs on rank {min(by_name[occupied[0]].ranks & task.ranks)} after {occupied[0]}"


def _pool_use(plan: Plan, pool: Pool, path: Sequence[CriticalTask]) -> PoolUse:
    stages = tuple(placement.stage for placement in plan.placements if placement.pool == pool.name)
    peak = max(plan.peak_bytes_per_rank[rank] for rank in pool.ranks)
    return PoolUse(
        name=pool.name,
        stages=stages,
        idle_share=statistics.fmean(_idle_share(plan, rank) for rank in pool.ranks),
        critical_seconds=math.fsum(task.seconds for task in path if task.task in stages),
        peak_bytes=peak,
        free_bytes=plan.facts.cluster.usable_bytes(pool.first_rank) - peak,
    )


def _idle_share(plan: Plan, rank: int) -> float:
    return 1 - sum(item.cost.total for item in items_of(plan) if rank in ranks_of(plan, item)) / plan.period_seconds


def _rank_use(plan: Plan, rank: int) -> RankUse:
    resident = {p.stage: resident_bytes(plan, p) for p in plan.placements if rank in plan.pool(p.pool).ranks}
    largest = max(resident, key=resident.__getitem__, default="")
    return RankUse(
        rank=rank,
        idle_share=_idle_share(plan, rank),
        peak_bytes=plan.peak_bytes_per_rank[rank],
        largest_resident=largest,
        largest_resident_bytes=resident.get(largest, 0.0),
    )
