"""Analysis of a measured trace: predicted against measured seconds of stages, refits and steps, and the busy and
waiting time of ranks.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.planner.plan.plan import Plan
from meshwright.planner.simulation.simulate import TimeShare, TimeUse
from meshwright.profiles.observations import RunObservation, observe, refit_seconds, stage_seconds
from meshwright.profiles.stages import StageGraph
from meshwright.profiles.trace import Span, endpoints_of

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


def observe_run(plan: Plan, spans: Sequence[Span]) -> RunObservation:
    """Return stage times and lengths in the trace of a run of the plan. Raises BadInput as `observe` does."""
    layouts = {placement.stage: placement.layout for placement in plan.placements}
    return observe(spans, layouts, plan.graph, plan.facts.workload.batch_size)


def compare(plan: Plan, spans: Iterable[Span], step_seconds: Mapping[int, float]) -> tuple[Comparison, ...]:
    """Compare predicted with measured seconds: each stage and all refits together, both timed from the arrival
    of the last rank, and the step.

    A stage is compared over the steps in which it was recorded; a stage that works ahead has no spans in some of the
    first steps.
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
    previous_end = min((span.start_seconds for span in spans if span.kind == "stage"), default=0.0)
    pauses = {(s.kind, s.start_seconds): s for s in spans if s.kind in _NOT_PART_OF_A_STEP}.values()
    seconds: dict[int, float] = {}
    for step, end in ends.items():
        seconds[step] = end - previous_end - sum(s.seconds for s in pauses if previous_end <= s.start_seconds < end)
        previous_end = end
    return seconds


BETWEEN_INSTRUCTIONS = "between instructions"
"""The wait between the spans of a rank: barriers at the end of a step, and the overhead of following the program."""

_COLLECTIVE_KINDS = ("stage", "refit")
"""Kinds of instructions that ranks run together; those that arrive early wait for the last."""


def measured_use(plan: Plan, spans: Sequence[Span], begin: float, end: float) -> tuple[TimeUse, ...]:
    """Return the use of all ranks together and of each pool between `begin` and `end`, in seconds since the run's
    start.

    A receive waits for its source stage until the last rank of that stage sends; the rest of it is the transfer. In a
    stage or a refit a rank waits for the last of the ranks that run it together. All ranks evaluate together, and only
    the first rank records a span of it.
    """
    arrivals = _Arrivals(plan, spans)
    busy: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    waits: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for span in spans:
        ready = min(max(arrivals.ready(span), span.start_seconds), span.end_seconds)
        waited, worked = (
            _overlap_seconds(span.start_seconds, ready, begin, end),
            _overlap_seconds(ready, span.end_seconds, begin, end),
        )
        if span.kind == "evaluate":
            for rank in range(plan.facts.cluster.num_ranks):
                busy[rank][span.instruction] += worked
        elif span.kind == "receive":
            source = endpoints_of(span).source
            waits[span.rank][source] += waited
            waits[span.rank][f"transfer from {source}"] += worked
        else:
            waits[span.rank][f"{span.instruction} on other ranks"] += waited
            busy[span.rank][span.instruction] += worked
    for rank in range(plan.facts.cluster.num_ranks):
        accounted = sum(busy[rank].values()) + sum(waits[rank].values())
        waits[rank][BETWEEN_INSTRUCTIONS] += max(0.0, end - begin - accounted)
    groups = {"all ranks": range(plan.facts.cluster.num_ranks), **{pool.name: pool.ranks for pool in plan.pools}}
    return tuple(_average_use(name, ranks, busy, waits, end - begin) for name, ranks in groups.items())


class _Arrivals:
    """For each instruction of a step, the time at which the last rank that it needs arrives."""

    def __init__(self, plan: Plan, spans: Iterable[Span]) -> None:
        self._plan = plan
        self._last_arrival: dict[tuple[object, ...], float] = defaultdict(float)
        for span in spans:
            key = self._key(span)
            self._last_arrival[key] = max(self._last_arrival[key], span.start_seconds)

    def ready(self, span: Span) -> float:
        """The time at which the last needed rank arrived, in seconds since the start of the run."""
        if span.kind == "receive":
            return self._last_arrival.get(("send", str(endpoints_of(span)), span.step), 0.0)
        return self._last_arrival[self._key(span)] if span.kind in _COLLECTIVE_KINDS else span.start_seconds

    def _key(self, span: Span) -> tuple[object, ...]:
        if span.kind == "send":
            return span.kind, str(endpoints_of(span)), span.step
        return span.kind, span.instruction, span.step, self._replica(span)

    def _replica(self, span: Span) -> int:
        """The replica whose ranks run the span together; 0 for stages whose replicas all run together (training, and
        experts that are spread over replicas)."""
        if span.kind != "stage":
            return 0
        stage = self._plan.stage(span.instruction)
        layout = self._plan.placement(stage.name).layout
        if stage.trains or layout.expert_replicas > 1:
            return 0
        return layout.coordinates(span.rank - self._plan.pool_of(stage.name).first_rank).dp


def _overlap_seconds(start: float, stop: float, begin: float, end: float) -> float:
    """Seconds of the overlap of [start, stop] and [begin, end]."""
    return max(0.0, min(stop, end) - max(start, begin))


def _average_use(
    name: str,
    ranks: Sequence[int],
    busy: Mapping[int, Mapping[str, float]],
    waits: Mapping[int, Mapping[str, float]],
    elapsed: float,
) -> TimeUse:
    """The average use over the ranks, the largest shares first."""

    def shares(part: Mapping[int, Mapping[str, float]]) -> tuple[TimeShare, ...]:
        total: dict[str, float] = defaultdict(float)
        for rank in ranks:
            for what, seconds in part[rank].items():
                total[what] += seconds
        time_shares = [
            TimeShare(what, seconds / (elapsed * len(ranks))) for what, seconds in total.items() if seconds > 0
        ]
        return tuple(sorted(time_shares, key=lambda one: -one.share))

    worked = shares(busy)
    return TimeUse(
        name=name, ranks=tuple(ranks), idle_share=1 - sum(one.share for one in worked), busy=worked, waits=shares(waits)
    )
