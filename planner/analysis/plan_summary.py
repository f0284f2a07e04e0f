"""A summary of a plan: what fills the memory of the fullest rank, which layout each stage would have instead and why
it has not, and what a number of steps costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from meshwright.cost_models.cost import WEIGHTS, Term
from meshwright.cost_models.protocol import CostModel
from meshwright.planner.analysis.alternatives import ChangedPlans, FreeMemory
from meshwright.planner.plan.evaluate import free_bytes, fullest_rank
from meshwright.planner.plan.pins import Pin, Ranks, parse_pins
from meshwright.planner.plan.plan import Placement, Plan
from meshwright.planner.plan.steps_ahead import SearchCase
from meshwright.planner.search.assemble import Pick
from meshwright.planner.search.choice_costs import TimeLimit
from meshwright.planner.search.frontiers import Frontier, PoolKind, frontier
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Offload

DEFAULT_NUM_STEPS = 1000
"""The number of steps whose GPU-hours and money are reported, if the user gives none."""

_HOUR = 3600.0
_GIB = 2**30
_MAX_TRIED = 4
"""Maximum number of other choices of a stage whose whole plan is evaluated, the fastest first."""

_SLOWDOWNS = (1.25, 2.0)
"""Factors by which another layout may slow its stage, tried in order; without limit only if none of these fits."""


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """Hours, GPU-hours and, with the price of a GPU-hour, money of a number of steps."""

    num_steps: int
    hours: float
    gpu_hours: float
    price: float | None
    money: float | None

    @property
    def sentence(self) -> str:
        """`1,000 steps take 5.9 hours and 377.2 GPU-hours, 943.00 at 2.5 a GPU-hour`."""
        taken = f"{self.num_steps:,} steps take {self.hours:,.1f} hours and {self.gpu_hours:,.1f} GPU-hours"
        return taken if self.money is None else f"{taken}, {self.money:,.2f} at {self.price:g} a GPU-hour"


def run_cost(plan: Plan, price: float | None = None, num_steps: int = DEFAULT_NUM_STEPS) -> RunCost:
    """The cost of this many steps of a plan; `price` is that of a GPU-hour, in any currency."""
    hours = plan.period_seconds * num_steps / _HOUR
    gpu_hours = hours * plan.facts.cluster.num_ranks
    money = None if price is None else gpu_hours * price
    return RunCost(num_steps=num_steps, hours=hours, gpu_hours=gpu_hours, price=price, money=money)


@dataclass(frozen=True, kw_only=True)
class MemoryPart:
    """Bytes that a stage needs on a rank for one purpose; `stays` is False if it needs them only while it runs."""

    stage: str
    what: str
    num_bytes: float
    stays: bool


def memory_parts(plan: Plan, rank: int | None = None) -> tuple[MemoryPart, ...]:
    """The parts of the peak memory of a rank, by default the fullest one; the largest first.

    Of the stages on the rank, only the one that needs most while it runs counts with what it needs then.
    """
    if rank is None:
        rank = fullest_rank(plan.facts.cluster, plan.peak_bytes_per_rank)
    on_rank = [placement for placement in plan.placements if rank in plan.pool(placement.pool).ranks]
    parts = [part for placement in on_rank for part in _resident_parts(plan, placement)]
    if on_rank:
        worst = max(on_rank, key=lambda placement: placement.transient.total)
        parts += _parts(worst.stage, worst.transient.merged().terms, stays=False)
    return tuple(sorted(parts, key=lambda part: -part.num_bytes))


def _resident_parts(plan: Plan, placement: Placement) -> Iterator[MemoryPart]:
    """Yield what a stage keeps on each of its ranks, without weights that it shares with another stage."""
    owns_weights = plan.copy_of(placement.stage) == placement.stage
    terms = [term for term in placement.resident.merged().terms if owns_weights or term.name != WEIGHTS]
    return _parts(placement.stage, terms, stays=True)


def _parts(stage: str, terms: Sequence[Term], *, stays: bool) -> Iterator[MemoryPart]:
    for term in terms:
        if term.amount:
            yield MemoryPart(stage=stage, what=term.name, num_bytes=term.amount, stays=stays)


@dataclass(frozen=True, kw_only=True)
class NextLayout:
    """The next best layout of a stage on its ranks, with everything else unchanged.

    `instead` is None if no other layout is legal, or if the stage's layout `is_pinned`: by the user, or because another
    trainer gives several stages one layout. `step_seconds` is the increase of the step and `stage_seconds` that of the
    stage. `mostly` is the cost term that grows most, with its increase in seconds. If no other layout fits,
    `lacking_bytes` is what `instead`, the one that lacks least, needs more on a rank.
    """

    stage: str
    layout: Layout
    instead: Layout | None
    step_seconds: float | None = None
    stage_seconds: float | None = None
    mostly: Term | None = None
    lacking_bytes: float | None = None
    is_pinned: bool = False

    @property
    def reason(self) -> str:
        """Why the stage does not have the layout."""
        if self.instead is None:
            return "this layout is pinned" if self.is_pinned else "no other layout is legal on these ranks"
        if self.lacking_bytes is not None:
            return f"needs {self.lacking_bytes / _GIB:.2f} GiB more on a rank than is free"
        grown = f"mostly {self.mostly.name} {self.mostly.amount:+.3f} s" if self.mostly else "no term grows"
        if self.step_seconds and self.step_seconds < 0:
            return "faster, but by less than the gap at which the search stopped"
        if self.step_seconds:
            return grown
        return f"the step is as long, the stage takes {self.stage_seconds:+.3f} s, {grown}"


def next_layouts(plan: Plan, model: CostModel) -> Iterator[NextLayout]:
    """Yield the next best layout of each stage. `model` is the cost model of the plan's own facts."""
    plans = ChangedPlans(plan, model)
    for placement in plan.placements:
        yield _next_layout(plan, model, plans, placement)


def _next_layout(plan: Plan, model: CostModel, plans: ChangedPlans, placement: Placement) -> NextLayout:
    pool, seconds = plan.pool_of(placement.stage), placement.cost.total
    ranks = Ranks(pool.first_rank, pool.num_ranks)
    for longest in (*(factor * seconds for factor in _SLOWDOWNS), math.inf):
        others = _others(plan, model, placement, ranks, longest)
        fitting = list(islice(_fitting_plans(plan, plans, placement.stage, ranks, others), _MAX_TRIED))
        if fitting:
            best = min(fitting, key=lambda other: (other.period_seconds, other.placement(placement.stage).cost.total))
            return _compared(plan, best, placement)
    smallest = others.smallest.get(plan.part_of(placement.stage))
    if smallest is None:
        is_pinned = any(
            pin.stage == placement.stage and pin.key == "layout" and not pin.forbids
            for pin in parse_pins(plan.pins, plan.graph)
        )
        return NextLayout(stage=placement.stage, layout=placement.layout, instead=None, is_pinned=is_pinned)
    changed = plans.with_pick(placement.stage, Pick(ranks, smallest.choice))
    lacking = max(FreeMemory(plan, placement.stage, ranks).lacking_bytes(smallest), -free_bytes(changed))
    return NextLayout(
        stage=placement.stage,
        layout=placement.layout,
        instead=smallest.layout,
        lacking_bytes=max(lacking, 0.0),
    )


def _compared(plan: Plan, other: Plan, placement: Placement) -> NextLayout:
    """Compare the plan with another that differs in the layout of one stage."""
    instead = other.placement(placement.stage)
    return NextLayout(
        stage=placement.stage,
        layout=placement.layout,
        instead=instead.layout,
        step_seconds=other.period_seconds - plan.period_seconds,
        stage_seconds=instead.cost.total - placement.cost.total,
        mostly=most_grown(placement, instead),
    )


def _fitting_plans(plan: Plan, plans: ChangedPlans, stage: str, ranks: Ranks, others: Frontier) -> Iterator[Plan]:
    """Yield the plans with other choices of a stage on its ranks that fit in memory, the fastest choice first."""
    free = FreeMemory(plan, stage, ranks)
    for candidate in sorted(others.candidates_on(ranks), key=lambda candidate: candidate.seconds):
        if free.lacking_bytes(candidate) <= 0:
            changed = plans.with_pick(stage, Pick(ranks, candidate.choice))
            if free_bytes(changed) >= 0:
                yield changed


def _others(plan: Plan, model: CostModel, placement: Placement, ranks: Ranks, longest: float) -> Frontier:
    """The choices of a stage on its ranks that have another layout, agree with the pins and take at most `longest`
    seconds."""
    stage = placement.stage
    own_pins = [pin for pin in parse_pins(plan.pins, plan.graph) if pin.stage == stage and pin.key != "pool"]
    pins = (*own_pins, Pin(stage, "pool", ranks), Pin(stage, "layout", placement.layout, forbids=True))
    kind = PoolKind(plan.part_of(stage), ranks.num_ranks)
    return frontier(
        plan.facts,
        model,
        plan.stage(stage),
        pins,
        search_case=_search_case(plan),
        time_limits={kind: TimeLimit(longest, math.inf)},
    )


def _search_case(plan: Plan) -> SearchCase:
    """The search case that the plan belongs to."""
    schedules = [placement.schedule for placement in plan.placements]
    return SearchCase(
        ahead=plan.ahead,
        offload=any(schedule.offload is not Offload.NONE for schedule in schedules),
        keeps_in_flight=any(schedule.keeps_in_flight for schedule in schedules),
    )


def most_grown(before: Placement, after: Placement) -> Term | None:
    """The term of a stage's cost that is larger afterwards by most, with the difference; None if none is larger."""
    amounts = {term.name: term.amount for term in before.cost.merged().terms}
    grown = [
        Term(term.name, term.amount - amounts.get(term.name, 0.0), term.source) for term in after.cost.merged().terms
    ]
    largest = max(grown, key=lambda term: term.amount, default=None)
    return largest if largest is not None and largest.amount > 0 else None


@dataclass(frozen=True, kw_only=True)
class PlanSummary:
    """A summary of a plan: memory by part on the fullest rank, the next best layouts, and money."""

    rank: int
    memory: tuple[MemoryPart, ...]
    next_layouts: tuple[NextLayout, ...]
    cost: RunCost


def summarise(
    plan: Plan, model: CostModel, *, price: float | None = None, num_steps: int = DEFAULT_NUM_STEPS
) -> PlanSummary:
    """The summary of a plan. `model` is the cost model of the plan's own facts."""
    rank = fullest_rank(plan.facts.cluster, plan.peak_bytes_per_rank)
    return PlanSummary(
        rank=rank,
        memory=memory_parts(plan, rank),
        next_layouts=tuple(next_layouts(plan, model)),
        cost=run_cost(plan, price, num_steps),
    )
