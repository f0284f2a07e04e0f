"""On-policy distillation: a student learns what its teachers say of the tokens that it drew itself.

Shapes are those of `meshwright.runtime.training.advantages`. The reverse divergence of a token is estimated on the one
that was drawn, and no token answers for those behind it (Lu et al., On-Policy Distillation, Thinking Machines Lab,
2025; slime has the same estimate; GKD, arXiv:2306.13649, and MiniLLM, arXiv:2306.08543, minimise the same divergence):

    A_i = sum_k w_k log p_k(i) - log pi(i),    sum_k w_k = 1

The mean of A over draws of pi is -sum_k w_k KL(pi || p_k): with several teachers p_k the student minimises the weighted
mean of its divergences to them, whose least is where pi is proportional to prod_k p_k^w_k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from meshwright.planner.plan.distill_settings import Distill
from meshwright.profiles.stages import TEACHER_LOGPROBS, TOTAL_SCORES
from meshwright.runtime.messages.step_experience import StepExperience
from meshwright.runtime.records.version_gap import KL_TO_TEACHERS


def advantages_of_teachers(of_teachers: Sequence[Tensor], logprobs: Tensor, mask: Tensor, settings: Distill) -> Tensor:
    """Advantages [B, S], zero outside the mask, from log-probabilities [B, S] of each teacher and of the student before
    the update."""
    shares = settings.shares(len(of_teachers))
    parts = [share * (one - logprobs) for share, one in zip(shares, of_teachers, strict=True)]
    return torch.where(mask.bool(), torch.stack(parts).sum(0), 0.0)


def score_by_teachers(batch: StepExperience, settings: Distill) -> None:
    """Makes the score of every sequence: the mean of A over the tokens that the student drew."""
    teachers = [field for field in TEACHER_LOGPROBS.values() if batch.experience.rows(field)]
    for row in batch.rows:
        of_teachers = [batch.drawn(field, row)[None] for field in teachers]
        student = batch.drawn("proximal_logprobs", row)[None]
        apart = advantages_of_teachers(of_teachers, student, torch.ones_like(student), settings)
        batch.experience.put(TOTAL_SCORES, row, apart.mean().view(1))


def distillation_metrics(
    advantages: Tensor, of_teachers: Mapping[str, Tensor], logprobs: Tensor, mask: Tensor, truncated: Tensor
) -> dict[str, float]:
    """What is reported of a whole batch of experience, from advantages, the teachers' log-probabilities by field and
    the student's [B, S]: means over its rows [B] and over its tokens.

    `kl_to_teachers` is the k1 estimate -A, summed over each row's response; where there are several teachers that to
    each is told too.
    """
    num_rows, num_tokens = len(mask), mask.bool().sum().clamp(min=1)
    total = -advantages.double().sum()
    each = {}
    for role, field in TEACHER_LOGPROBS.items() if len(of_teachers) > 1 else ():
        if field in of_teachers:
            apart = torch.where(mask.bool(), logprobs - of_teachers[field], 0.0).double().sum()
            each[f"kl_to_{role}_per_token"] = float(apart / num_tokens)
    return {
        "kl_to_teachers": float(total / num_rows),
        KL_TO_TEACHERS: float(total / num_tokens),
        **each,
        "response_tokens": float(mask.bool().sum() / num_rows),
        "truncated_fraction": float(truncated.double().mean()),
    }
