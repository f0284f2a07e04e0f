"""The settings of the algorithms: those of sampling and policy updates, which all algorithms share, those of rewards,
and those of PPO, of the algorithms without a critic (GRPO, RLOO, REINFORCE++) and of on-policy distillation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from meshwright.profiles.algorithms import Algorithm
from meshwright.profiles.documents import Document
from meshwright.profiles.stages import TEACHERS, Role

StopString = Annotated[str, Field(min_length=1)]

_MISSING_END_SCORE = "final scalar reward of a truncated response, in place of its score"
_MISSING_END_PENALTY = "subtracted from the score of a truncated response"
_DECAY_STEPS = "steps of the run, warm-up included, after which the rate stays at its minimum"
_DECAY = "decay of the rate after the warm-up"
_MIN_RATIO = "minimum learning rate as a fraction of the largest"
_TARGET_KL = "remaining updates of a step are skipped once approx_kl exceeds 1.5 times this"
_MAX_BAD_STEPS = "consecutive steps with a loss, a score or a gradient that is not finite, after which a run ends"
_ACTOR_RATE = "largest learning rate of the actor, and of every other trained role that has none of its own"
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
    `runtime.training.losses`.

    A key of another algorithm is refused, and the error names the algorithms that have it.
    """

    actor_learning_rate: float = Field(default=1e-6, gt=0, description=_ACTOR_RATE)
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
    seed: int = Field(default=0, ge=0, le=2**32 - 1, description="seed of sampling and of the order of minibatches")

    @classmethod
    def explain_unknown_key(cls, key: str, /) -> str | None:
        algorithms = [algorithm for algorithm, kind in SETTINGS.items() if key in kind.model_fields]
        return f"it is a setting of algorithm={' and '.join(algorithms)}; remove it." if algorithms else None

    @property
    def clip_range(self) -> tuple[float, float]:
        """The lower and upper clip of the policy ratio."""
        return 1 - self.clip_ratio, 1 + self.clip_ratio

    def learning_rate(self, role: Role, step: int) -> float:
        """The learning rate of a trained role at a step, counted from 0: the actor's, unless the settings have one for
        the role."""
        rate, schedule = self._rates_of_roles().get(role, (self.actor_learning_rate, self.actor_schedule))
        return rate * schedule.ratio(step)

    def updates(self, _role: Role, _step: int, /) -> bool:
        """True if a trained role is updated at a step, counted from 0; otherwise its weights and optimizer state stay
        unchanged."""
        return True

    def _rates_of_roles(self) -> Mapping[Role, tuple[float, LearningRateSchedule]]:
        """The largest rate and the schedule of each role that has its own."""
        return {}


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


Truncation = Literal["terminal", "bootstrap"]
"""The treatment of a truncated response; see `runtime.training.advantages.generalized_advantages`."""

_TRUNCATION = (
    "response truncated at the length limit: terminal: it ends there; bootstrap: its score is ignored and the value "
    "after its last token is used"
)


_CRITIC_WARMUP = (
    "number of steps at the start of a run that update the critic only; the weights and the optimizer state of every "
    "other trained role stay unchanged"
)


class PPO(RewardedSettings):
    """Settings of PPO; equations and sources are in `runtime.training.losses`."""

    critic_learning_rate: float = Field(default=5e-6, gt=0, description="largest learning rate of the critic")
    critic_schedule: LearningRateSchedule = Field(
        default=LearningRateSchedule(), description="warm-up and decay of the critic's learning rate"
    )
    critic_warmup_steps: int = Field(default=0, ge=0, description=_CRITIC_WARMUP)
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

    def updates(self, role: Role, step: int, /) -> bool:
        return role is Role.CRITIC or step >= self.critic_warmup_steps

    def _rates_of_roles(self) -> Mapping[Role, tuple[float, LearningRateSchedule]]:
        return {Role.CRITIC: (self.critic_learning_rate, self.critic_schedule)}


LossMean = Literal["token", "sequence", "constant"]
"""The tokens or sequences over which the loss is averaged; see `runtime.training.losses.policy_loss`."""

_CLIP_HIGH = "upper clip of the policy ratio is 1 + this (clip-higher of DAPO, arXiv:2503.14476); default: clip_ratio"
_LOSS_MEAN = (
    "token: mean over the tokens of an update (DAPO); sequence: mean over each response, then over responses (GRPO); "
    "constant: sum divided by the largest number of tokens that responses can have (Dr. GRPO)"
)
_OVERLONG_TOKENS = "tokens before the maximum length over which the length penalty grows (DAPO); 0: no penalty"
_STD = "divide advantages by the standard deviation of the group's scores; false as in Dr. GRPO, arXiv:2503.20783"


class CriticFreeSettings(RewardedSettings):
    """Settings of all algorithms without a critic; equations and sources are in `runtime.training.advantages`."""

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


Weight = Annotated[float, Field(gt=0)]

_WEIGHTS = "weights of the teachers in the mean of their log-probabilities, in their order; default: equal"


Divergence = Literal["reverse", "forward"]
"""The divergence from a teacher's distribution that a student minimises; see `runtime.training.distillation`."""

TEACHER_TOP_K = (
    "likeliest tokens of each prediction whose log-probabilities a teacher reports, and that the student learns; "
    "default: none, and the student learns from the sampled token alone"
)
"""Description of the key `teacher_top_k` of a distillation and of its facts."""

_DIVERGENCE = (
    "reverse: KL(student || teacher); forward: KL(teacher || student), which only whole distributions (teacher_top_k) "
    "have"
)
_DISTILLATION_WEIGHT = "weight of the distillation beside the advantages of rewards"
_GROUP_STD = "divide the advantages of rewards by the standard deviation of the group's scores, as grpo does"


class Distill(RewardedSettings):
    """Settings of a student that learns its teachers' log-probabilities of its own samples, alone or beside rewards;
    equations and sources are in `runtime.training.distillation`."""

    teacher_weights: tuple[Weight, ...] = Field(default=(), max_length=len(TEACHERS), description=_WEIGHTS)
    teacher_top_k: int | None = Field(default=None, gt=0, description=TEACHER_TOP_K)
    divergence: Divergence = Field(default="reverse", description=_DIVERGENCE)
    distillation_weight: float = Field(default=1.0, gt=0, description=_DISTILLATION_WEIGHT)
    normalise_by_std: bool = Field(default=True, description=_GROUP_STD)

    @model_validator(mode="after")
    def _divergence_of_whole_distributions(self) -> Self:
        if self.divergence == "forward" and self.teacher_top_k is None:
            raise ValueError(
                "divergence=forward needs the teachers' distributions, and the student's own samples estimate the "
                "reverse divergence alone; set teacher_top_k, or use reverse"
            )
        return self

    def shares(self, num_teachers: int) -> tuple[float, ...]:
        """The weights of the teachers, normalised to sum to 1."""
        weights = self.teacher_weights or (1.0,) * num_teachers
        return tuple(weight / sum(weights) for weight in weights)


SETTINGS: Mapping[Algorithm, type[LearningSettings]] = {
    "ppo": PPO,
    "grpo": GRPO,
    "rloo": RLOO,
    "reinforce++": Reinforce,
    "distill": Distill,
}
"""The class of the settings of each algorithm."""
