"""The time limit of a running search, and the progress that it reports."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from meshwright.cost_models.protocol import CostModel, DelegatingCostModel
from meshwright.planner.solver.result import Limits


@dataclass(frozen=True)
class TimeLimitedCostModel(DelegatingCostModel):
    """A cost model that answers while the limits leave time, and raises OutOfTimeError afterwards."""

    limits: Limits

    def _delegate(self) -> CostModel:
        self.limits.require_time()
        return self.model


Phase: TypeAlias = Literal["costing", "searching"]


@dataclass(frozen=True, kw_only=True)
class SearchProgress:
    """A snapshot of a search: `done` of `total` stages are costed, or search cases solved, depending on `phase`.

    `period_seconds` is that of the best plan so far, None if there is none; `bound_seconds` holds for all plans.
    """

    phase: Phase
    done: int
    total: int
    period_seconds: float | None
    bound_seconds: float

    @property
    def activity(self) -> str:
        """`costing stage 3 of 7` or `searching case 2 of 4`."""
        what = {"costing": "costing stage", "searching": "searching case"}[self.phase]
        return f"{what} {min(self.done + 1, self.total)} of {self.total}"

    @property
    def gap(self) -> float | None:
        """The relative distance from the best plan so far to the lower bound; None without a plan."""
        if self.period_seconds is None:
            return None
        return max(0.0, (self.period_seconds - self.bound_seconds) / self.period_seconds)


ProgressCallback: TypeAlias = Callable[[SearchProgress], None]
"""Called with a new snapshot whenever it has changed."""


@dataclass
class ProgressReporter:
    """Combines the progress of all search cases, each identified by its position, and reports it to `callback`."""

    callback: ProgressCallback | None
    num_scopes: int
    phase: Phase = "costing"
    done: int = 0
    total: int = 0
    period_seconds: float = math.inf
    bounds: dict[int, float] = field(default_factory=dict)
    last_reported: SearchProgress | None = None

    def set_phase(self, phase: Phase, done: int, total: int) -> None:
        """Report that this many of the phase's stages or search cases are done."""
        self.phase, self.done, self.total = phase, done, total
        self._report()

    def raise_bound(self, scope: int, bound_seconds: float) -> None:
        """Report a lower bound on the period of every plan of a search case, unless a better one is known."""
        self.bounds[scope] = max(bound_seconds, self.bounds.get(scope, 0.0))
        self._report()

    def add_plan(self, period_seconds: float) -> None:
        """Report that a plan with this period exists."""
        self.period_seconds = min(self.period_seconds, period_seconds)
        self._report()

    def _report(self) -> None:
        is_bounded = len(self.bounds) == self.num_scopes
        bound = min(*self.bounds.values(), self.period_seconds) if is_bounded else 0.0
        snapshot = SearchProgress(
            phase=self.phase,
            done=self.done,
            total=self.total,
            period_seconds=self.period_seconds if self.period_seconds < math.inf else None,
            bound_seconds=bound if bound < math.inf else 0.0,
        )
        if self.callback and snapshot != self.last_reported:
            self.callback(snapshot)
        self.last_reported = snapshot
