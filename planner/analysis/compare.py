"""Predicted against measured seconds of every stage, of all refits and of the step, from a plan and a trace."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.planner.plan.plan import Plan
from meshwright.profiles.stages import StageGraph
from meshwright.profiles.trace import Span
from meshwright.profiles.trace_durations import refit_seconds, stage_seconds

_NOT_PART_OF_A_STEP = ("evaluate", "checkpoint")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Predicted and measured seconds of a stage, of all refits, or of the step. The measured seconds are the median
    over the steps after the first."""

    name: str
    predicted_seconds: float
    measured_seconds: float

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return (self.predicted_seconds - self.measured_seconds) / self.measured_seconds


def compare(plan: Plan, spans: Iterable[Span], step_seconds: Mapping[int, float]) -> tuple[Comparison, ...]:
    """Compare predicted with measured seconds: each stage and all refits together, both without the wait for the
    slowest rank to arrive, and the step.

    A stage is compared over the steps in which it was recorded; one that works ahead lacks some of the first.
    """
    spans_of_step: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        spans_of_step[span.step].append(span)
    times = MeasuredSteps(plan)
    for step, step_spans in spans_of_step.items():
        times.add(step, step_spans)
    return times.comparisons(step_seconds)


class MeasuredSteps:
    """Seconds of each stage, and of all refits, in every step of a run; spans are added step by step."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._seconds: dict[str, dict[int, float]] = defaultdict(dict)

    def add(self, step: int, spans: Iterable[Span]) -> None:
        """Add all spans of a step."""
        spans_of: dict[str, list[Span]] = defaultdict(list)
        for span in spans:
            spans_of[span.instruction if span.kind == "stage" else span.kind].append(span)
        for p in self._plan.placements:
            if p.stage in spans_of:
                self._seconds[p.stage][step] = stage_seconds(self._plan.stage(p.stage), p.layout, spans_of[p.stage])
        if "refit" in spans_of:
            self._seconds["refit"][step] = refit_seconds(spans_of["refit"])

    def comparisons(self, step_seconds: Mapping[int, float]) -> tuple[Comparison, ...]:
        """Return the comparison over the added steps; see `compare`."""
        first = min(step_seconds)
        steps = [step for step in step_seconds if step > first] or [first]
        predicted = {p.stage: p.cost.total for p in sorted(self._plan.placements, key=lambda p: p.start_seconds)}
        if self._plan.refits:
            predicted["refit"] = sum(refit.cost.total for refit in self._plan.refits)
        rows = [
            Comparison(name=name, predicted_seconds=seconds, measured_seconds=self._median(name, steps))
            for name, seconds in predicted.items()
        ]
        whole = statistics.median(step_seconds[step] for step in steps)
        return (*rows, Comparison(name="step", predicted_seconds=self._plan.period_seconds, measured_seconds=whole))

    def _median(self, name: str, steps: Iterable[int]) -> float:
        measured = [self._seconds[name][step] for step in steps if step in self._seconds[name]]
        return statistics.median(measured) if measured else 0.0


def step_ends(graph: StageGraph, spans: Iterable[Span]) -> dict[int, float]:
    """The end of training of each step, in seconds since the start of the run."""
    ends: dict[int, float] = {}
    for span in spans:
        if span.instruction in graph.train_stage.values():
            ends[span.step] = max(span.end_seconds, ends.get(span.step, 0.0))
    return dict(sorted(ends.items()))


def step_seconds(graph: StageGraph, spans: Sequence[Span]) -> dict[int, float]:
    """Seconds from the end of each step to the end of the next, without evaluations and checkpoints in between.

    The first step counts from the start of its first span.
    """
    ends = step_ends(graph, spans)
    began = min((span.start_seconds for span in spans if span.kind == "stage"), default=0.0)
    pauses = {(s.kind, s.start_seconds): s for s in spans if s.kind in _NOT_PART_OF_A_STEP}.values()
    seconds: dict[int, float] = {}
    for step, end in ends.items():
        seconds[step] = end - began - sum(s.seconds for s in pauses if began <= s.start_seconds < end)
        began = end
    return seconds
