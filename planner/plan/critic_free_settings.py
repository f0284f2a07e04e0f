"""Settings of the algorithms without a critic (GRPO, RLOO, REINFORCE++), which compare samples with each other."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from meshwright.planner.plan.learning_settings import RewardedSettings

LossMean = Literal["token", "sequence", "constant"]
"""The tokens or sequences over which the loss is averaged; see `runtime.training.ppo.policy_loss`."""

_CLIP_HIGH = "upper clip of the policy ratio is 1 + this (clip-higher of DAPO, arXiv:2503.14476); default: clip_ratio"
_LOSS_MEAN = (
    "token: mean over the tokens of an update (DAPO); sequence: mean over each response, then over responses (GRPO); "
    "constant: sum divided by the largest number of tokens that responses can have (Dr. GRPO)"
)
_OVERLONG_TOKENS = "tokens before the maximum length over which the length penalty grows (DAPO); 0: no penalty"
_STD = "divide advantages by the standard deviation of the group's scores; false as in Dr. GRPO, arXiv:2503.20783"


class CriticFreeSettings(RewardedSettings):
    """Settings that these algorithms share; equations and sources are in `runtime.training.group_advantages`."""

    kl_coefficient: float = Field(default=0.0, ge=0, description="KL penalty against the reference, if there is one")
    clip_ratio_high: float | None = Field(default=None, gt=0, description=_CLIP_HIGH)
    loss_mean: LossMean = Field(default="token", description=_LOSS_MEAN)
    overlong_tokens: int = Field(default=0, ge=0, description=_OVERLONG_TOKENS)
    overlong_penalty: float = Field(
        default=1.0, ge=0, description="penalty subtracted from the score at the maximum length"
    )

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
    """REINFORCE leave-one-out: the mean score of the group's other samples is the baseline, arXiv:2402.14740."""

    kl_coefficient: float = Field(default=0.05, ge=0, description="KL penalty per response, inside the reward")


class Reinforce(CriticFreeSettings):
    """REINFORCE++, arXiv:2501.03262."""

    kl_coefficient: float = Field(default=0.01, ge=0, description="KL penalty per token, inside the reward")
    group_baseline: bool = Field(default=False, description="first subtract the mean of a group from its scores")
