"""The choices of one site that take less of something than each that came before.

One that takes no less of anything is in no better plan than the other in its place: what a plan has on its sites stays
as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import le
from typing import TypeAlias

from meshwright.cost_models.question import Bytes, LayoutCosts
from meshwright.planner.proof.allowance import Allowance
from meshwright.planner.proof.legal import Family
from meshwright.profiles.schedule import Schedule

Row: TypeAlias = tuple[float, float, float, float, float]
"""Seconds and tail seconds; bytes of its own, of weights that may be shared, and transient ones."""


@dataclass(frozen=True, kw_only=True)
class Front:
    """Of one stage on one site. `least` tells seconds below which no schedule is that differs from one in what only
    takes longer; `fits` whether device and host have room."""

    num_ranks: int
    shares: bool
    most_seconds: float
    allowance: Allowance
    costs: LayoutCosts
    least: Callable[[Schedule], float]
    fits: Callable[[Bytes], bool]
    rows: list[Row] = field(default_factory=list)
    _least: dict[Schedule, float] = field(default_factory=dict)

    def add(self, family: Family) -> None:
        """Those of a family."""
        for schedule, quickest in family.members:
            if quickest not in self._least:
                self._least[quickest] = self.least(quickest)
            least = self._least[quickest]
            if not self.allowance.allows(self.num_ranks, least):
                continue
            held = self.costs.bytes(schedule)
            if self.fits(held):  # of those that do not, others may: no law says that more at a time takes more memory
                self._weighed(schedule, held, least)

    def _weighed(self, schedule: Schedule, held: Bytes, least: float) -> None:
        """One that fits: its seconds are asked only where its bytes and its least seconds do not say enough."""
        weights = held.weights if self.shares else 0.0
        amounts = held.resident - weights, weights, held.transient
        if self._is_beaten((least, least, *amounts)):
            return
        seconds = self.costs.seconds(schedule)
        tail = self.costs.tail_seconds(schedule) if schedule.chunk_tokens else seconds
        row = seconds, tail, *amounts
        is_short = seconds <= self.most_seconds and self.allowance.allows(self.num_ranks, tail)
        if is_short and not self._is_beaten(row):
            self.rows.append(row)

    def _is_beaten(self, row: Row) -> bool:
        """Whether some other takes no more of anything."""
        return any(all(map(le, other, row)) for other in self.rows)
