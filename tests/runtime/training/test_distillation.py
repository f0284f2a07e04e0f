"""A student's advantages are its teachers' log-probabilities less its own, token by token, and their mean falls to zero
at the teacher."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from meshwright.planner.job.algorithm_settings import Distill
from meshwright.profiles.stages import TOOL_TOKEN_VERSION
from meshwright.runtime.messages.experience import StepExperience
from meshwright.runtime.training.advantages import response_mask
from meshwright.runtime.training.distillation import distillation_advantages, distillation_metrics, score_by_teachers

MASK = response_mask(torch.tensor([3, 2]), torch.tensor([4, 6]), 10)
TWO = Distill(teacher_weights=(3.0, 1.0))


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_teacher_that_says_what_the_student_says_teaches_nothing() -> None:
    student = noise(0, 2, 10)
    assert not distillation_advantages([student, student], student, MASK, TWO).any()


def test_several_teachers_count_by_their_weights() -> None:
    student, one, other = (noise(seed, 2, 10) for seed in range(3))
    found = distillation_advantages([one, other], student, MASK, TWO)
    expected = torch.where(MASK, 0.75 * one + 0.25 * other - student, 0.0)
    assert torch.allclose(found, expected, atol=1e-12)


def test_what_lies_outside_the_mask_changes_nothing() -> None:
    student, teacher = noise(0, 2, 10), noise(1, 2, 10)
    spoilt = [torch.where(MASK, x, math.nan) for x in (teacher, student)]
    found = distillation_advantages([spoilt[0]], spoilt[1], MASK, Distill())
    plain = distillation_advantages([teacher], student, MASK, Distill())
    assert torch.equal(found, plain)
    cut, said = torch.zeros(2), {"teacher_logprobs": teacher}
    assert distillation_metrics(found, said, student, MASK, cut) == distillation_metrics(
        plain, said, student, MASK, cut
    )


def test_the_mean_advantage_over_draws_is_minus_the_weighted_divergence() -> None:
    """Over all tokens of a vocabulary, each weighted by how likely the student draws it."""
    student, one, other = (noise(seed, 1, 8).log_softmax(-1) for seed in range(3))
    found = distillation_advantages([one, other], student, torch.ones(1, 8), TWO)
    divergence = [(student.exp() * (student - teacher)).sum() for teacher in (one, other)]
    assert float((student.exp() * found).sum()) == pytest.approx(-float(0.75 * divergence[0] + 0.25 * divergence[1]))


def test_the_gradient_over_draws_is_that_of_the_divergence() -> None:
    logits, teacher = noise(0, 8).requires_grad_(), noise(1, 8).log_softmax(-1)
    student = logits.log_softmax(-1)
    (student.exp() * (student - teacher)).sum().backward()
    exact = logits.grad
    held = student.detach()
    advantages = distillation_advantages([teacher[None]], held[None], torch.ones(1, 8), Distill())[0]
    (estimate,) = torch.autograd.grad(-(held.exp() * advantages * logits.log_softmax(-1)).sum(), logits)
    assert exact is not None
    assert torch.allclose(estimate, exact, atol=1e-12)


def test_metrics_are_means_over_responses_and_over_tokens_and_tell_each_of_several_teachers() -> None:
    student, one, other = (noise(seed, 2, 10) for seed in range(3))
    advantages = distillation_advantages([one, other], student, MASK, TWO)
    said = {"teacher_logprobs": one, "teacher_2_logprobs": other}
    found = distillation_metrics(advantages, said, student, MASK, torch.tensor([True, False]))
    assert found["response_tokens"] == 5.0
    assert found["truncated_fraction"] == 0.5
    assert found["kl_to_teachers"] == pytest.approx(5 * found["kl_to_teachers_per_token"])
    mixed = 0.75 * found["kl_to_teacher_per_token"] + 0.25 * found["kl_to_teacher_2_per_token"]
    assert found["kl_to_teachers_per_token"] == pytest.approx(mixed)
    alone = distillation_metrics(advantages, {"teacher_logprobs": one}, student, MASK, torch.zeros(2))
    assert "kl_to_teacher_per_token" not in alone


def test_a_response_is_scored_by_the_tokens_that_the_student_drew() -> None:
    batch = StepExperience(step=0, rows=range(1))
    told = {
        "versions": torch.tensor([0, 0, TOOL_TOKEN_VERSION, 0, 0]),
        "proximal_logprobs": torch.tensor([9.0, -1, 9, -2, 9]),
    }
    for field, values in {**told, "teacher_logprobs": torch.tensor([9.0, -0.5, 9, -1, 9])}.items():
        batch.experience.put(field, 0, values)
    batch.experience.put("prompt_lengths", 0, torch.tensor([2]))
    score_by_teachers(batch, Distill(), "proximal_logprobs")
    assert float(batch.score(0)) == pytest.approx((0.5 + 1.0) / 2)
