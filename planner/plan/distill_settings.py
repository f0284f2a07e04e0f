"""The settings of on-policy distillation."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from meshwright.planner.plan.learning_settings import LearningSettings
from meshwright.profiles.stages import TEACHERS

Weight = Annotated[float, Field(gt=0)]

_WEIGHTS = "weights of the teachers' log-probabilities in their mean, in their order; equal where none are given"


class Distill(LearningSettings):
    """Of a student that learns what its teachers say of its own draws; equations and sources in
    `runtime.training.distillation`."""

    teacher_weights: tuple[Weight, ...] = Field(default=(), max_length=len(TEACHERS), description=_WEIGHTS)

    def shares(self, num_teachers: int) -> tuple[float, ...]:
        """The weights of so many teachers, which add up to one."""
        weights = self.teacher_weights or (1.0,) * num_teachers
        return tuple(weight / sum(weights) for weight in weights)
