"""The evaluations of a job: which held-out prompts are sampled during training, when, and how they are scored.

The prompts of `data.held_out` are the set `held_out`. `evaluation.sets` names further sets, each with its own prompts,
interval, length limit and rewards.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, TypeAlias

from pydantic import Field

from meshwright.planner.job.rewards_and_tools import Reward
from meshwright.profiles.documents import Document

HELD_OUT = "held_out"
"""The name of the set of `data.held_out`."""

TRAINING = "train"
"""The name under which metric writers have the metrics of training, beside those of each set."""

_PROMPTS = "file or directory of prompts, as data.prompts"
_SPLIT = "split to read from a directory that has several"
_EVERY = "steps between evaluations on this set; default: every_steps of the evaluation"
_LONGEST = "maximum number of tokens after a prompt; default: as in training"
_REWARDS = "functions and judges that score this set, in place of the job's rewards, reward model and teachers"
_MODEL_WEIGHT = "weight of the reward model's score beside the rewards of this set"
_SETS = "further sets of held-out prompts, by name"


def title_of_set(name: str) -> str:
    """Return the name of a set of held-out prompts as it is printed."""
    return "held-out" if name == HELD_OUT else name


def prompts_key(name: str) -> str:
    """Return the key of the job that has the prompts of a set."""
    return f"data.{HELD_OUT}" if name == HELD_OUT else f"evaluation.sets.{name}.prompts"


SetName: TypeAlias = Annotated[str, Field(pattern="^[a-z][a-z0-9_]*$", max_length=40)]


class EvaluationSet(Document):
    """A set of held-out prompts with its own interval, length limit and rewards."""

    prompts: str = Field(description=_PROMPTS)
    split: str = Field(default="test", description=_SPLIT)
    every_steps: int | None = Field(default=None, ge=0, description=_EVERY)
    max_response: int | None = Field(default=None, gt=0, description=_LONGEST)
    rewards: tuple[Reward, ...] = Field(default=(), max_length=16, description=_REWARDS)
    reward_model_weight: float = Field(default=0.0, description=_MODEL_WEIGHT)


class Evaluation(Document):
    """Evaluation of the policy on held-out prompts: before the first step, after the last, and in between as set
    here."""

    every_steps: int = Field(default=0, ge=0, description="steps between evaluations; 0: only the first and the last")
    sets: Mapping[SetName, EvaluationSet] = Field(default={}, max_length=64, description=_SETS)

    def interval(self, name: str) -> int:
        """Return the steps between evaluations on a set; 0 if only the first and the last policy are evaluated."""
        of_set = self.sets[name].every_steps if name in self.sets else None
        return self.every_steps if of_set is None else of_set

    def own_rewards(self, name: str) -> tuple[Reward, ...]:
        """Return the rewards of a set that replace those of the job; empty if it is scored as in training."""
        return self.sets[name].rewards if name in self.sets else ()

    def scores_by_model(self, name: str) -> bool:
        """True if the job's reward model or teachers score a set."""
        return not self.own_rewards(name) or self.sets[name].reward_model_weight != 0

    def digest(self, name: str, prompts: str) -> str:
        """Return a digest of what decides the scores on a set besides the policy: that of its `prompts`, and where
        they differ from training its length limit and rewards."""
        own = (
            self.sets[name].model_dump(mode="json", include=_SCORING, exclude_defaults=True)
            if name in self.sets
            else {}
        )
        return hashlib.sha256(json.dumps([prompts, own]).encode()).hexdigest() if own else prompts


_SCORING = {"max_response", "rewards", "reward_model_weight"}
"""Keys of a set that decide its scores."""


def evaluation_violations(evaluation: Evaluation, *, max_response: int, has_reward_model: bool) -> Iterator[str]:
    """Yield one sentence for each broken rule of the sets of a job.

    Its rollouts have at most `max_response` tokens after the prompt.
    """
    for name, one in evaluation.sets.items():
        where = f"evaluation.sets.{name}"
        if name == HELD_OUT:
            yield f"{where}: this is the name of the prompts of data.held_out; give the set another name"
        if name == TRAINING:
            yield f"{where}: this is the name of the metrics of training; give the set another name"
        if one.max_response is not None and one.max_response > max_response:
            yield (
                f"{where}.max_response={one.max_response} is above the {max_response} tokens after a prompt that "
                f"memory is planned for; use {max_response} or fewer, or raise workload.response.max"
            )
        names = [reward.name for reward in one.rewards]
        for repeated in sorted({reward for reward in names if names.count(reward) > 1}):
            yield f"{where}.rewards: the name {repeated} is given twice; give each reward its own"
        if one.reward_model_weight and not one.rewards:
            yield (
                f"{where}.reward_model_weight={one.reward_model_weight:g} is beside no rewards of this set, which the "
                "job's rewards therefore score; add rewards, or remove it"
            )
        elif one.reward_model_weight and not has_reward_model:
            yield (
                f"{where}.reward_model_weight={one.reward_model_weight:g} weighs a reward model, and the job has none; "
                "use 0"
            )
