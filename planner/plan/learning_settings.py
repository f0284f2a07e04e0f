"""The settings that every algorithm has, how a policy is sampled and updated; and how one is paid by scores."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from meshwright.profiles.documents import Document
from meshwright.profiles.stages import Role

StopString = Annotated[str, Field(min_length=1)]

_MISSING_END_SCORE = "final scalar reward of a truncated response, in place of its score"
_MISSING_END_PENALTY = "subtracted from the score of a truncated response"
_DECAY_STEPS = "steps of the run, warm-up among them, after which the rate stays at its least"
_DECAY = "how the rate falls behind the warm-up"
_MIN_RATIO = "the least learning rate, of the largest"
_TARGET_KL = "updates of a step are left out once approx_kl exceeds 1.5 times this"
_MAX_BAD_STEPS = "a run ends behind so many steps in a row with a loss, a score or a gradient that is not finite"
_REWARD_CLIP = "scores are clipped to this magnitude, after reward_scale"


class LearningRateSchedule(Document):
    """How a learning rate rises and falls over the steps of a run, each of which has one rate for all its updates.

    The rate follows from the number of the step alone, and no length of a run is part of it: a run that is resumed, for
    more steps too, goes on as if it had not been stopped.
    """

    warmup_steps: int = Field(default=0, ge=0, description="steps over which the rate rises to its largest")
    decay: Literal["constant", "linear", "cosine"] = Field(default="constant", description=_DECAY)
    decay_steps: int | None = Field(default=None, gt=0, description=_DECAY_STEPS)
    min_ratio: float = Field(default=0.0, ge=0, le=1, description=_MIN_RATIO)

    @model_validator(mode="after")
    def _decay_over_known_steps(self) -> Self:
        if self.decay == "constant" and (self.decay_steps is not None or self.min_ratio):
            given = "min_ratio" if self.decay_steps is None else "decay_steps"
            raise ValueError(f"{given}={getattr(self, given)} says nothing where decay=constant; choose another decay")
        if self.decay != "constant" and self.decay_steps is None:
            raise ValueError(f"decay={self.decay} needs decay_steps, {_DECAY_STEPS}; add it")
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"decay_steps={self.decay_steps} counts warmup_steps={self.warmup_steps} in and must be more; raise it"
            )
        return self

    def ratio(self, step: int) -> float:
        """Of the largest rate, at a step counted from 0; with w, d and m for warm-up, decay and the least ratio

            (n + 1) / w  where n < w,  else  m + (1 - m) c(x) at x = min((n - w) / (d - w), 1)

        and c(x) = 1 - x or (1 + cos(pi x)) / 2 (SGDR, arXiv:1608.03983, equation 5). No step has a rate of nothing but
        those after the decay.
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.decay_steps is None:
            return 1.0
        x = min((step - self.warmup_steps) / (self.decay_steps - self.warmup_steps), 1.0)
        left = 1 - x if self.decay == "linear" else (1 + math.cos(math.pi * x)) / 2
        return self.min_ratio + (1 - self.min_ratio) * left


class LearningSettings(Document):
    """Of an actor that is updated by a clipped surrogate; equations and sources in `runtime.training.ppo`."""

    actor_learning_rate: float = Field(default=1e-6, gt=0, description="largest learning rate of the actor")
    actor_schedule: LearningRateSchedule = Field(
        default=LearningRateSchedule(), description="warm-up and decay of the actor's learning rate"
    )
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of AdamW's first moment")
    adam_beta2: float = Field(default=0.95, ge=0, lt=1, description="decay of AdamW's second moment")
    adam_eps: float = Field(default=1e-8, gt=0, description="AdamW's epsilon")
    max_grad_norm: float = Field(default=1.0, gt=0, description="gradients are clipped to this global norm")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's weight decay; norms and biases have none")
    clip_ratio: float = Field(default=0.2, gt=0, description="the ratio of policies is clipped to 1 -/+ this")
    target_kl: float | None = Field(default=None, gt=0, description=_TARGET_KL)
    entropy_coefficient: float = Field(default=0.0, ge=0, description="weight of the entropy bonus in the loss")
    importance_cap: float = Field(
        default=2.0, gt=0, description="upper limit of the importance weight of a stale token"
    )
    temperature: float = Field(default=1.0, gt=0, description="sampling temperature, which the trained policy has too")
    top_k: int = Field(default=0, ge=0, description="sample from the k likeliest tokens only; 0 is all")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="sample from the likeliest tokens that together reach probability p only"
    )
    stop: tuple[StopString, ...] = Field(default=(), description="strings that end a response, which keeps them")
    max_bad_steps: int = Field(default=3, ge=1, description=_MAX_BAD_STEPS)
    seed: int = Field(default=0, ge=0, description="seed of sampling and of the order of minibatches")

    @property
    def clip_range(self) -> tuple[float, float]:
        """Between which ratios of the policies an advantage counts."""
        return 1 - self.clip_ratio, 1 + self.clip_ratio

    def learning_rate(self, role: Role, step: int) -> float:
        """Of a trained role in a step counted from 0."""
        assert role == Role.ACTOR, role
        return self.actor_learning_rate * self.actor_schedule.ratio(step)


class PaidSettings(LearningSettings):
    """Of an actor whose responses are paid for by their scores."""

    reward_scale: float = Field(default=1.0, gt=0, description="scores are multiplied by this before they are used")
    reward_clip: float | None = Field(default=None, gt=0, description=_REWARD_CLIP)
    missing_end_score: float | None = Field(default=None, description=_MISSING_END_SCORE)
    missing_end_penalty: float = Field(default=0.0, ge=0, description=_MISSING_END_PENALTY)

    @model_validator(mode="after")
    def _pay_a_cut_response_once(self) -> Self:
        if self.missing_end_score is not None and self.missing_end_penalty:
            raise ValueError(
                f"missing_end_score={self.missing_end_score} replaces the score that "
                f"missing_end_penalty={self.missing_end_penalty} would be taken off; give one of them"
            )
        return self

    @property
    def pays_cut(self) -> bool:
        """Whether a response that was cut by length is paid for."""
        return True
