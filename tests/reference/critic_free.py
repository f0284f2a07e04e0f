"""GRPO, RLOO and REINFORCE++ as their equations say: one process, float64, the modules of transformers, no plan.

What these have in common with PPO is that of `tests.reference.ppo`, and as there nothing is imported from the project.
Sources: GRPO arXiv:2402.03300, Dr. GRPO arXiv:2503.20783, DAPO arXiv:2503.14476, RLOO arXiv:2402.14740, REINFORCE++
arXiv:2501.03262.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.reference.ppo import (
    Row,
    Scorer,
    adamw,
    descend,
    entropy_of,
    explains,
    language_model,
    log_policy,
    masks_of,
    of_tokens,
    picked,
    response_logits,
    sampled_logits,
    scalar_model,
    scores_of,
    truncated,
    whitened,
)


@dataclass(frozen=True, kw_only=True)
class CriticFreeSettings:
    """Of a job, under the names that a job gives them."""

    algorithm: str
    group_size: int
    num_minibatches: int
    num_epochs: int
    max_response: int
    end_tokens: frozenset[int]
    decoupled: bool
    actor_learning_rate: float
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    weight_decay: float
    max_grad_norm: float
    clip_ratio: float
    entropy_coefficient: float
    importance_cap: float
    temperature: float
    top_k: int
    top_p: float
    seed: int
    clip_ratio_high: float | None = None
    loss_mean: str = "token"
    overlong_tokens: int = 0
    overlong_penalty: float = 0.0
    kl_coefficient: float = 0.0
    missing_end_penalty: float = 0.0
    missing_end_score: float | None = None
    reward_scale: float = 1.0
    reward_clip: float | None = None
    teacher_weights: tuple[float, ...] = ()
    normalise_by_std: bool = False
    group_baseline: bool = False
    old_logprobs: str = "recompute"
    kept_tokens: int = 0
    teacher_top_k: int | None = None
    divergence: str = "reverse"
    distillation_weight: float = 1.0


@dataclass(frozen=True)
class Compared:
    """What a step computes, row by row, and the metrics of each of its updates."""

    cut: list[bool]
    scores: list[Tensor]
    behaviour: list[Tensor]
    proximal: list[Tensor]
    ref: list[Tensor] | None
    advantages: list[Tensor]
    weights: list[Tensor]
    draws_explained: float
    minibatches: list[list[int]]
    masks: list[Tensor | None] = field(default_factory=list)
    teachers: list[list[Tensor]] = field(default_factory=list)
    distributions: list[list[tuple[Tensor, Tensor]]] = field(default_factory=list)
    """Of each teacher and row, the likeliest tokens [R, k] and their log-probabilities with that of the rest
    [R, k + 1]."""
    actor_updates: list[dict[str, float]] = field(default_factory=list)


class CriticFreeReference:
    """A run from two or three Hugging Face directories."""

    def __init__(
        self, actor: Path, ref: Path | None, reward: Path | Scorer | None, settings: CriticFreeSettings
    ) -> None:
        self.settings = settings
        self.ref = None if ref is None else language_model(ref)
        self.reward = scalar_model(reward) if isinstance(reward, Path) else reward
        self.start_from(language_model(actor))

    def start_from(self, actor: nn.Module) -> None:
        """Trains this actor from the first step on."""
        self.actor = actor
        self._adam = adamw(actor, self.settings.actor_learning_rate, self.settings)
        self._policies = [copy.deepcopy(actor)]

    def step(self, step: int, rows: Sequence[Row]) -> Compared:
        """Experience, then the updates of all minibatches of all epochs."""
        compared = self._experience(rows)
        for epoch in range(self.settings.num_epochs):
            order = list(range(len(rows)))
            random.Random(f"{self.settings.seed}/{step}/{epoch}").shuffle(order)
            size = len(rows) // self.settings.num_minibatches
            compared.minibatches.extend([order[first : first + size] for first in range(0, len(rows), size)])
        for chosen in compared.minibatches:
            compared.actor_updates.append(self._update(rows, compared, chosen))
        self._policies.append(copy.deepcopy(self.actor))
        return compared

    @torch.no_grad()
    def _experience(self, rows: Sequence[Row]) -> Compared:
        s = self.settings
        cut = [row.is_cut(s) for row in rows]
        drawn_from = [sampled_logits(self._policies, row) for row in rows]
        masks = masks_of(drawn_from, s)
        behaviour, proximal = (
            [of_tokens(of_row, row, s, mask) for of_row, row, mask in zip(logits, rows, masks, strict=True)]
            for logits in (drawn_from, response_logits(self.actor, rows))
        )
        ref = None
        if self.ref is not None:
            of_rows = zip(response_logits(self.ref, rows), rows, masks, strict=True)
            ref = [of_tokens(of_row, row, s, mask) for of_row, row, mask in of_rows]
        scores = [] if self.reward is None else scores_of(self.reward, rows)
        if s.old_logprobs == "generator":
            proximal = behaviour
        ratios = [(pi - mu).exp().clamp(max=s.importance_cap) for pi, mu in zip(proximal, behaviour, strict=True)]
        explained = torch.cat([explains(logits, row, s) for logits, row in zip(drawn_from, rows, strict=True)])
        paid = [paid_for(score, row, s) for score, row in zip(scores, rows if scores else (), strict=True)]
        return Compared(
            cut=cut,
            scores=scores,
            behaviour=behaviour,
            proximal=proximal,
            ref=ref,
            advantages=self._advantages(paid, proximal, ref),
            weights=ratios if s.decoupled else [torch.ones_like(ratio) for ratio in ratios],
            draws_explained=float(explained.double().mean()),
            minibatches=[],
            masks=masks,
        )

    def _advantages(
        self, paid: Sequence[Tensor], proximal: Sequence[Tensor], ref: Sequence[Tensor] | None
    ) -> list[Tensor]:
        s, penalties = self.settings, [torch.zeros_like(pi) for pi in proximal]
        if ref is not None:
            penalties = [-s.kl_coefficient * (pi - of_ref) for pi, of_ref in zip(proximal, ref, strict=True)]
        found: list[Tensor] = []
        for first in range(0, len(paid), s.group_size):
            group = range(first, first + s.group_size)
            of_group = torch.stack([paid[index] for index in group])
            for index in group:
                if s.algorithm in ("grpo", "distill"):
                    apart = torch.zeros_like(paid[index]) if are_alike(of_group) else paid[index] - of_group.mean()
                    by = of_group.std() if s.normalise_by_std and not are_alike(of_group) else 1.0
                    found.append((apart / by).expand(len(proximal[index])))
                elif s.algorithm == "rloo":
                    earned = {other: paid[other] + penalties[other].sum() for other in group}
                    others = [value for other, value in earned.items() if other != index]
                    found.append((earned[index] - torch.stack(others).mean()).expand(len(proximal[index])))
                else:
                    rewards = penalties[index].clone()
                    rewards[-1] += paid[index] - (of_group.mean() if s.group_baseline else 0.0)
                    found.append(torch.stack([rewards[place:].sum() for place in range(len(rewards))]))
        return whitened(found) if s.algorithm == "reinforce++" else found

    def _update(self, rows: Sequence[Row], compared: Compared, chosen: Sequence[int]) -> dict[str, float]:
        s, some = self.settings, [rows[index] for index in chosen]
        masks = [compared.masks[index] for index in chosen]
        of_rows = zip(response_logits(self.actor, some), masks, strict=True)
        log_p = torch.cat([log_policy(logits, s, mask) for logits, mask in of_rows])
        entropy = entropy_of(log_p)
        log_pi = log_p.gather(-1, torch.cat([row.response for row in some])[:, None])[:, 0]
        old, advantages, weights = (
            picked(x, chosen) for x in (compared.proximal, compared.advantages, compared.weights)
        )
        ratio, high = (log_pi - old).exp(), s.clip_ratio if s.clip_ratio_high is None else s.clip_ratio_high
        held = truncated(log_pi, old, s)
        surrogate = weights * torch.minimum(held * advantages, held.clamp(1 - s.clip_ratio, 1 + high) * advantages)
        lengths = [len(row.response) for row in some]
        policy_loss = -self._mean(surrogate, lengths)
        loss = policy_loss - s.entropy_coefficient * self._mean(entropy, lengths)
        known = {}
        if s.algorithm == "grpo" and compared.ref is not None:
            apart = picked(compared.ref, chosen) - log_pi
            estimate = apart.exp() - apart - 1
            loss = loss + s.kl_coefficient * self._mean(estimate, lengths)
            known["kl_to_ref_estimate"] = float(estimate.mean().detach())
        added, metrics = self._added_loss(log_p, compared, chosen)
        known |= metrics
        grad_norm = descend(self.actor, self._adam, loss + added, s)
        return {
            "policy_loss": float(policy_loss.detach()),
            "entropy": float(entropy.mean().detach()),
            "ratio": float(ratio.mean().detach()),
            "grad_norm": grad_norm,
            **known,
        }

    def _added_loss(self, log_p: Tensor, compared: Compared, chosen: Sequence[int]) -> tuple[Tensor, dict[str, float]]:
        """A further loss, from the log-probabilities [N, V] of the chosen rows one after the other, and its metrics."""
        del compared, chosen
        return log_p.new_zeros(()), {}

    def _mean(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """Over tokens (DAPO), over responses of their means (GRPO), or over as many as there could be (Dr. GRPO)."""
        if self.settings.loss_mean == "token":
            return x.mean()
        of_rows = x.split(list(lengths))
        if self.settings.loss_mean == "sequence":
            return torch.stack([of_row.mean() for of_row in of_rows]).mean()
        return x.sum() / (len(lengths) * self.settings.max_response)


def paid_for(score: Tensor, row: Row, s: CriticFreeSettings) -> Tensor:
    """The score, scaled and clipped, less what a missing end and what length cost: DAPO, section 3.4."""
    paid = score * s.reward_scale
    if s.reward_clip is not None:
        paid = paid.clamp(-s.reward_clip, s.reward_clip)
    if row.is_cut(s):
        paid = (
            paid - s.missing_end_penalty if s.missing_end_score is None else torch.full_like(paid, s.missing_end_score)
        )
    if s.overlong_tokens:
        into = len(row.response) - (s.max_response - s.overlong_tokens)
        paid = paid - s.overlong_penalty * max(0.0, into / s.overlong_tokens)
    return paid


def are_alike(paid: Tensor) -> bool:
    """Whether the samples of a group [N] were all paid the same: GRPO's advantages are 0 / 0 there, and stand for 0.

    Samples that a run knows in float32 only are the same where they differ by less than its rounding.
    """
    return bool(paid.max() - paid.min() <= 1e-5 * paid.abs().max())
