"""How ranks spent the time of a measured trace: what they were busy with, and what they waited for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from meshwright.planner.plan.plan import Plan
from meshwright.planner.simulation.simulate import TimeShare, Use
from meshwright.profiles.trace import Span, ends_of

BETWEEN = "between instructions"
"""A wait: what lies between a rank's spans, as barriers at the end of a turn, and what following the program takes."""

_TOGETHER = ("stage", "refit")
"""Kinds of instructions that their ranks do together: who comes first waits in it for who comes last."""


def measured_use(plan: Plan, spans: Sequence[Span], begin: float, end: float) -> tuple[Use, ...]:
    """Of all ranks, then of each pool, between two times in seconds since the start of the run, `begin` before `end`.

    A receive is waiting for the stage that it receives from until that one's last rank sends, and a hand-over after
    that. In a stage or a refit a rank waits for the last of those that do it with it. All ranks evaluate together, and
    the first one's span tells of it.
    """
    parts = _Parts(plan, spans)
    busy: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    waits: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for span in spans:
        ready = min(max(parts.ready(span), span.start_seconds), span.end_seconds)
        waited, worked = _within(span.start_seconds, ready, begin, end), _within(ready, span.end_seconds, begin, end)
        if span.kind == "evaluate":
            for rank in range(plan.facts.cluster.num_ranks):
                busy[rank][span.instruction] += worked
        elif span.kind == "receive":
            source = ends_of(span).source
            waits[span.rank][source] += waited
            waits[span.rank][f"hand-over from {source}"] += worked
        else:
            waits[span.rank][f"{span.instruction} on other ranks"] += waited
            busy[span.rank][span.instruction] += worked
    for rank in range(plan.facts.cluster.num_ranks):
        told = sum(busy[rank].values()) + sum(waits[rank].values())
        waits[rank][BETWEEN] += max(0.0, end - begin - told)
    groups = {"all ranks": range(plan.facts.cluster.num_ranks), **{pool.name: pool.ranks for pool in plan.pools}}
    return tuple(_use(name, ranks, busy, waits, end - begin) for name, ranks in groups.items())


class _Parts:
    """When everybody that an instruction of a step needs has come to it."""

    def __init__(self, plan: Plan, spans: Iterable[Span]) -> None:
        self._plan = plan
        self._last: dict[tuple[object, ...], float] = defaultdict(float)
        for span in spans:
            key = self._key(span)
            self._last[key] = max(self._last[key], span.start_seconds)

    def ready(self, span: Span) -> float:
        """Seconds since the start of the run."""
        if span.kind == "receive":
            return self._last.get(("send", str(ends_of(span)), span.step), 0.0)
        return self._last[self._key(span)] if span.kind in _TOGETHER else span.start_seconds

    def _key(self, span: Span) -> tuple[object, ...]:
        if span.kind == "send":
            return span.kind, str(ends_of(span)), span.step
        return span.kind, span.instruction, span.step, self._replica(span)

    def _replica(self, span: Span) -> int:
        """Those that train, or share experts, are one."""
        if span.kind != "stage":
            return 0
        stage = self._plan.stage(span.instruction)
        layout = self._plan.placement(stage.name).layout
        if stage.trains or layout.expert_replicas > 1:
            return 0
        return layout.coordinates(span.rank - self._plan.pool_of(stage.name).first_rank).dp


def _within(start: float, stop: float, begin: float, end: float) -> float:
    """Seconds of one stretch of time that lie in another."""
    return max(0.0, min(stop, end) - max(start, begin))


def _use(
    name: str,
    ranks: Sequence[int],
    busy: Mapping[int, Mapping[str, float]],
    waits: Mapping[int, Mapping[str, float]],
    elapsed: float,
) -> Use:
    """On average over the ranks, the largest shares first."""

    def shares(part: Mapping[int, Mapping[str, float]]) -> tuple[TimeShare, ...]:
        total: dict[str, float] = defaultdict(float)
        for rank in ranks:
            for what, seconds in part[rank].items():
                total[what] += seconds
        found = [TimeShare(what, seconds / (elapsed * len(ranks))) for what, seconds in total.items() if seconds > 0]
        return tuple(sorted(found, key=lambda one: -one.share))

    worked = shares(busy)
    return Use(
        name=name, ranks=tuple(ranks), idle_share=1 - sum(one.share for one in worked), busy=worked, waits=shares(waits)
    )
