"""Advantages of algorithms without a critic: a response is compared with the other samples of its prompt or its step.

These are pure functions of tensors, with the shapes of `meshwright.runtime.training.advantages`. The rows of a batch
are the groups of its prompts in order, so [B] is [prompts, group_size]. Every rank has the whole batch and computes the
same numbers, so no layout changes what a sample is compared with.

A group whose samples all have the same reward, by `payments.differ`, gets exactly 0 from every comparison here, so
rounding errors are never divided by a deviation that is only rounding itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.planner.plan.critic_free_settings import GRPO, RLOO, CriticFreeSettings, Reinforce
from meshwright.runtime.training.advantages import generalized_advantages, token_rewards, whiten
from meshwright.runtime.training.payments import ResponseRewards, groups_that_differ


def critic_free_advantages(
    *,
    response_rewards: ResponseRewards,
    logprobs: Tensor,
    ref_logprobs: Tensor | None,
    mask: Tensor,
    settings: CriticFreeSettings,
    group_size: int,
) -> Tensor:
    """Advantages [B, S] of a whole batch, zero outside the mask.

    `paid` are the rewards of its rows from `payments.pay`; `logprobs` and `ref_logprobs` [B, S] are those of the policy
    before the update and of the reference, if there is one.
    """
    if isinstance(settings, GRPO):
        advantages = relative_to_group(
            response_rewards.amounts, group_size, by_std=settings.normalise_by_std, sizes=response_rewards.sizes
        )
        return _per_token(advantages, mask, logprobs.dtype)
    beta = 0.0 if ref_logprobs is None else settings.kl_coefficient
    policy = logprobs.double()
    reference = policy if ref_logprobs is None else ref_logprobs.double()
    if isinstance(settings, RLOO):
        penalties = token_rewards(
            torch.zeros_like(response_rewards.amounts), policy, reference, mask, kl_coefficient=beta
        ).sum(1)
        advantages = leave_one_out(response_rewards.amounts, group_size, sizes=response_rewards.sizes) + leave_one_out(
            penalties, group_size
        )
        return _per_token(advantages, mask, logprobs.dtype)
    assert isinstance(settings, Reinforce)
    amounts = response_rewards.amounts
    if settings.group_baseline:
        amounts = relative_to_group(amounts, group_size, by_std=False, sizes=response_rewards.sizes)
    rewards = token_rewards(amounts, policy, reference, mask, kl_coefficient=beta)
    return whiten(returns_to_go(rewards, mask), mask, size=float(response_rewards.sizes.max())).to(logprobs.dtype)


def relative_to_group(amounts: Tensor, group_size: int, *, by_std: bool, sizes: Tensor | None = None) -> Tensor:
    """Each sample's reward minus the mean of its group, float64 [B]; with `by_std` divided by the group's sample
    standard deviation (GRPO, arXiv:2402.03300, section 4.1.2; without it Dr. GRPO, arXiv:2503.20783, section 3.2).

    `sizes` [B] are those of `payments.Paid`, by default the absolute amounts. No epsilon is added to the deviation: a
    group for which it would matter has no differing samples, and gets 0.
    """
    groups = amounts.double().view(-1, group_size)
    differences = groups - groups.mean(1, keepdim=True)
    if by_std:
        differences = differences / groups.std(1, keepdim=True)
    return _zero_if_equal(differences, amounts, sizes)


def leave_one_out(rewards: Tensor, group_size: int, *, sizes: Tensor | None = None) -> Tensor:
    """Each sample's reward minus the mean of the other samples of its group, float64 [B] (RLOO, arXiv:2402.14740; Kool
    et al., Buy 4 REINFORCE samples, get a baseline for free, 2019). `sizes` [B] are as in `relative_to_group`."""
    groups = rewards.double().view(-1, group_size)
    baselines = (groups.sum(1, keepdim=True) - groups) / (group_size - 1)
    return _zero_if_equal(groups - baselines, rewards, sizes)


def _zero_if_equal(differences: Tensor, amounts: Tensor, sizes: Tensor | None) -> Tensor:
    """The differences [P, N] as [B], exactly 0 for groups whose samples all have the same reward."""
    paid = ResponseRewards(amounts.double(), (amounts if sizes is None else sizes).double().abs())
    return torch.where(groups_that_differ(paid, differences.shape[1])[:, None], differences, 0.0).reshape(-1)


def returns_to_go(rewards: Tensor, mask: Tensor) -> Tensor:
    """The sum of each token's reward and of the rewards after it [B, S] (REINFORCE++, arXiv:2501.03262)."""
    values = torch.zeros_like(rewards)
    return generalized_advantages(rewards, values, mask, torch.zeros(len(rewards)), gamma=1.0, gae_lambda=1.0)


def _per_token(row_values: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Each row's value [B] at all of its response tokens, [B, S]."""
    return torch.where(mask.bool(), row_values[:, None], 0.0).to(dtype)
