"""How far a search is, told as it goes: its phase, the best plan so far, and what no plan is faster than."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Phase: TypeAlias = Literal["costing", "searching"]


@dataclass(frozen=True, kw_only=True)
class Standing:
    """`done` of `total` stages are costed, or scopes searched. The period is that of the best plan so far, if there is
    one, and the bound holds for all plans; both are in seconds."""

    phase: Phase
    done: int
    total: int
    period_seconds: float | None
    bound_seconds: float

    @property
    def gap(self) -> float | None:
        """How far the best plan can be from the best there is."""
        if self.period_seconds is None:
            return None
        return max(0.0, (self.period_seconds - self.bound_seconds) / self.period_seconds)


Progress: TypeAlias = Callable[[Standing], None]
"""Called whenever something of it has changed."""


@dataclass
class Course:
    """Puts together what the scopes of a search say, each told apart by its position, and tells it."""

    tell: Progress | None
    num_scopes: int
    phase: Phase = "costing"
    done: int = 0
    total: int = 0
    period_seconds: float = math.inf
    bounds: dict[int, float] = field(default_factory=dict)
    told: Standing | None = None

    def does(self, phase: Phase, done: int, total: int) -> None:
        """So many of the phase's stages or scopes are done."""
        self.phase, self.done, self.total = phase, done, total
        self._tell()

    def learns(self, scope: int, bound_seconds: float) -> None:
        """No plan of the scope is faster; what was known before may be better."""
        self.bounds[scope] = max(bound_seconds, self.bounds.get(scope, 0.0))
        self._tell()

    def finds(self, period_seconds: float) -> None:
        """There is a plan of this period."""
        self.period_seconds = min(self.period_seconds, period_seconds)
        self._tell()

    def _tell(self) -> None:
        is_bounded = len(self.bounds) == self.num_scopes
        bound = min(*self.bounds.values(), self.period_seconds) if is_bounded else 0.0
        now = Standing(
            phase=self.phase,
            done=self.done,
            total=self.total,
            period_seconds=self.period_seconds if self.period_seconds < math.inf else None,
            bound_seconds=bound if bound < math.inf else 0.0,
        )
        if self.tell and now != self.told:
            self.tell(now)
        self.told = now
