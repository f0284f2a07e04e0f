"""Runners-up: the best plan without each choice of a plan, found by a new search, and so what each choice gains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.cost_models.question import CostModel
from meshwright.planner.compile import best_plan
from meshwright.planner.plan.pins import Pin, parse_pins
from meshwright.planner.plan.plan import Plan
from meshwright.planner.solver.result import Limits

LIMITS = Limits(max_deterministic_time=2.0, gap=0.0)
"""The default limits of each search; a runner-up that they leave unproven is reported as such."""


@dataclass(frozen=True, kw_only=True)
class RunnerUp:
    """The best plan found without one choice; `period_seconds` is None if none fits.

    The gain of the choice is at most `delta_seconds`, and at least `proven_seconds` by the bound on plans without it.
    """

    stage: str | None  # None: the choice to work ahead
    choice: str
    instead: str
    period_seconds: float | None
    delta_seconds: float | None
    proven_seconds: float | None


def runners_up(
    plan: Plan, model: CostModel, *, limits: Limits = LIMITS, progress: Callable[[], None] | None = None
) -> tuple[RunnerUp, ...]:
    """Return the runners-up without the layout of each stage that no pin fixes, and without work ahead; the largest
    gain first.

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
            progress()
    if plan.staleness:
        synchronous = plan.facts.model_copy(update={"staleness": 0})
        results.append(_runner_up(plan, best_plan(synchronous, model, pins=pins, limits=limits), None))
    return tuple(sorted(results, key=lambda one: -(one.delta_seconds or float("inf"))))


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
