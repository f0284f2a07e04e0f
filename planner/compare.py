"""Predicted beside measured: what the plan says each thing of a step takes, and what a trace says."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from meshwright.planner.plan import Plan
from meshwright.profiles.trace import Span


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Predicted and measured seconds of one thing in a step; measured is the median over steps after the first."""

    name: str
    predicted_seconds: float
    measured_seconds: float

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return (self.predicted_seconds - self.measured_seconds) / self.measured_seconds


def compare(plan: Plan, spans: Iterable[Span], step_seconds: Mapping[int, float]) -> tuple[Comparison, ...]:
    """Predicted beside measured: each stage (its slowest rank), all refits together, and the step."""
    first = min(step_seconds)
    steps = [step for step in step_seconds if step > first] or [first]
    totals: dict[tuple[str, int, int], float] = defaultdict(float)  # by name, step and rank
    for span in spans:
        totals[span.instruction if span.kind == "stage" else span.kind, span.step, span.rank] += span.seconds
    slowest: dict[tuple[str, int], float] = defaultdict(float)
    for (name, step, _), seconds in totals.items():
        slowest[name, step] = max(slowest[name, step], seconds)

    def measured(name: str) -> float:
        return statistics.median(slowest[name, step] for step in steps)

    rows = [
        Comparison(name=p.stage, predicted_seconds=p.cost.total, measured_seconds=measured(p.stage))
        for p in sorted(plan.placements, key=lambda p: p.start_seconds)
    ]
    if plan.refits:
        predicted = sum(refit.cost.total for refit in plan.refits)
        rows.append(Comparison(name="refit", predicted_seconds=predicted, measured_seconds=measured("refit")))
    whole = statistics.median(step_seconds[step] for step in steps)
    return (*rows, Comparison(name="step", predicted_seconds=plan.period_seconds, measured_seconds=whole))
