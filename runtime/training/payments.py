"""The reward of each response from its score, and which groups of samples all have the same reward.

Samples of a group are compared by their rewards after scale, clip and penalties, with one threshold for advantages,
`groups_with_signal` and dynamic sampling. A score is exact up to the rounding of float32, and a sum of several terms up
to that of the largest term, however small the sum is. All is computed in float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.planner.plan.critic_free_settings import CriticFreeSettings
from meshwright.planner.plan.learning_settings import RewardedSettings

RELATIVE_TOLERANCE = 1e-5
"""Amounts that differ by at most this share of their size are equal: about 80 units in the last place of float32, the
rounding error of a forward pass and a sum of rewards. A difference that a reward function intends is larger."""

SMALLEST_SIZE = torch.finfo(torch.float32).tiny
"""Lower bound on the size of an amount: the smallest normal float32."""


class ResponseRewards(NamedTuple):
    """The reward of each response, and the size of the largest term that it was computed from: float64 [B] each."""

    amounts: Tensor
    sizes: Tensor


def compute_rewards(
    scores: Tensor,
    truncated: Tensor,
    settings: RewardedSettings,
    *,
    sizes: Tensor | None = None,
    num_tokens: Tensor | None = None,
    max_response: int = 0,
) -> ResponseRewards:
    """The reward of each response, from its score [B], the size of the score [B] and if it was truncated [B].

    The reward of a complete response is its score, times `reward_scale` and then clipped to +-`reward_clip`. With
    terminal `truncation` a truncated response gets the same, unless the settings have a score or a penalty for a
    missing end (`missing_eos_penalty` of TRL), which are neither scaled nor clipped. With bootstrap it gets 0: its
    return is estimated by the critic. A penalty for length, if the settings have one, is subtracted from all rewards;
    `num_tokens` [B] are the tokens after the prompt, and `max_response` is their maximum.
    """
    ended = scores.double() * settings.reward_scale
    ended_sizes = (scores if sizes is None else sizes).double().abs() * settings.reward_scale
    if settings.reward_clip is not None:
        ended_sizes = torch.where(ended.abs() > settings.reward_clip, settings.reward_clip, ended_sizes)
        ended = ended.clamp(-settings.reward_clip, settings.reward_clip)
    if not settings.rewards_truncated:
        unended = unended_sizes = torch.zeros_like(ended)
    elif settings.missing_end_score is not None:
        unended = torch.full_like(ended, settings.missing_end_score)
        unended_sizes = unended.abs()
    else:
        unended = ended - settings.missing_end_penalty
        unended_sizes = ended_sizes.clamp(min=settings.missing_end_penalty)
    is_truncated = truncated.bool()
    amounts, sizes = (
        torch.where(is_truncated, unended, ended),
        torch.where(is_truncated, unended_sizes, ended_sizes),
    )
    if not isinstance(settings, CriticFreeSettings) or not settings.overlong_tokens:
        return ResponseRewards(amounts, sizes)
    assert num_tokens is not None, "a penalty for length needs lengths"
    penalties = overlong_penalties(num_tokens, max_response, settings)
    return ResponseRewards(amounts - penalties, torch.maximum(sizes, penalties))


def overlong_penalties(num_tokens: Tensor, max_response: int, settings: CriticFreeSettings) -> Tensor:
    """The penalty for length [B]: 0 up to `overlong_tokens` before the longest response, then rising linearly to
    `overlong_penalty` at it (soft overlong punishment of DAPO, arXiv:2503.14476, section 3.4).

    `num_tokens` [B] and `max_response` count all tokens after the prompt, tool tokens included, since the length limit
    applies to both.
    """
    beyond = (num_tokens.double() - (max_response - settings.overlong_tokens)) / max(1, settings.overlong_tokens)
    return settings.overlong_penalty * beyond.clamp(0.0, 1.0)


def differ(amounts: Tensor, sizes: Tensor) -> Tensor:
    """True [P] for groups [P, N] whose samples have different rewards.

    That is if the largest and the smallest amount differ by more than `SAME_SHARE` of the largest size. An amount that
    is not finite always differs, so that it is not hidden and the update is skipped.
    """
    spread = amounts.amax(1) - amounts.amin(1)
    return ~((spread <= RELATIVE_TOLERANCE * sizes.amax(1).clamp(min=SMALLEST_SIZE)) & spread.isfinite())


def groups_that_differ(paid: ResponseRewards, group_size: int) -> Tensor:
    """`differ` for rows [B] that are consecutive groups: bool [B / group_size]."""
    return differ(*(values.view(-1, group_size) for values in paid))


def share_with_signal(paid: ResponseRewards, group_size: int) -> float:
    """The share of groups whose samples have different rewards; other groups have no advantage to learn from."""
    return float(groups_that_differ(paid, group_size).double().mean())
