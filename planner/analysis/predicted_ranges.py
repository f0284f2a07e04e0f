"""The ranges of a plan's numbers that follow from the range of its step."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.planner.analysis.plan_summary import RunCost
from meshwright.planner.analysis.whatif import plan_metrics
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.uncertainty import Interval


@dataclass(frozen=True, kw_only=True)
class PredictedRanges:
    """The 10th and 90th percentile of a plan's step and response tokens a second, and of the hours, the GPU-hours and
    the money of a number of steps; `money` is None without a price."""

    step_seconds: Interval
    tokens_per_second: Interval
    hours: Interval
    gpu_hours: Interval
    money: Interval | None


def predicted_ranges(plan: Plan, step_seconds: Interval, cost: RunCost) -> PredictedRanges:
    """The ranges of a plan whose step has this range; `cost` is the cost of some of its steps."""
    relative = step_seconds.times(1 / plan.period_seconds)
    return PredictedRanges(
        step_seconds=step_seconds,
        tokens_per_second=relative.divides(plan_metrics(plan).tokens_per_second),
        hours=relative.times(cost.hours),
        gpu_hours=relative.times(cost.gpu_hours),
        money=None if cost.money is None else relative.times(cost.money),
    )
