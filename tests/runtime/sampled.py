"""Small jobs of dynamic sampling: a reward model whose scores are alike more often than not, prompts as tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import transformers
import yaml

from meshwright.planner.job.job import SETTINGS_KEYS
from meshwright.profiles.algorithms import Algorithm
from meshwright.profiles.stages import Role
from meshwright.runtime.execution.request import RunRequest
from tests.reference.dynamic_sampling import Batch, DynamicSampling
from tests.reference.ppo import Row
from tests.runtime.compared import settings_of
from tests.runtime.observed import Observed
from tests.runtime.plans_by_hand import Where
from tests.runtime.refereed import END_TOKENS, request_of
from tests.runtime.small_job import write_job

GROUP, NUM_GROUPS, NUM_PROMPTS, MAX_RESPONSE = 4, 4, 3, 12
SETTINGS: dict[str, Any] = {
    "actor_learning_rate": 1e-3,
    "adam_beta2": 0.98,
    "entropy_coefficient": 0.01,
    "temperature": 0.8,
    "top_k": 24,
    "top_p": 0.9,
    "seed": 3,
}


DYNAMIC = {
    "batch_size": NUM_GROUPS * GROUP,
    "group_size": GROUP,
    "dynamic_sampling": {"acceptance": 0.6, "num_prompts": NUM_PROMPTS},
}


@dataclass(frozen=True)
class Case:
    """A plan on so many ranks, and what differs from the other jobs."""

    num_ranks: int
    where: Mapping[str, Where]
    algorithm: Algorithm = "grpo"
    settings: Mapping[str, Any] = field(default_factory=dict)
    rewards: tuple[dict[str, Any], ...] = ()
    has_reward_model: bool = True
    reward: str = "scores"
    """The directory of the reward model."""
    workload: Mapping[str, Any] = field(default_factory=lambda: DYNAMIC)
    steps_ahead: int = 0
    """How many steps ahead of training it generates, which its staleness allows."""


def write_two_scores(directory: Path) -> None:
    """Makes a reward model say one of two scores: whether the last token ends a response."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "score.weight")):
                parameter.zero_()
        embeddings = model.get_input_embeddings().weight
        embeddings[:] = embeddings[0].clone()
        embeddings[list(END_TOKENS)] = -embeddings[0].clone()
        model.score.weight[0, 0] = 1.0
    model.save_pretrained(directory)


def request(directory: Path, name: str, case: Case, *, steps: int) -> RunRequest:
    """A run of the case."""
    path = write_job(directory, num_ranks=case.num_ranks)
    job = yaml.safe_load(path.read_text())
    del job["ppo"]
    paths = {"actor": "policy", "ref": "ref", **({"reward": case.reward} if case.has_reward_model else {})}
    if case.algorithm == "ppo":
        paths["critic"] = "values"
    job["models"] = {role: {"path": path} for role, path in paths.items()}
    job["workload"] |= {"response": {"max": MAX_RESPONSE, "fixed": 8}, **case.workload}
    job |= {"algorithm": case.algorithm, SETTINGS_KEYS[case.algorithm]: {**SETTINGS, **case.settings}}
    if case.rewards:
        job["rewards"] = list(case.rewards)
    job["staleness"] = case.steps_ahead
    return request_of(job, directory, name, case.where, steps=steps, steps_ahead=case.steps_ahead)


B = TypeVar("B")


class SampledAhead(Generic[B]):
    """The batches of a run that are drawn so many steps ahead, each by the policy of its time."""

    def __init__(self, steps_ahead: int, num_steps: int, draw: Callable[[int], B]) -> None:
        """`draw` draws the next batch with the policy as it is, which has seen so many updates."""
        self._steps_ahead, self._num_steps, self._draw = steps_ahead, num_steps, draw
        self._drawn: list[B] = []

    def batch(self, step: int) -> B:
        """That of a step; the policy has seen as many updates."""
        while len(self._drawn) <= min(step + self._steps_ahead, self._num_steps - 1):
            self._drawn.append(self._draw(step))
        return self._drawn[step]


def sampling(asked: RunRequest) -> DynamicSampling:
    """What the reference draws of the prompts of a run."""
    return DynamicSampling(
        prompts_of(asked),
        settings_of(asked),
        num_groups=NUM_GROUPS,
        num_prompts=NUM_PROMPTS,
        drawn=asked.job.workload.best_of,
    )


def prompts_of(asked: RunRequest) -> list[list[int]]:
    """The tokens of a run's prompts, in the order of their file."""
    lines = (asked.directory / "prompts.jsonl").read_text().splitlines()
    return [[int(word[1:]) + 2 for word in json.loads(line)["prompt"].split()] for line in lines]


def trained_on(run: Observed, step: int) -> list[list[int]]:
    """The sequences of a step in their order."""
    tokens = run.steps[step]["tokens"]
    return [tokens[row].tolist() for row in range(len(tokens))]


def said(batch: Batch) -> dict[str, float]:
    """The metrics that tell how many were drawn."""
    return {
        "waves": batch.num_waves,
        "sampled_prompts": batch.num_drawn,
        "trained_prompts": NUM_GROUPS,
        "dropped_prompts": batch.num_drawn - NUM_GROUPS,
        "groups_with_signal": batch.num_with_signal / batch.num_drawn,
    }


def paths(asked: RunRequest) -> dict[Role, Path]:
    """The directories of its models."""
    return {role: asked.directory / asked.job.models.source(role).path for role in asked.plan.graph.roles}


def is_short(row: Row) -> float:
    """What `tests.runtime.rewarding:is_short` says."""
    return float(len(row.response) < 6)
