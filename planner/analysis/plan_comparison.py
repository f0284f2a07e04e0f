"""Comparison of two plans: the differences of their facts, stages and step times, each plan by its own costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.planner.analysis.whatif import PlanMetrics, plan_metrics
from meshwright.planner.plan.pins import Ranks
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.documents import Difference, differences
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class StagePlacement:
    """The pool, layout, schedule and seconds of a stage."""

    pool: Ranks
    layout: Layout
    schedule: Schedule
    steps_ahead: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StageComparison:
    """A stage in both plans; None for a plan without it."""

    stage: str
    one: StagePlacement | None
    other: StagePlacement | None


@dataclass(frozen=True, kw_only=True)
class PlanComparison:
    """The comparison of two plans.

    It has the key numbers of each, their differences (`other` minus `one`), the stages side by side, and the keys in
    which the facts of the two jobs differ.
    """

    one: PlanMetrics
    other: PlanMetrics
    difference: PlanMetrics
    stages: tuple[StageComparison, ...]
    facts: tuple[Difference, ...]
    notes: tuple[str, ...]


def compare_plans(one: Plan, other: Plan) -> PlanComparison:
    """Compare two plans; stages are in the order of the first plan, followed by those of the second only."""
    one_outlook, other_outlook = plan_metrics(one), plan_metrics(other)
    names = dict.fromkeys(placement.stage for plan in (one, other) for placement in plan.placements)
    return PlanComparison(
        one=one_outlook,
        other=other_outlook,
        difference=other_outlook.minus(one_outlook),
        stages=tuple(StageComparison(stage=name, one=_placed(one, name), other=_placed(other, name)) for name in names),
        facts=differences(one.facts, other.facts),
        notes=tuple(_notes(one, other)),
    )


def _placed(plan: Plan, stage: str) -> StagePlacement | None:
    placement_of_stage = next((placement for placement in plan.placements if placement.stage == stage), None)
    if placement_of_stage is None:
        return None
    pool = plan.pool(placement_of_stage.pool)
    return StagePlacement(
        pool=Ranks(pool.first_rank, pool.num_ranks),
        layout=placement_of_stage.layout,
        schedule=placement_of_stage.schedule,
        steps_ahead=placement_of_stage.steps_ahead,
        seconds=placement_of_stage.cost.total,
    )


def _notes(one: Plan, other: Plan) -> Iterator[str]:
    if one.digests.get("profile") != other.digests.get("profile"):
        yield "the plans were made with different tables, or one without: part of the difference comes from the costs."
    for name, plan in (("first", one), ("second", other)):
        if plan.solver.gap > _WIDE_GAP:
            yield f"the {name} plan is proven to be within {plan.solver.gap:.0%} of the best, not closer."


_WIDE_GAP = 0.1
"""A gap above this may exceed the difference of two plans."""
