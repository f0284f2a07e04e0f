"""Advantages of algorithms without a critic: a response is judged by the other samples of its prompt or its step.

Pure functions of tensors, with the shapes of `meshwright.runtime.training.advantages`. The rows of a batch are its
prompts' groups, one behind the other, so that [B] is [prompts, group_size]. Every rank has the whole batch and computes
the same, so that no layout changes what a sample is compared with.

A group whose samples were all paid alike, as `payments.differ` says, has exactly 0 from every comparison here: neither
an ulp of its mean nor the rounding of its scores is divided by a deviation that is as small.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.planner.plan.critic_free_settings import GRPO, RLOO, CriticFreeSettings, Reinforce
from meshwright.runtime.training.advantages import generalized_advantages, token_rewards, whiten
from meshwright.runtime.training.payments import Paid, groups_that_differ


def critic_free_advantages(
    *,
    paid: Paid,
    logprobs: Tensor,
    ref_logprobs: Tensor | None,
    mask: Tensor,
    settings: CriticFreeSettings,
    group_size: int,
) -> Tensor:
    """Advantages [B, S] of a whole batch, zero outside the mask.

    `paid` is what `payments.pay` says of its rows, `logprobs` and `ref_logprobs` [B, S] are those of the policy before
    the update and of the reference, where there is one.
    """
    if isinstance(settings, GRPO):
        apart = relative_to_group(paid.amounts, group_size, by_std=settings.normalise_by_std, sizes=paid.sizes)
        return _of_tokens(apart, mask, logprobs.dtype)
    beta = 0.0 if ref_logprobs is None else settings.kl_coefficient
    own = logprobs.double()
    kept_to = own if ref_logprobs is None else ref_logprobs.double()
    if isinstance(settings, RLOO):
        charged = token_rewards(torch.zeros_like(paid.amounts), own, kept_to, mask, kl_coefficient=beta).sum(1)
        earned = leave_one_out(paid.amounts, group_size, sizes=paid.sizes) + leave_one_out(charged, group_size)
        return _of_tokens(earned, mask, logprobs.dtype)
    assert isinstance(settings, Reinforce)
    amounts = paid.amounts
    if settings.group_baseline:
        amounts = relative_to_group(amounts, group_size, by_std=False, sizes=paid.sizes)
    rewards = token_rewards(amounts, own, kept_to, mask, kl_coefficient=beta)
    return whiten(returns_to_go(rewards, mask), mask, size=float(paid.sizes.max())).to(logprobs.dtype)


def relative_to_group(amounts: Tensor, group_size: int, *, by_std: bool, sizes: Tensor | None = None) -> Tensor:
    """The distance of what each sample was paid to the mean of its group, float64 [B], over the group's sample
    deviation with `by_std` (GRPO, arXiv:2402.03300, section 4.1.2; without, Dr. GRPO, arXiv:2503.20783, section 3.2).

    `sizes` [B] are those of `payments.Paid`, by default those of the amounts. Nothing is added to the deviation: a
    group that has one so small that it had to be is one whose samples do not differ, and has 0.
    """
    groups = amounts.double().view(-1, group_size)
    apart = groups - groups.mean(1, keepdim=True)
    if by_std:
        apart = apart / groups.std(1, keepdim=True)
    return _where_they_differ(apart, amounts, sizes)


def leave_one_out(rewards: Tensor, group_size: int, *, sizes: Tensor | None = None) -> Tensor:
    """The distance of what each sample earned to the mean of the others of its group, float64 [B] (RLOO,
    arXiv:2402.14740; Kool et al., Buy 4 REINFORCE samples, get a baseline for free, 2019). `sizes` are as above."""
    groups = rewards.double().view(-1, group_size)
    others = (groups.sum(1, keepdim=True) - groups) / (group_size - 1)
    return _where_they_differ(groups - others, rewards, sizes)


def _where_they_differ(found: Tensor, amounts: Tensor, sizes: Tensor | None) -> Tensor:
    """What was found for groups [P, N], as [B]: exactly 0 for those that were paid alike."""
    paid = Paid(amounts.double(), (amounts if sizes is None else sizes).double().abs())
    return torch.where(groups_that_differ(paid, found.shape[1])[:, None], found, 0.0).reshape(-1)


def returns_to_go(rewards: Tensor, mask: Tensor) -> Tensor:
    """The sum of each token's reward and of those behind it [B, S] (REINFORCE++, arXiv:2501.03262)."""
    nothing = torch.zeros_like(rewards)
    return generalized_advantages(rewards, nothing, mask, torch.zeros(len(rewards)), gamma=1.0, gae_lambda=1.0)


def _of_tokens(of_rows: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A row's number at each of its response tokens [B, S]."""
    return torch.where(mask.bool(), of_rows[:, None], 0.0).to(dtype)
