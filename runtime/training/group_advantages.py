"""Advantages of algorithms without a critic: a response is judged by the other samples of its prompt or its step.

Pure functions of tensors, with the shapes of `meshwright.runtime.training.advantages`. The rows of a batch are its
prompts' groups, one behind the other, so that [B] is [prompts, group_size]. Every rank has the whole batch and computes
the same, so that no layout changes what a sample is compared with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.planner.plan.critic_free_settings import GRPO, RLOO, CriticFreeSettings, Reinforce
from meshwright.runtime.training.advantages import generalized_advantages, paid_scores, token_rewards, whiten

_STD_FLOOR = 1e-6
"""Added to the deviation of a group, whose samples may all have one score."""


def critic_free_advantages(
    *,
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor | None,
    mask: Tensor,
    truncated: Tensor,
    settings: CriticFreeSettings,
    group_size: int,
    max_response: int,
) -> Tensor:
    """Advantages [B, S] of a whole batch, zero outside the mask.

    `scores` [B] are the reward model's, `logprobs` and `ref_logprobs` [B, S] those of the policy before the update and
    of the reference, where there is one. `max_response` is the most tokens of a response.
    """
    paid = paid_scores(scores, truncated, settings) - overlong_penalties(mask.sum(1), max_response, settings)
    if isinstance(settings, GRPO):
        return _of_tokens(relative_to_group(paid, group_size, by_std=settings.normalise_by_std), mask)
    if isinstance(settings, Reinforce) and settings.group_baseline:
        paid = relative_to_group(paid, group_size, by_std=False)
    beta = 0.0 if ref_logprobs is None else settings.kl_coefficient
    kept_to = logprobs if ref_logprobs is None else ref_logprobs
    rewards = token_rewards(paid, logprobs, kept_to, mask, kl_coefficient=beta)
    if isinstance(settings, RLOO):
        return _of_tokens(leave_one_out(rewards.sum(1), group_size), mask)
    assert isinstance(settings, Reinforce)
    return whiten(returns_to_go(rewards, mask), mask)


def relative_to_group(paid: Tensor, group_size: int, *, by_std: bool) -> Tensor:
    """What each sample was paid beyond the mean of its group [B], over the group's sample deviation where that is asked
    (GRPO, arXiv:2402.03300, section 4.1.2; without, Dr. GRPO, arXiv:2503.20783, section 3.2)."""
    groups = paid.view(-1, group_size)
    apart = groups - groups.mean(1, keepdim=True)
    if by_std:
        apart = apart / (groups.std(1, keepdim=True) + _STD_FLOOR)
    return apart.reshape(-1)


def leave_one_out(rewards: Tensor, group_size: int) -> Tensor:
    """What each sample earned beyond the mean of the others of its group [B] (RLOO, arXiv:2402.14740;
    Kool et al., Buy 4 REINFORCE samples, get a baseline for free, 2019)."""
    groups = rewards.view(-1, group_size)
    others = (groups.sum(1, keepdim=True) - groups) / (group_size - 1)
    return (groups - others).reshape(-1)


def returns_to_go(rewards: Tensor, mask: Tensor) -> Tensor:
    """The sum of each token's reward and of those behind it [B, S] (REINFORCE++, arXiv:2501.03262)."""
    nothing = torch.zeros_like(rewards)
    return generalized_advantages(rewards, nothing, mask, torch.zeros(len(rewards)), gamma=1.0, gae_lambda=1.0)


def overlong_penalties(num_tokens: Tensor, max_response: int, settings: CriticFreeSettings) -> Tensor:
    """What is taken off for length [B]: nothing up to `overlong_tokens` before the longest response, then in a line up
    to `overlong_penalty` at it (soft overlong punishment of DAPO, arXiv:2503.14476, section 3.4)."""
    if not settings.overlong_tokens:
        return torch.zeros(len(num_tokens))
    beyond = (num_tokens - (max_response - settings.overlong_tokens)) / settings.overlong_tokens
    return settings.overlong_penalty * beyond.clamp(0.0, 1.0)


def share_with_signal(scores: Tensor, group_size: int) -> float:
    """Of groups, those whose samples have different scores [B]: the others teach nothing."""
    groups = scores.view(-1, group_size)
    return float((groups.max(1).values > groups.min(1).values).double().mean())


def _of_tokens(of_rows: Tensor, mask: Tensor) -> Tensor:
    """A row's number at each of its response tokens [B, S]."""
    return torch.where(mask.bool(), of_rows[:, None], 0.0)
