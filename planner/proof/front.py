"""Collects the Pareto-optimal choices of one site.

A dominated choice can be replaced by the one that dominates it in every plan, because the other stages do not depend on
which choice of the site is used.
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
"""Seconds and tail seconds; bytes of own memory, of shareable weights, and transient bytes."""


@dataclass(frozen=True, kw_only=True)
class ParetoFront:
    """The front of one stage on one site.

    `least` returns a lower bound on the seconds of every schedule that differs from the given one only in ways that
    cost time; `fits` tells if device and host have room.
    """

    num_ranks: int
    shares: bool
    max_period_seconds: float
    allowance: Allowance
    costs: LayoutCosts
    least: Callable[[Schedule], float]
    fits: Callable[[Bytes], bool]
    rows: list[Row] = field(default_factory=list)
    _least: dict[Schedule, float] = field(default_factory=dict)

    def add(self, family: Family) -> None:
        """Add the schedules of a family."""
        for schedule, quickest in family.members:
            if quickest not in self._least:
                self._least[quickest] = self.least(quickest)
            least = self._least[quickest]
            if not self.allowance.allows(self.num_ranks, least):
                continue
            held = self.costs.bytes(schedule)
            if self.fits(held):  # the others are still tried: no law says that more rows at a time take more memory
                self._add_fitting(schedule, held, least)

    def _add_fitting(self, schedule: Schedule, held: Bytes, least: float) -> None:
        """Add a schedule that fits; its seconds are computed only if its bytes and least seconds do not decide."""
        weights = held.weights if self.shares else 0.0
        amounts = held.resident - weights, weights, held.transient
        if self._is_dominated((least, least, *amounts)):
            return
        seconds = self.costs.seconds(schedule)
        tail = self.costs.tail_seconds(schedule) if schedule.chunk_tokens else seconds
        row = seconds, tail, *amounts
        is_short = seconds <= self.max_period_seconds and self.allowance.allows(self.num_ranks, tail)
        if is_short and not self._is_dominated(row):
            self.rows.append(row)

    def _is_dominated(self, row: Row) -> bool:
        """Return True if some row is no larger in any amount."""
        return any(all(map(le, other, row)) for other in self.rows)
