"""Busy and waiting time of the ranks in a measured trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from meshwright.planner.plan.plan import Plan
from meshwright.planner.simulation.simulate import TimeShare, TimeUse
from meshwright.profiles.trace import Span, endpoints_of

BETWEEN_INSTRUCTIONS = "between instructions"
"""The wait between the spans of a rank: barriers at the end of a step, and the overhead of following the program."""

_COLLECTIVE_KINDS = ("stage", "refit")
"""Kinds of instructions that ranks run together; those that arrive early wait for the last."""


def measured_use(plan: Plan, spans: Sequence[Span], begin: float, end: float) -> tuple[TimeUse, ...]:
    """Return the use of all ranks together and of each pool between `begin` and `end`, in seconds since the run's
    start.

    A receive waits for its source stage until the last rank of that stage sends; the rest of it is the transfer. In a
    stage or a refit a rank waits for the last of the ranks that run it together. All ranks evaluate together, and only
    the first one has a span of it.
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
            waits[span.rank][f"hand-over from {source}"] += worked
        else:
            waits[span.rank][f"{span.instruction} on other ranks"] += waited
            busy[span.rank][span.instruction] += worked
    for rank in range(plan.facts.cluster.num_ranks):
        accounted = sum(busy[rank].values()) + sum(waits[rank].values())
        waits[rank][BETWEEN_INSTRUCTIONS] += max(0.0, end - begin - accounted)
    groups = {"all ranks": range(plan.facts.cluster.num_ranks), **{pool.name: pool.ranks for pool in plan.pools}}
    return tuple(_average_use(name, ranks, busy, waits, end - begin) for name, ranks in groups.items())


class _Arrivals:
    """The times at which the last rank that an instruction of a step needs has arrived."""

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
        """The replica whose ranks run the span together; 0 for stages whose replicas all do (training, shared
        experts)."""
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
