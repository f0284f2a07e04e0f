"""On-policy distillation: a student is trained on its own samples with the log-probabilities of its teachers.

Shapes are those of `meshwright.runtime.training.advantages`. The reverse KL of a token is estimated on the sampled
token, and each token is credited with its own term only (Lu et al., On-Policy Distillation, Thinking Machines Lab,
2025; slime has the same estimate; GKD, arXiv:2306.13649, and MiniLLM, arXiv:2306.08543, minimise the same divergence):

    A_i = sum_k w_k log p_k(i) - log pi(i),    sum_k w_k = 1

The expectation of A over samples of pi is -sum_k w_k KL(pi || p_k): with several teachers p_k the student minimises the
weighted mean of its divergences from them, which is smallest where pi is proportional to prod_k p_k^w_k.

With `teacher_top_k` K the divergence is computed instead of estimated. Teacher k reports its K likeliest tokens S at
each position, and both distributions are cut to K + 1 outcomes: the tokens of S, and all others together with
probability 1 minus the sum over S. The loss of a position is

    D = sum_k w_k sum_{v in S, rest} pi(v) log(pi(v) / p_k(v))       reverse (GKD, table 1; on the student's samples)
    D = sum_k w_k sum_{v in S, rest} p_k(v) log(p_k(v) / pi(v))      forward

and the gradient of the current pi is exact. Merged outcomes never diverge more than the whole distributions do (the
data-processing inequality), and with K = V nothing is merged. NeMo-RL's distillation, which also sends the teacher's
top k, renormalises both over S instead (`zero_outside_topk: false`), which ignores how much the student leaves outside.
D has no importance weight: it is no expectation over the sampled token, and how stale samples change which prefixes
are seen is not corrected.

Beside rewards, with the weight c (`distillation_weight`) and the advantages G of GRPO (`advantages.relative_to_group`),
the advantages are G + c A (slime's --opd-kl-coef), and with whole distributions the loss is the surrogate of G plus c D
(a policy-gradient loss beside a distillation loss, as in verl).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.planner.job.algorithm_settings import Distill, Divergence
from meshwright.profiles.stages import (
    TEACHER_LOGPROBS,
    TEACHER_TOP_LOGPROBS,
    TEACHER_TOP_TOKENS,
    TEACHERS,
    TOTAL_SCORES,
    Role,
)
from meshwright.runtime.messages.experience import StepExperience
from meshwright.runtime.model.distributions import VocabShard, logprobs_of_tokens
from meshwright.runtime.records.version_gap import KL_TO_TEACHERS
from meshwright.runtime.training.losses import LossShare, MaskedMean


def distillation_advantages(
    teacher_logprobs: Sequence[Tensor], logprobs: Tensor, mask: Tensor, settings: Distill
) -> Tensor:
    """Advantages [B, S], zero outside the mask, from the log-probabilities [B, S] of each teacher and of the student
    before the update."""
    weights = settings.shares(len(teacher_logprobs))
    terms = [weight * (teacher - logprobs) for weight, teacher in zip(weights, teacher_logprobs, strict=True)]
    return torch.where(mask.bool(), torch.stack(terms).sum(0), 0.0)


def divergence(logprobs: Tensor, teacher_logprobs: Tensor, kind: Divergence) -> Tensor:
    """The divergence [...] of each position, from the log-probabilities [..., K + 1] of student and teacher."""
    difference = logprobs - teacher_logprobs
    if kind == "reverse":
        return (logprobs.exp() * difference).sum(-1)
    return -(teacher_logprobs.exp() * difference).sum(-1)


def predicts_response(batch: StepExperience, row: int) -> Tensor:
    """True [S] at the positions that predict a token of the row's response, tool tokens included."""
    chosen = torch.zeros(batch.length(row), dtype=torch.bool)
    chosen[batch.prompt_length(row) - 1 : -1] = True
    return chosen


def distributions_of_row(batch: StepExperience, role: Role, row: int) -> tuple[Tensor, Tensor]:
    """A teacher's tokens [S, K] int64 and their log-probabilities [S, K + 1]; both are zero outside the response."""
    chosen = predicts_response(batch, row)
    num_chosen, found = int(chosen.sum()), []
    for field in (TEACHER_TOP_TOKENS[role], TEACHER_TOP_LOGPROBS[role]):
        values = batch.experience.get(field, row).view(num_chosen, -1)
        found.append(values.new_zeros(len(chosen), values.shape[1]).masked_scatter_(chosen[:, None], values))
    tokens, logprobs = found
    return tokens.long(), logprobs


def distribution_loss(
    logits: Tensor,
    fields: Mapping[str, Tensor],
    *,
    group: dist.ProcessGroup,
    vocab_size: int,
    num_tokens: int,
    mean: MaskedMean,
    settings: Distill,
) -> LossShare:
    """A micro-batch's share of the loss D, from logits [T, 1, V / tp] and the fields [1, T, ...] of the teachers.

    The loss is weighted by `distillation_weight`; its metric is not. `teacher_top_mass` is the probability of the K
    tokens under a teacher, the mean over teachers by their weights.
    """
    roles = [role for role in TEACHERS if TEACHER_TOP_TOKENS[role] in fields]
    flat, mask = logits.flatten(0, 1), fields["mask"].bool()
    chosen = mask[0].nonzero().squeeze(-1)
    shard = VocabShard.of(flat, group, vocab_size, settings.temperature)
    total = flat.new_zeros(len(chosen), dtype=torch.float32)
    mass = flat.new_zeros(len(chosen), dtype=torch.float64)
    for role, share in zip(roles, settings.shares(len(roles)), strict=True):
        tokens, teacher = (fields[names[role]][0, chosen] for names in (TEACHER_TOP_TOKENS, TEACHER_TOP_LOGPROBS))
        student = logprobs_of_tokens(flat, chosen, tokens, shard)
        total = total + share * divergence(student, teacher, settings.divergence)
        mass = mass + share * -torch.expm1(teacher[:, -1].double())
    per_token = total.new_zeros(len(flat)).index_copy(0, chosen, total)[None]
    sums = {
        "distillation_loss": total.detach().double().sum() / num_tokens,
        "teacher_top_mass": mass.sum() / num_tokens,
    }
    return LossShare(settings.distillation_weight * mean.share(per_token, mask), sums)


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
