"""The settings of algorithms that compare the samples of a step with each other, and so have no critic."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from meshwright.planner.plan.learning_settings import PaidSettings

LossMean = Literal["token", "sequence", "constant"]
"""What the loss is a mean over; see `runtime.training.ppo.policy_loss`."""

_CLIP_HIGH = "how far above 1 a ratio counts (clip-higher of DAPO, arXiv:2503.14476); clip_ratio where none is given"
_LOSS_MEAN = (
    "token: over the tokens of an update (DAPO); sequence: over each response, then over them (GRPO); constant: over "
    "as many tokens as responses can have (Dr. GRPO)"
)
_OVERLONG_TOKENS = "tokens before the longest response over which the length penalty grows (DAPO); 0 is none"
_STD = "divide by the deviation of a group's scores; off as in Dr. GRPO, arXiv:2503.20783"


class CriticFreeSettings(PaidSettings):
    """What these algorithms share; equations and sources in `runtime.training.group_advantages`."""

    kl_coefficient: float = Field(default=0.0, ge=0, description="KL penalty against the reference, if there is one")
    clip_ratio_high: float | None = Field(default=None, gt=0, description=_CLIP_HIGH)
    loss_mean: LossMean = Field(default="token", description=_LOSS_MEAN)
    overlong_tokens: int = Field(default=0, ge=0, description=_OVERLONG_TOKENS)
    overlong_penalty: float = Field(default=1.0, ge=0, description="taken off the score of the longest response")

    @property
    def clip_range(self) -> tuple[float, float]:
        high = self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high
        return 1 - self.clip_ratio, 1 + high


class GRPO(CriticFreeSettings):
    """Group relative policy optimisation, arXiv:2402.03300."""

    kl_coefficient: float = Field(
        default=0.04, ge=0, description="weight of the KL estimate against the reference in the loss"
    )
    loss_mean: LossMean = Field(default="sequence", description=_LOSS_MEAN)
    normalise_by_std: bool = Field(default=True, description=_STD)


class RLOO(CriticFreeSettings):
    """REINFORCE with the others of a group as baseline, arXiv:2402.14740."""

    kl_coefficient: float = Field(default=0.05, ge=0, description="KL penalty per response, inside the reward")


class Reinforce(CriticFreeSettings):
    """REINFORCE++, arXiv:2501.03262."""

    kl_coefficient: float = Field(default=0.01, ge=0, description="KL penalty per token, inside the reward")
    group_baseline: bool = Field(default=False, description="take the mean of a group off its scores first")
