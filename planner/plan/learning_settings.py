"""Settings that all algorithms share (sampling and policy updates), and those of algorithms with rewards."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from meshwright.profiles.documents import Document
from meshwright.profiles.stages import Role

StopString = Annotated[str, Field(min_length=1)]

_MISSING_END_SCORE = "final scalar reward of a truncated response, in place of its score"
_MISSING_END_PENALTY = "subtracted from the score of a truncated response"
_DECAY_STEPS = "steps of the run, warm-up included, after which the rate stays at its minimum"
_DECAY = "decay of the rate after the warm-up"
_MIN_RATIO = "minimum learning rate as a fraction of the largest"
_TARGET_KL = "remaining updates of a step are skipped once approx_kl exceeds 1.5 times this"
_MAX_BAD_STEPS = "consecutive steps with a loss, a score or a gradient that is not finite, after which a run ends"
_REWARD_CLIP = "scores are clipped to this magnitude, after reward_scale"


class LearningRateSchedule(Document):
    """Warm-up and decay of a learning rate over the steps of a run. All updates of a step have one rate.

    The rate depends only on the number of the step, not on the length of the run, so a resumed run, even one for more
    steps, continues as if it had not been stopped.
    """

    warmup_steps: int = Field(default=0, ge=0, description="steps over which the rate rises to its largest")
    decay: Literal["constant", "linear", "cosine"] = Field(default="constant", description=_DECAY)
    decay_steps: int | None = Field(default=None, gt=0, description=_DECAY_STEPS)
    min_ratio: float = Field(default=0.0, ge=0, le=1, description=_MIN_RATIO)

    @model_validator(mode="after")
    def _decay_over_known_steps(self) -> Self:
        if self.decay == "constant" and (self.decay_steps is not None or self.min_ratio):
            setting = "min_ratio" if self.decay_steps is None else "decay_steps"
            raise ValueError(
                f"{setting}={getattr(self, setting)} has no effect with decay=constant; choose another decay"
            )
        if self.decay != "constant" and self.decay_steps is None:
            raise ValueError(f"decay={self.decay} needs decay_steps, {_DECAY_STEPS}; add it")
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"decay_steps={self.decay_steps} includes warmup_steps={self.warmup_steps} and must be larger; raise it"
            )
        return self

    def ratio(self, step: int) -> float:
        """The fraction of the largest rate at step n, counted from 0. With w, d and m for `warmup_steps`, `decay_steps`
        and `min_ratio` it is

            (n + 1) / w  if n < w,  else  m + (1 - m) c(x) with x = min((n - w) / (d - w), 1)

        where c(x) = 1 - x or (1 + cos(pi x)) / 2 (SGDR, arXiv:1608.03983, equation 5). Only steps after the decay may
        have a rate of 0.
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.decay_steps is None:
            return 1.0
        x = min((step - self.warmup_steps) / (self.decay_steps - self.warmup_steps), 1.0)
        left = 1 - x if self.decay == "linear" else (1 + math.cos(math.pi * x)) / 2
        return self.min_ratio + (1 - self.min_ratio) * left


class LearningSettings(Document):
    """Settings of an actor that is updated with the clipped surrogate loss; equations and sources are in
    `runtime.training.ppo`."""

    actor_learning_rate: float = Field(default=1e-6, gt=0, description="largest learning rate of the actor")
    actor_schedule: LearningRateSchedule = Field(
        default=LearningRateSchedule(), description="warm-up and decay of the actor's learning rate"
    )
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of AdamW's first moment")
    adam_beta2: float = Field(default=0.95, ge=0, lt=1, description="decay of AdamW's second moment")
    adam_eps: float = Field(default=1e-8, gt=0, description="AdamW's epsilon")
    max_grad_norm: float = Field(default=1.0, gt=0, description="gradients are clipped to this global norm")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's weight decay; norms and biases have none")
    clip_ratio: float = Field(default=0.2, gt=0, description="the policy ratio is clipped to 1 -/+ this")
    target_kl: float | None = Field(default=None, gt=0, description=_TARGET_KL)
    entropy_coefficient: float = Field(default=0.0, ge=0, description="weight of the entropy bonus in the loss")
    importance_cap: float = Field(
        default=2.0, gt=0, description="upper limit of the importance weight of a stale token"
    )
    temperature: float = Field(default=1.0, gt=0, description="sampling temperature; training uses the same")
    top_k: int = Field(default=0, ge=0, description="sample from the k likeliest tokens only; 0 is all")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="sample from the likeliest tokens that together reach probability p only"
    )
    stop: tuple[StopString, ...] = Field(default=(), description="strings that end a response, which keeps them")
    max_bad_steps: int = Field(default=3, ge=1, description=_MAX_BAD_STEPS)
    seed: int = Field(default=0, ge=0, description="seed of sampling and of the order of minibatches")

    @property
    def clip_range(self) -> tuple[float, float]:
        """The lower and upper clip of the policy ratio."""
        return 1 - self.clip_ratio, 1 + self.clip_ratio

    def learning_rate(self, role: Role, step: int) -> float:
        """The learning rate of a trained role at a step, counted from 0."""
        assert role == Role.ACTOR, role
        return self.actor_learning_rate * self.actor_schedule.ratio(step)


class RewardedSettings(LearningSettings):
    """Settings of an algorithm whose responses are rewarded by their scores."""

    reward_scale: float = Field(default=1.0, gt=0, description="scores are multiplied by this before they are used")
    reward_clip: float | None = Field(default=None, gt=0, description=_REWARD_CLIP)
    missing_end_score: float | None = Field(default=None, description=_MISSING_END_SCORE)
    missing_end_penalty: float = Field(default=0.0, ge=0, description=_MISSING_END_PENALTY)

    @model_validator(mode="after")
    def _one_rule_for_truncated_responses(self) -> Self:
        if self.missing_end_score is not None and self.missing_end_penalty:
            raise ValueError(
                f"missing_end_score={self.missing_end_score} replaces the score that "
                f"missing_end_penalty={self.missing_end_penalty} would be taken off; give one of them"
            )
        return self

    @property
    def rewards_truncated(self) -> bool:
        """True if a response that was truncated at the length limit gets its score as a reward."""
        return True
