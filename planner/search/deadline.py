"""A cost model that stops answering when the time limit of a search has passed or a stop was requested."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.cost_models.question import CostModel, DelegatingCostModel
from meshwright.planner.solver.result import Limits


@dataclass(frozen=True)
class TimeLimitedCostModel(DelegatingCostModel):
    """A cost model that answers while the limits leave time, and raises OutOfTimeError afterwards."""

    limits: Limits

    def _asked(self) -> CostModel:
        self.limits.require_time()
        return self.model
