"""Other choices than those of a plan, and the step time that they would give.

Alternatives are the next best choices of each stage, with the rest of the plan unchanged. Memory-limited stages have
faster choices on the same ranks that do not fit. Runners-up are the best plans without one choice of the plan, found
by a new search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from meshwright.cost_models.protocol import CostModel
from meshwright.planner.compile import best_plan
from meshwright.planner.plan.cost_queries import Choice, stage_transfers
from meshwright.planner.plan.evaluate import free_bytes, private_bytes, refit_name, resident_bytes, tasks
from meshwright.planner.plan.pins import Pin, Ranks, parse_pins
from meshwright.planner.plan.plan import Plan
from meshwright.planner.search.assemble import Origin, Pick, assemble
from meshwright.planner.search.choice_costs import Candidate
from meshwright.planner.search.frontiers import Frontier, frontier, frontiers
from meshwright.planner.solver.result import Limits
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Schedule

_MAX_TRIED = 4
"""Maximum number of candidates that fit in memory and are evaluated for each stage and pool.

Slower ones seldom make a better plan.
"""


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another choice for a stage; `delta_seconds` is the increase of the step time."""

    ranks: Ranks
    layout: Layout
    schedule: Schedule
    period_seconds: float
    delta_seconds: float


@dataclass(frozen=True, kw_only=True)
class StageAlternatives:
    """The choices that the search considered for one stage: the best alternatives, and the number of choices that each
    rule rejected."""

    stage: str
    runners_up: tuple[Alternative, ...]
    rejected: Mapping[str, int]


def alternatives(plan: Plan, model: CostModel, *, max_count: int = 3) -> tuple[StageAlternatives, ...]:
    """Return up to `max_count` best alternatives of each stage, under the plan's pins. `model` is the cost model of the
    plan's own facts."""
    plans = ChangedPlans(plan, model)
    return tuple(
        StageAlternatives(
            stage=frontier_of_stage.stage.name,
            runners_up=_best(_fitting_alternatives(plan, plans, frontier_of_stage), max_count),
            rejected=dict(frontier_of_stage.rejected),
        )
        for frontier_of_stage in frontiers(plan.facts, model, parse_pins(plan.pins, plan.graph))
    )


def _best(alternatives: Iterator[Alternative], max_count: int) -> tuple[Alternative, ...]:
    """The fastest alternatives, one for each layout, so that they differ in more than a position or a micro-batch."""
    best: dict[Layout, Alternative] = {}
    for alternative in alternatives:
        fastest = best.get(alternative.layout)
        if fastest is None or alternative.period_seconds < fastest.period_seconds:
            best[alternative.layout] = alternative
    return tuple(sorted(best.values(), key=lambda a: (a.period_seconds, a.ranks, a.layout))[:max_count])


class ChangedPlans:
    """The plans that differ from one in the choice of a single stage."""

    def __init__(self, plan: Plan, model: CostModel) -> None:
        """`model` is the cost model of the plan's own facts."""
        self._plan, self._model = plan, model
        self.picks, self._order = _picks(plan), _order(plan)
        self._transfers = stage_transfers(plan.facts, model)

    def with_pick(self, stage: str, pick: Pick) -> Plan:
        """The plan with another choice of this stage, timed."""
        plan = self._plan
        return assemble(
            plan.facts,
            self._model,
            transfers=self._transfers,
            picks={**self.picks, stage: pick},
            order=self._order,
            origin=Origin(digests=plan.digests, pins=plan.pins, solver=plan.solver),
            ahead=plan.ahead,
        )


def _fitting_alternatives(plan: Plan, plans: ChangedPlans, frontier_of_stage: Frontier) -> Iterator[Alternative]:
    """For every pool, the fastest few alternatives of a stage that fit in memory."""
    stage = frontier_of_stage.stage.name
    for ranks in frontier_of_stage.pools:
        free = FreeMemory(plan, stage, ranks)
        fastest_first = sorted(frontier_of_stage.candidates_on(ranks), key=lambda candidate: candidate.seconds)
        small_enough = (Pick(ranks, c.choice) for c in fastest_first if free.lacking_bytes(c) <= 0)
        changed = ((pick, plans.with_pick(stage, pick)) for pick in small_enough if pick != plans.picks[stage])
        fitting = ((pick, other) for pick, other in changed if _fits(other))
        for pick, other in islice(fitting, _MAX_TRIED):
            yield Alternative(
                ranks=ranks,
                layout=pick.choice.layout,
                schedule=pick.choice.schedule,
                period_seconds=other.period_seconds,
                delta_seconds=other.period_seconds - plan.period_seconds,
            )


class FreeMemory:
    """The device memory that the other stages of a plan leave for one stage on some ranks.

    Weights of the stage's own role count as free, because the stage may share them.
    """

    def __init__(self, plan: Plan, stage: str, ranks: Ranks) -> None:
        role, inside = plan.stage(stage).role, ranks.ranks
        boundaries = {rank for pool in plan.pools for rank in (pool.ranks.start, pool.ranks.stop) if rank in inside}
        self._free_and_transient = []
        for rank in sorted({inside.start, *boundaries}):  # between boundaries of pools, all ranks hold the same
            others = [p for p in plan.placements if p.stage != stage and rank in plan.pool(p.pool).ranks]
            kept_bytes = sum(
                resident_bytes(plan, p) if plan.stage(p.stage).role != role else private_bytes(p) for p in others
            )
            transient_bytes = max((p.transient.total for p in others), default=0.0)
            self._free_and_transient.append((plan.facts.cluster.usable_bytes(rank) - kept_bytes, transient_bytes))

    def lacking_bytes(self, candidate: Candidate) -> float:
        """The bytes that a choice lacks on the fullest rank, with weights that it shares; negative if some are left."""
        private = candidate.private_bytes
        return max(
            private + max(candidate.transient_bytes, transient_bytes) - free_bytes
            for free_bytes, transient_bytes in self._free_and_transient
        )


def _fits(plan: Plan) -> bool:
    return free_bytes(plan) >= 0


def _picks(plan: Plan) -> dict[str, Pick]:
    picks = {}
    for placement in plan.placements:
        pool = plan.pool(placement.pool)
        choice = Choice(placement.layout, placement.schedule)
        picks[placement.stage] = Pick(Ranks(pool.first_rank, pool.num_ranks), choice)
    return picks


def _order(plan: Plan) -> tuple[str, ...]:
    """The plan's order of tasks, preceded by refits that only an alternative would need."""
    names = [task.name for task in tasks(plan)]
    further_refits = [name for name in map(refit_name, plan.graph.refit_targets) if name not in names]
    return (*further_refits, *names)


_MIN_GAIN = 1e-2
"""The smallest gain that is reported, relative to the stage's seconds."""


@dataclass(frozen=True, kw_only=True)
class MemoryLimited:
    """The smallest of a stage's faster choices on its ranks that memory excludes, given what other stages keep there.

    `gain_seconds` is the gain of the stage alone, and `lacking_bytes` the memory that a rank lacks for it.
    """

    stage: str
    layout: Layout
    schedule: Schedule
    gain_seconds: float
    lacking_bytes: float


def memory_limited(plan: Plan, model: CostModel) -> tuple[MemoryLimited, ...]:
    """Return the stages that memory limits, the largest gain first. `model` is the cost model of the plan's own
    facts."""
    stages = (_memory_limited_stage(plan, model, placement.stage) for placement in plan.placements)
    return tuple(sorted((stage for stage in stages if stage is not None), key=lambda stage: -stage.gain_seconds))


def _memory_limited_stage(plan: Plan, model: CostModel, stage: str) -> MemoryLimited | None:
    pool, seconds = plan.pool_of(stage), plan.placement(stage).cost.total
    ranks = Ranks(pool.first_rank, pool.num_ranks)
    pins = [pin for pin in parse_pins(plan.pins, plan.graph) if pin.stage == stage and pin.key != "pool"]
    stage_pins = (*pins, Pin(stage, "pool", ranks))
    # Not limited to choices that fit in memory.
    candidates = frontier(plan.facts, model, plan.stage(stage), stage_pins, is_limited=False).candidates_on(ranks)
    free = FreeMemory(plan, stage, ranks)
    excluded = [
        candidate
        for candidate in candidates
        if candidate.seconds < seconds * (1 - _MIN_GAIN) and free.lacking_bytes(candidate) > 0
    ]
    if not excluded:
        return None
    smallest = min(excluded, key=free.lacking_bytes)
    return MemoryLimited(
        stage=stage,
        layout=smallest.layout,
        schedule=smallest.schedule,
        gain_seconds=seconds - smallest.seconds,
        lacking_bytes=free.lacking_bytes(smallest),
    )


LIMITS = Limits(max_deterministic_time=2.0, gap=0.0)
"""The default limits of each search; a runner-up that they leave unproven is reported as such."""


@dataclass(frozen=True, kw_only=True)
class RunnerUp:
    """The best plan found without one choice; `period_seconds` is None if none fits.

    The gain of the choice is at most `delta_seconds`, and at least `proven_seconds` by the bound on plans without it.
    """

    stage: str | None  # None if the choice is the plan's staleness
    choice: str
    instead: str
    period_seconds: float | None
    delta_seconds: float | None
    proven_seconds: float | None


def runners_up(
    plan: Plan, model: CostModel, *, limits: Limits = LIMITS, progress: Callable[[], None] | None = None
) -> tuple[RunnerUp, ...]:
    """Return the runners-up without the layout of each stage whose layout no pin fixes, and the synchronous one; the
    largest gain first.

    `model` is the cost model of the plan's own facts. `progress` is called after each search.
    """
    pins = parse_pins(plan.pins, plan.graph)
    fixed = {pin.stage for pin in pins if pin.key == "layout" and not pin.forbids}
    results = []
    for placement in plan.placements:
        if placement.stage not in fixed:
            forbidden = Pin(placement.stage, "layout", placement.layout, forbids=True)
            other = best_plan(plan.facts, model, pins=(*pins, forbidden), limits=limits)
            results.append(_runner_up(plan, other, placement.stage))
        if progress:
            progress()  # a stage whose layout is pinned counts, too, so that there is one call for each
    if plan.staleness:
        synchronous = plan.facts.model_copy(update={"staleness": 0})
        results.append(_runner_up(plan, best_plan(synchronous, model, pins=pins, limits=limits), None))
    return tuple(sorted(results, key=_largest_gain_first))


def _largest_gain_first(runner_up: RunnerUp) -> float:
    """Return a sort key: without the choice there may be no plan at all, which is the largest gain."""
    return -math.inf if runner_up.delta_seconds is None else -runner_up.delta_seconds


def _runner_up(plan: Plan, other: object, stage: str | None) -> RunnerUp:
    choice = str(plan.placement(stage).layout) if stage else f"staleness {plan.staleness}"
    if not isinstance(other, Plan):
        return RunnerUp(
            stage=stage,
            choice=choice,
            instead="no plan found",
            period_seconds=None,
            delta_seconds=None,
            proven_seconds=None,
        )
    return RunnerUp(
        stage=stage,
        choice=choice,
        instead=str(other.placement(stage).layout) if stage else "staleness 0",
        period_seconds=other.period_seconds,
        delta_seconds=other.period_seconds - plan.period_seconds,
        proven_seconds=max(0.0, other.solver.bound_seconds - plan.period_seconds),
    )
