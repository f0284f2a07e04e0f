"""What ranks hold of held-out responses comes to one record, wherever the parts of a score are."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from meshwright.planner.job.job import Job
from meshwright.profiles.documents import parse
from meshwright.profiles.stages import REWARDS
from meshwright.runtime.execution.held_out import HeldOutPart, evaluation_of
from meshwright.runtime.messages.experience import StepExperience

WORKLOAD = {"batch_size": 2, "prompt": {"max": 4, "fixed": 2}, "response": {"max": 4, "fixed": 2}}
PATH = {"path": "none"}
DISTILL = {
    "algorithm": "distill",
    "models": {"actor": PATH, "teacher": PATH, "teacher_2": PATH},
    "distill": {"teacher_weights": [3, 1]},
}
GRPO = {
    "algorithm": "grpo",
    "models": {"actor": PATH, "reward": PATH},
    "rewards": [{"name": "third", "function": "exact_match", "weight": 2.0}],
    "reward_model_weight": 0.5,
}


def job(document: dict[str, Any]) -> Job:
    group = {"group_size": 2} if document["algorithm"] == "grpo" else {}
    return parse(Job, json.dumps({**document, "workload": WORKLOAD | group}), "job")


def part(asked: Job, **fields: dict[int, list[float]]) -> HeldOutPart:
    """Of a rank that holds these, of two rows with two tokens of a prompt and two that were drawn."""
    batch = StepExperience(step=3, rows=range(2), held_out=True)
    for row in range(2):
        batch.experience.put("tokens", row, torch.arange(4))
        batch.experience.put("prompt_lengths", row, torch.tensor([2]))
        batch.experience.put("versions", row, torch.full((4,), 3))
        batch.experience.put("behaviour_logprobs", row, torch.tensor([0.0, -1.0, -2.0, 0.0]))
    for name, rows in fields.items():
        for row, values in rows.items():
            batch.experience.put(name, row, torch.tensor(values))
    return HeldOutPart.of(batch, asked)


def test_teachers_and_the_student_may_be_on_different_ranks() -> None:
    asked = job(DISTILL)
    student = part(asked, proximal_logprobs={0: [0, -1.0, -2.0, 0], 1: [0, -1.0, -2.0, 0]})
    one = part(asked, teacher_logprobs={0: [9, -1.5, -2.5, 9], 1: [9, -1.0, -2.0, 9]})
    other = part(asked, teacher_2_logprobs={0: [9, -2.0, -3.0, 9], 1: [9, -3.0, -4.0, 9]})
    found = evaluation_of([other, student, one], 3, asked)
    assert found.scores == pytest.approx((0.75 * -0.5 + 0.25 * -1.0, 0.25 * -2.0))
    assert found.reported_score == -found.mean_score > 0
    assert found.by_teachers
    assert found.generator_gap == 0.0
    assert found.mean_response_tokens == 2


def test_a_paid_response_has_the_sum_of_what_its_ranks_say() -> None:
    asked = job(GRPO)
    scored = part(asked, scores={0: [2.0], 1: [-4.0]})
    hosted = part(asked, **{REWARDS: {0: [1.0], 1: [0.5]}})
    found = evaluation_of([scored, hosted], 3, asked)
    assert found.scores == (0.5 * 2.0 + 2.0 * 1.0, 0.5 * -4.0 + 2.0 * 0.5)
    assert found.reported_score == found.mean_score
    assert not found.by_teachers
