"""What a run used beside its plan: memory while each stage ran, and the time that offloaded state took to move."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.planner.analysis.compare import Comparison
from meshwright.planner.plan.evaluate import resident_bytes
from meshwright.planner.plan.plan import Placement, Plan
from meshwright.profiles.schedule import Offload
from meshwright.profiles.trace import Span

MEMORY = "memory_bytes"
MOVES = ("reload_seconds", "offload_seconds")


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes in use while a stage runs, on its fullest rank: all that stays there and what it needs besides.

    Measured is the most of all turns that were measured, without what a process uses before it has models.
    """

    stage: str
    planned_bytes: float
    measured_bytes: float


def memory_use(plan: Plan, spans: Iterable[Span]) -> tuple[MemoryUse, ...]:
    """Of every stage whose memory was measured, in the order of the plan."""
    measured: dict[str, float] = {}
    for span in spans:
        if span.kind == "stage" and MEMORY in span.facts:
            measured[span.instruction] = max(span.facts[MEMORY], measured.get(span.instruction, 0.0))
    return tuple(
        MemoryUse(stage=p.stage, planned_bytes=_planned_bytes(plan, p), measured_bytes=measured[p.stage])
        for p in sorted(plan.placements, key=lambda p: p.start_seconds)
        if p.stage in measured
    )


def offload_seconds(plan: Plan, spans: Iterable[Span]) -> tuple[Comparison, ...]:
    """Seconds per turn that each offloaded state takes to come and go: the slowest rank's, median over turns."""
    slowest: dict[tuple[str, int], float] = {}
    for span in spans:
        if MOVES[0] in span.facts:
            key, seconds = (span.instruction, span.step), sum(span.facts[name] for name in MOVES)
            slowest[key] = max(seconds, slowest.get(key, 0.0))
    measured: dict[str, list[float]] = defaultdict(list)
    for (stage, _), seconds in slowest.items():
        measured[stage].append(seconds)
    return tuple(
        Comparison(
            name=f"{p.stage} offload",
            predicted_seconds=sum(term.amount for term in p.cost.terms if term.name in ("reload", "offload")),
            measured_seconds=statistics.median(measured[p.stage]),
        )
        for p in plan.placements
        if p.schedule.offload is not Offload.NONE and measured[p.stage]
    )


def _planned_bytes(plan: Plan, stage: Placement) -> float:
    """On the fullest of its ranks: what all stages keep there, and what this one needs while it runs."""
    residents = [
        sum(resident_bytes(plan, p) for p in plan.placements if rank in plan.pool(p.pool).ranks)
        for rank in plan.pool(stage.pool).ranks
    ]
    return max(residents) + stage.transient.total
