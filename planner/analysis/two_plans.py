"""Two plans side by side: what their facts, their stages and their steps have otherwise, each by its own costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.planner.analysis.whatif import Outlook, outlook
from meshwright.planner.plan.pins import Ranks
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.differences import Difference, differences
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Where a stage runs, how, and for how long."""

    pool: Ranks
    layout: Layout
    schedule: Schedule
    steps_ahead: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StageOfBoth:
    """A stage in both plans; None where a plan has it not."""

    stage: str
    one: Placed | None
    other: Placed | None


@dataclass(frozen=True, kw_only=True)
class TwoPlans:
    """`difference` is the other plan's numbers less the one's. `facts` are the keys in which their jobs differ."""

    one: Outlook
    other: Outlook
    difference: Outlook
    stages: tuple[StageOfBoth, ...]
    facts: tuple[Difference, ...]
    notes: tuple[str, ...]


def two_plans(one: Plan, other: Plan) -> TwoPlans:
    """The comparison; stages are in the order of the one plan's, then those that only the other has."""
    here, there = outlook(one), outlook(other)
    names = dict.fromkeys(placement.stage for plan in (one, other) for placement in plan.placements)
    return TwoPlans(
        one=here,
        other=there,
        difference=there.minus(here),
        stages=tuple(StageOfBoth(stage=name, one=_placed(one, name), other=_placed(other, name)) for name in names),
        facts=differences(one.facts, other.facts),
        notes=tuple(_notes(one, other)),
    )


def _placed(plan: Plan, stage: str) -> Placed | None:
    found = next((placement for placement in plan.placements if placement.stage == stage), None)
    if found is None:
        return None
    pool = plan.pool(found.pool)
    return Placed(
        pool=Ranks(pool.first_rank, pool.num_ranks),
        layout=found.layout,
        schedule=found.schedule,
        steps_ahead=found.steps_ahead,
        seconds=found.cost.total,
    )


def _notes(one: Plan, other: Plan) -> Iterator[str]:
    if one.digests.get("profile") != other.digests.get("profile"):
        yield "the plans were made with different tables, or one without: part of the difference is that of the costs."
    for name, plan in (("first", one), ("second", other)):
        if plan.solver.gap > _WIDE:
            yield f"the {name} plan is proven to be within {plan.solver.gap:.0%} of the best, no nearer."


_WIDE = 0.1
"""A gap that may be larger than what two plans differ by."""
