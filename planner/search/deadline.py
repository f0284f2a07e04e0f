"""A search that may take so long and no longer, or is asked to stop: whoever asks for a cost after that gets none."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.cost_models.question import CostModel, PassedOn
from meshwright.planner.solver.result import Limits


@dataclass(frozen=True)
class Hurried(PassedOn):
    """A cost model that answers while the limits leave time; then it raises OutOfTimeError."""

    limits: Limits

    def _asked(self) -> CostModel:
        self.limits.require_time()
        return self.model
