"""Predicted beside measured: what the plan says each thing of a step takes, and what a trace says."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from meshwright.planner.plan.plan import Plan
from meshwright.profiles.stages import StageGraph
from meshwright.profiles.trace import Span
from meshwright.profiles.trace_durations import refit_seconds, stage_seconds

_BETWEEN = ("evaluate", "checkpoint")


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
    """Predicted beside measured: each stage and all refits together, without waiting for the rank that comes
    last, and the step.

    A step in which something was not recorded, as a stage that works ahead of the first turn, does not count for it.
    """
    first = min(step_seconds)
    steps = [step for step in step_seconds if step > first] or [first]
    found: dict[tuple[str, int], list[Span]] = defaultdict(list)
    for span in spans:
        found[span.instruction if span.kind == "stage" else span.kind, span.step].append(span)

    def measured(name: str, seconds: Callable[[list[Span]], float]) -> float:
        seen = [seconds(found[name, step]) for step in steps if (name, step) in found]
        return statistics.median(seen) if seen else 0.0

    rows = [
        Comparison(
            name=p.stage,
            predicted_seconds=p.cost.total,
            measured_seconds=measured(p.stage, partial(stage_seconds, plan.stage(p.stage), p.layout)),
        )
        for p in sorted(plan.placements, key=lambda p: p.start_seconds)
    ]
    if plan.refits:
        predicted = sum(refit.cost.total for refit in plan.refits)
        rows.append(
            Comparison(name="refit", predicted_seconds=predicted, measured_seconds=measured("refit", refit_seconds))
        )
    whole = statistics.median(step_seconds[step] for step in steps)
    return (*rows, Comparison(name="step", predicted_seconds=plan.period_seconds, measured_seconds=whole))


def step_ends(graph: StageGraph, spans: Iterable[Span]) -> dict[int, float]:
    """When the training of each step ended, in seconds since the start of the run."""
    ends: dict[int, float] = {}
    for span in spans:
        if span.instruction in graph.train_stage.values():
            ends[span.step] = max(span.end_seconds, ends.get(span.step, 0.0))
    return dict(sorted(ends.items()))


def step_seconds(graph: StageGraph, spans: Sequence[Span]) -> dict[int, float]:
    """Seconds from the end of each step to that of the next, without what comes between: evaluations and checkpoints.

    The first step counts from the start of its first span.
    """
    ends = step_ends(graph, spans)
    began = min((span.start_seconds for span in spans if span.kind == "stage"), default=0.0)
    other = {(s.kind, s.start_seconds): s for s in spans if s.kind in _BETWEEN}.values()
    found: dict[int, float] = {}
    for step, end in ends.items():
        found[step] = end - began - sum(s.seconds for s in other if began <= s.start_seconds < end)
        began = end
    return found
