"""Settings of on-policy distillation."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from meshwright.planner.plan.learning_settings import LearningSettings
from meshwright.profiles.stages import TEACHERS

Weight = Annotated[float, Field(gt=0)]

_WEIGHTS = "weights of the teachers in the mean of their log-probabilities, in their order; default: equal"


class Distill(LearningSettings):
    """Settings of a student that learns its teachers' log-probabilities of its own samples; equations and sources are
    in `runtime.training.distillation`."""

    teacher_weights: tuple[Weight, ...] = Field(default=(), max_length=len(TEACHERS), description=_WEIGHTS)

    def shares(self, num_teachers: int) -> tuple[float, ...]:
        """The weights of the teachers, normalised to sum to 1."""
        weights = self.teacher_weights or (1.0,) * num_teachers
        return tuple(weight / sum(weights) for weight in weights)
