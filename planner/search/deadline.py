"""A search that may take so long and no longer, or is asked to stop: whoever asks for a cost after that gets none."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.cost_models.cost import Cost, Memory
from meshwright.cost_models.question import Call, CostModel, Move
from meshwright.planner.solver.result import Limits
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.stages import Stage


class OutOfTimeError(Exception):
    """The time that was given is over."""


@dataclass(frozen=True)
class Hurried:
    """A cost model that answers while the limits leave time; then it raises OutOfTimeError."""

    model: CostModel
    limits: Limits

    @property
    def memory_grows(self) -> bool:
        return self.model.memory_grows

    @property
    def seconds_grow(self) -> bool:
        return self.model.seconds_grow

    def least_seconds(self, stage: Stage, model: ModelSpec, num_ranks: int, part: int) -> float:
        return self.model.least_seconds(stage, model, num_ranks, part)

    def seconds(self, call: Call) -> Cost:
        return self._in_time().seconds(call)

    def tail_seconds(self, call: Call) -> float:
        return self._in_time().tail_seconds(call)

    def memory(self, call: Call) -> Memory:
        return self._in_time().memory(call)

    def move_seconds(self, move: Move) -> Cost:
        return self._in_time().move_seconds(move)

    def handover_seconds(self, num_bytes: float) -> Cost:
        return self._in_time().handover_seconds(num_bytes)

    def _in_time(self) -> CostModel:
        if self.limits.seconds_left <= 0:
            raise OutOfTimeError
        return self.model
