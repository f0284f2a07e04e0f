"""On-policy distillation as its equations say: one process, float64, the modules of transformers, no plan.

    A_i = sum_k w_k log p_k(i) / sum_k w_k - log pi(i)

or, with the K likeliest tokens S of each teacher and all others together as one more outcome, the loss of a position

    sum_k w_k sum_{v in S, rest} pi(v) log(pi(v) / p_k(v)) / sum_k w_k    (reverse; forward: pi and p_k exchanged)

Beside rewards the advantages of GRPO are added to c A, or c times this loss to theirs. What it has in common with
algorithms without a critic is that of `tests.reference.critic_free`, and as there nothing is imported from the project.
Source: Lu et al., On-Policy Distillation, Thinking Machines Lab, 2025; GKD, arXiv:2306.13649.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tests.reference.critic_free import Compared, CriticFreeReference, CriticFreeSettings
from tests.reference.ppo import Row, Scorer, language_model, of_tokens, response_logits


class DistilledReference(CriticFreeReference):
    """A run from the directories of a student and of its teachers, with a reward model or a function that scores."""

    def __init__(
        self,
        student: Path,
        teachers: Sequence[Path],
        settings: CriticFreeSettings,
        reward: Path | Scorer | None = None,
    ) -> None:
        super().__init__(student, None, reward, settings)
        self.teachers = [language_model(path) for path in teachers]
        weights = settings.teacher_weights or (1.0,) * len(teachers)
        self._shares = [weight / sum(weights) for weight in weights]

    @torch.no_grad()
    def _experience(self, rows: Sequence[Row]) -> Compared:
        drawn, s = super()._experience(rows), self.settings
        logits = [response_logits(model, rows) for model in self.teachers]
        teachers = [
            [of_tokens(x, row, s, mask) for x, row, mask in zip(of_rows, rows, drawn.masks, strict=True)]
            for of_rows in logits
        ]
        if s.teacher_top_k is not None:
            zeros = [torch.zeros_like(student) for student in drawn.proximal]
            distributions = [[self._cut(x / s.temperature) for x in of_rows] for of_rows in logits]
            return replace(drawn, teachers=teachers, distributions=distributions, advantages=drawn.advantages or zeros)
        advantages = []
        for index, student in enumerate(drawn.proximal):
            log_p = torch.stack([share * said[index] for share, said in zip(self._shares, teachers, strict=True)])
            earned = drawn.advantages[index] if drawn.advantages else torch.zeros_like(student)
            advantages.append(earned + s.distillation_weight * (log_p.sum(0) - student))
        return replace(drawn, teachers=teachers, advantages=advantages)

    def _cut(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest tokens of logits [R, V], and the log-probabilities of these and of the rest."""
        log_p = logits.log_softmax(-1)
        assert self.settings.teacher_top_k is not None
        tokens = log_p.topk(self.settings.teacher_top_k).indices
        return tokens, with_rest(log_p, tokens)

    def _added_loss(self, log_p: Tensor, compared: Compared, chosen: Sequence[int]) -> tuple[Tensor, dict[str, float]]:
        if not compared.distributions:
            return super()._added_loss(log_p, compared, chosen)
        total, mass = torch.zeros(len(log_p), dtype=log_p.dtype), 0.0
        for share, of_rows in zip(self._shares, compared.distributions, strict=True):
            tokens, teacher = (torch.cat([of_rows[index][place] for index in chosen]) for place in (0, 1))
            student = with_rest(log_p, tokens)
            first, second = (student, teacher) if self.settings.divergence == "reverse" else (teacher, student)
            total = total + share * (first.exp() * (first - second)).sum(-1)
            mass += share * float((1 - teacher[:, -1].exp()).mean())
        metrics = {"distillation_loss": float(total.mean().detach()), "teacher_top_mass": mass}
        return self.settings.distillation_weight * total.mean(), metrics


def with_rest(log_p: Tensor, tokens: Tensor) -> Tensor:
    """The log-probabilities [N, k + 1] of tokens [N, k] and of all other tokens together, from those of all [N, V]."""
    rest = log_p.scatter(-1, tokens, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([log_p.gather(-1, tokens), rest], dim=-1)
