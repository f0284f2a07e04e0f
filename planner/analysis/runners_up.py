"""What each choice of a plan buys: the best plan without it, searched again, against the plan as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.cost_models.question import CostModel
from meshwright.planner.compile import best_plan
from meshwright.planner.plan.pins import Pin, parse_pins
from meshwright.planner.plan.plan import Plan
from meshwright.planner.solver.result import Limits

LIMITS = Limits(max_deterministic_time=2.0, gap=0.0)
"""Per search: a runner-up that is not proven is told as such."""


@dataclass(frozen=True, kw_only=True)
class RunnerUp:
    """The best plan found without one choice. No `period_seconds` when none fits without it.

    `delta_seconds` is what the choice buys, at most; at least `proven_seconds`, by the bound on the plans without it.
    """

    stage: str | None  # None for working ahead
    choice: str
    instead: str
    period_seconds: float | None
    delta_seconds: float | None
    proven_seconds: float | None


def runners_up(
    plan: Plan, model: CostModel, *, limits: Limits = LIMITS, progress: Callable[[], None] | None = None
) -> tuple[RunnerUp, ...]:
    """One for the layout of each stage that no pin fixes, and one for working ahead; the dearest first.

    `model` prices the plan's own facts. `progress` is called after each search.
    """
    pins = parse_pins(plan.pins, plan.graph)
    fixed = {pin.stage for pin in pins if pin.key == "layout" and not pin.forbids}
    found = []
    for placement in plan.placements:
        if placement.stage not in fixed:
            barred = Pin(placement.stage, "layout", placement.layout, forbids=True)
            other = best_plan(plan.facts, model, pins=(*pins, barred), limits=limits)
            found.append(_against(plan, other, placement.stage))
        if progress:
            progress()
    if plan.staleness:
        synchronous = plan.facts.model_copy(update={"staleness": 0})
        found.append(_against(plan, best_plan(synchronous, model, pins=pins, limits=limits), None))
    return tuple(sorted(found, key=lambda one: -(one.delta_seconds or float("inf"))))


def _against(plan: Plan, other: object, stage: str | None) -> RunnerUp:
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
