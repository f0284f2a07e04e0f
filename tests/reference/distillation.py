"""On-policy distillation as its equations say: one process, float64, the modules of transformers, no plan.

    A_i = sum_k w_k log p_k(i) / sum_k w_k - log pi(i)

What it has in common with algorithms without a critic is that of `tests.reference.critic_free`, and as there nothing is
imported from the project. Source: Lu et al., On-Policy Distillation, Thinking Machines Lab, 2025.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from tests.reference.critic_free import Compared, CriticFreeReference, CriticFreeSettings
from tests.reference.ppo import Row, language_model, of_tokens, response_logits


class DistilledReference(CriticFreeReference):
    """A run from the directories of a student and of its teachers."""

    def __init__(self, student: Path, teachers: Sequence[Path], settings: CriticFreeSettings) -> None:
        super().__init__(student, None, None, settings)
        self.teachers = [language_model(path) for path in teachers]

    @torch.no_grad()
    def _experience(self, rows: Sequence[Row]) -> Compared:
        drawn, s = super()._experience(rows), self.settings
        teachers = [
            [
                of_tokens(of_row, row, s, mask)
                for of_row, row, mask in zip(response_logits(model, rows), rows, drawn.masks, strict=True)
            ]
            for model in self.teachers
        ]
        weights = s.teacher_weights or (1.0,) * len(teachers)
        advantages = []
        for index, student in enumerate(drawn.proximal):
            log_p = torch.stack([weight * said[index] for weight, said in zip(weights, teachers, strict=True)])
            advantages.append(log_p.sum(0) / sum(weights) - student)
        return replace(drawn, teachers=teachers, advantages=advantages)
