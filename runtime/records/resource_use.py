"""Memory of each stage and transfer times of offloaded state in a run, compared with its plan."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.planner.analysis.trace_analysis import Comparison
from meshwright.planner.plan.evaluate import resident_bytes
from meshwright.planner.plan.plan import Placement, Plan
from meshwright.profiles.schedule import Offload
from meshwright.profiles.trace import Span

MEMORY = "memory_bytes"
MOVES = ("reload_seconds", "offload_seconds")
"""Facts of a stage's span: the bytes in use, and the seconds that transfers of its offloaded state take."""


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes in use while a stage runs, on its fullest rank: all resident state, and what the stage itself needs.

    `measured_bytes` is the maximum over the measured periods, less what a process uses before it has models, such as
    its libraries and the prompts.
    """

    stage: str
    planned_bytes: float
    measured_bytes: float


class ResourceUse:
    """Accumulates resource use from spans in any order, without keeping them."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._bytes: dict[str, float] = {}
        self._moves: dict[str, dict[int, float]] = defaultdict(dict)  # by stage and step, on its slowest rank

    def add(self, spans: Iterable[Span]) -> None:
        """Add spans of a run."""
        for span in spans:
            stage, step = span.instruction, span.step
            if span.kind == "stage" and MEMORY in span.facts:
                self._bytes[stage] = max(span.facts[MEMORY], self._bytes.get(stage, 0.0))
            if MOVES[0] in span.facts:
                seconds = sum(span.facts[name] for name in MOVES)
                self._moves[stage][step] = max(seconds, self._moves[stage].get(step, 0.0))

    def memory(self) -> tuple[MemoryUse, ...]:
        """Return the memory of every stage that was measured, in the order of the plan."""
        return tuple(
            MemoryUse(stage=p.stage, planned_bytes=_planned_bytes(self._plan, p), measured_bytes=self._bytes[p.stage])
            for p in sorted(self._plan.placements, key=lambda p: p.start_seconds)
            if p.stage in self._bytes
        )

    def offloads(self) -> tuple[Comparison, ...]:
        """Return the seconds per period to reload and offload state: slowest rank, median over periods."""
        return tuple(
            Comparison(
                name=f"{p.stage} offload",
                predicted_seconds=sum(term.amount for term in p.cost.terms if term.name in ("reload", "offload")),
                measured_seconds=statistics.median(self._moves[p.stage].values()),
            )
            for p in self._plan.placements
            if p.schedule.offload is not Offload.NONE and self._moves[p.stage]
        )


def _planned_bytes(plan: Plan, stage: Placement) -> float:
    """Return the predicted peak on the stage's fullest rank: state resident for all stages, plus its own transients."""
    residents = [
        sum(resident_bytes(plan, p) for p in plan.placements if rank in plan.pool(p.pool).ranks)
        for rank in plan.pool(stage.pool).ranks
    ]
    return max(residents) + stage.transient.total
