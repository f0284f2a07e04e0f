"""A graph of three trained roles as its equations say: float64, the modules of transformers, no plan.

The actor learns from a reward above the mean of its group and is held near a reference, without a clip. A second policy
is distilled from a teacher on the actor's samples, with importance weights. A critic is regressed on the reward.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.reference.critic_free import CriticFreeSettings
from tests.reference.ppo import (
    Row,
    adamw,
    descend,
    language_model,
    of_tokens,
    picked,
    response_logits,
    sampled_logits,
    scalar_model,
    scalars,
    scores_of,
)

KL, ENTROPY = 0.05, 0.01


@dataclass(frozen=True)
class Learnt:
    """The losses of each update of a step, by role."""

    losses: dict[str, list[float]]
    advantages: list[Tensor]


class OwnGraphReference:
    """A run from five Hugging Face directories."""

    def __init__(self, directories: dict[str, Path], settings: CriticFreeSettings) -> None:
        self.settings = settings
        self.ref, self.teacher, self.reward = (
            language_model(directories["ref"]),
            language_model(directories["teacher"]),
            scalar_model(directories["reward"]),
        )
        self.trained: dict[str, nn.Module] = {
            "actor": language_model(directories["actor"]),
            "teacher_2": language_model(directories["teacher_2"]),
            "critic": scalar_model(directories["critic"]),
        }
        self._adams = {
            role: adamw(model, settings.actor_learning_rate, settings) for role, model in self.trained.items()
        }
        self._policies = [copy.deepcopy(self.trained["actor"])]

    def step(self, step: int, rows: Sequence[Row]) -> Learnt:
        """Experience, then the updates of all minibatches of all epochs, role by role."""
        s = self.settings
        with torch.no_grad():
            behaviour = self._logprobs([sampled_logits(self._policies, row) for row in rows], rows)
            actor, second, ref, teacher = (
                self._logprobs(response_logits(model, rows), rows)
                for model in (self.trained["actor"], self.trained["teacher_2"], self.ref, self.teacher)
            )
            scores = torch.stack(scores_of(self.reward, rows))
        above = scores.view(-1, s.group_size) - scores.view(-1, s.group_size).mean(1, keepdim=True)
        advantages = [above.view(-1)[index] - KL * (actor[index] - ref[index]) for index in range(len(rows))]
        distances = [of_teacher - own for of_teacher, own in zip(teacher, second, strict=True)]
        weights = [(own - mu).exp().clamp(max=s.importance_cap) for own, mu in zip(second, behaviour, strict=True)]
        losses: dict[str, list[float]] = {role: [] for role in self.trained}
        for epoch in range(s.num_epochs):
            order = list(range(len(rows)))
            random.Random(f"{s.seed}/{step}/{epoch}").shuffle(order)
            size = len(rows) // s.num_minibatches
            for first in range(0, len(rows), size):
                chosen = order[first : first + size]
                some = [rows[index] for index in chosen]
                log_pi, entropy = self._policy("actor", some)
                ratio = (log_pi - picked(actor, chosen)).exp()
                loss = -(ratio * picked(advantages, chosen)) - ENTROPY * entropy
                self._descend("actor", loss.mean(), losses)
                log_pi, entropy = self._policy("teacher_2", some)
                ratio, of_teacher = (log_pi - picked(second, chosen)).exp(), picked(distances, chosen)
                clipped = ratio.clamp(1 - s.clip_ratio, 1 + s.clip_ratio)
                surrogate = picked(weights, chosen) * torch.minimum(ratio * of_teacher, clipped * of_teacher)
                self._descend("teacher_2", -surrogate.mean(), losses)
                values = [v[:-1] for v in scalars(self.trained["critic"], some)]
                errors = [v - scores[index] for v, index in zip(values, chosen, strict=True)]
                self._descend("critic", 0.5 * torch.cat(errors).square().mean(), losses)
        self._policies.append(copy.deepcopy(self.trained["actor"]))
        return Learnt(losses, advantages)

    def _logprobs(self, logits: Sequence[Tensor], rows: Sequence[Row]) -> list[Tensor]:
        return [of_tokens(of_row, row, self.settings) for of_row, row in zip(logits, rows, strict=True)]

    def _policy(self, role: str, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the tokens of these rows."""
        logits = torch.cat(response_logits(self.trained[role], rows)) / self.settings.temperature
        log_p = logits.log_softmax(-1)
        chosen = torch.cat([row.response for row in rows])
        return log_p.gather(-1, chosen[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    def _descend(self, role: str, loss: Tensor, losses: dict[str, list[float]]) -> None:
        descend(self.trained[role], self._adams[role], loss, self.settings)
        losses[role].append(float(loss.detach()))
