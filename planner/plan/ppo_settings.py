"""Settings of PPO."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from meshwright.planner.plan.learning_settings import LearningRateSchedule, RewardedSettings
from meshwright.profiles.stages import Role

Truncation = Literal["terminal", "bootstrap"]
"""The treatment of a truncated response; see `runtime.training.advantages.generalized_advantages`."""

_TRUNCATION = (
    "response truncated at the length limit: terminal: it ends there; bootstrap: its score is ignored and the value "
    "after its last token is used"
)


class PPO(RewardedSettings):
    """Settings of PPO; equations and sources are in `runtime.training.ppo`."""

    critic_learning_rate: float = Field(default=5e-6, gt=0, description="largest learning rate of the critic")
    critic_schedule: LearningRateSchedule = Field(
        default=LearningRateSchedule(), description="warm-up and decay of the critic's learning rate"
    )
    value_clip: float = Field(default=0.2, gt=0, description="values are clipped to this distance from the old ones")
    kl_coefficient: float = Field(default=0.05, ge=0, description="KL penalty per token, inside the reward")
    gamma: float = Field(default=1.0, gt=0, le=1, description="discount factor")
    gae_lambda: float = Field(default=0.95, ge=0, le=1, description="lambda of generalised advantage estimation")
    whiten_advantages: bool = Field(
        default=True, description="normalise the advantages of a step to mean 0 and variance 1"
    )
    truncation: Truncation = Field(default="terminal", description=_TRUNCATION)

    @model_validator(mode="after")
    def _bootstrap_excludes_end_scores(self) -> Self:
        if self.truncation == "bootstrap" and (self.missing_end_score is not None or self.missing_end_penalty):
            setting = "missing_end_penalty" if self.missing_end_score is None else "missing_end_score"
            raise ValueError(
                f"{setting}={getattr(self, setting)} applies to truncated responses, whose score truncation=bootstrap "
                "ignores; remove it, or choose truncation=terminal"
            )
        return self

    @property
    def rewards_truncated(self) -> bool:
        return self.truncation == "terminal"

    def learning_rate(self, role: Role, step: int) -> float:
        if role == Role.CRITIC:
            return self.critic_learning_rate * self.critic_schedule.ratio(step)
        return super().learning_rate(role, step)
