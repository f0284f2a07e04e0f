"""On-policy distillation: a student is trained on its own samples with the log-probabilities of its teachers.

Shapes are those of `meshwright.runtime.training.advantages`. The reverse KL of a token is estimated on the sampled
token, and each token is credited with its own term only (Lu et al., On-Policy Distillation, Thinking Machines Lab,
2025; slime has the same estimate; GKD, arXiv:2306.13649, and MiniLLM, arXiv:2306.08543, minimise the same divergence):

    A_i = sum_k w_k log p_k(i) - log pi(i),    sum_k w_k = 1

The expectation of A over samples of pi is -sum_k w_k KL(pi || p_k): with several teachers p_k the student minimises the
weighted mean of its divergences from them, which is smallest where pi is proportional to prod_k p_k^w_k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from meshwright.planner.job.algorithm_settings import Distill
from meshwright.profiles.stages import TEACHER_LOGPROBS, TOTAL_SCORES
from meshwright.runtime.messages.experience import StepExperience
from meshwright.runtime.records.version_gap import KL_TO_TEACHERS


def distillation_advantages(
    teacher_logprobs: Sequence[Tensor], logprobs: Tensor, mask: Tensor, settings: Distill
) -> Tensor:
    """Advantages [B, S], zero outside the mask, from the log-probabilities [B, S] of each teacher and of the student
    before the update."""
    weights = settings.shares(len(teacher_logprobs))
    terms = [weight * (teacher - logprobs) for weight, teacher in zip(weights, teacher_logprobs, strict=True)]
    return torch.where(mask.bool(), torch.stack(terms).sum(0), 0.0)


def score_by_teachers(batch: StepExperience, settings: Distill, student: str) -> None:
    """Sets the score of every sequence to the mean of its advantages over the tokens that the student sampled.

    `student` is the field with the student's log-probabilities before the updates.
    """
    teachers = [field for field in TEACHER_LOGPROBS.values() if batch.experience.rows(field)]
    for row in batch.rows:
        teacher_logprobs = [batch.sampled_values(field, row)[None] for field in teachers]
        student_logprobs = batch.sampled_values(student, row)[None]
        advantages = distillation_advantages(
            teacher_logprobs, student_logprobs, torch.ones_like(student_logprobs), settings
        )
        batch.experience.put(TOTAL_SCORES, row, advantages.mean().view(1))


def distillation_metrics(
    advantages: Tensor, teacher_logprobs: Mapping[str, Tensor], logprobs: Tensor, mask: Tensor, truncated: Tensor
) -> dict[str, float]:
    """Metrics of a whole batch of experience: means over its rows [B] and over its tokens.

    `teacher_logprobs` are the teachers' log-probabilities by field, `logprobs` the student's, [B, S] each.
    `kl_to_teachers` is the k1 estimate -A, summed over each response; with several teachers the divergence from each
    is reported too.
    """
    num_rows, num_tokens = len(mask), mask.bool().sum().clamp(min=1)
    total = -advantages.double().sum()
    per_teacher = {}
    for role, field in TEACHER_LOGPROBS.items() if len(teacher_logprobs) > 1 else ():
        if field in teacher_logprobs:
            divergence = torch.where(mask.bool(), logprobs - teacher_logprobs[field], 0.0).double().sum()
            per_teacher[f"kl_to_{role}_per_token"] = float(divergence / num_tokens)
    return {
        "kl_to_teachers": float(total / num_rows),
        KL_TO_TEACHERS: float(total / num_tokens),
        **per_teacher,
        "response_tokens": float(mask.bool().sum() / num_rows),
        "truncated_fraction": float(truncated.double().mean()),
    }
