"""What each response is paid for its score, and which groups of samples were all paid alike.

A group is compared by what is paid, after scale, clip and penalties, and by one threshold wherever it is asked whether
its samples differ: advantages, `groups_with_signal` and dynamic sampling. A score is known to the rounding of float32,
and the sum of several terms to that of the largest of them, however small the sum is. All is computed in float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.planner.plan.critic_free_settings import CriticFreeSettings
from meshwright.planner.plan.learning_settings import PaidSettings

SAME_SHARE = 1e-5
"""Amounts that differ by no more than this share of their size are the same: some 80 units in the last place of
float32, which is what a forward pass and a sum of rewards are off by. A difference that a reward means is larger."""

SMALLEST_SIZE = torch.finfo(torch.float32).tiny
"""No amount is taken to be known better than the smallest float32 of full precision."""


class Paid(NamedTuple):
    """The amount that each response is paid, and the size of the largest term that it was made of: float64 [B] each."""

    amounts: Tensor
    sizes: Tensor


def pay(
    scores: Tensor,
    truncated: Tensor,
    settings: PaidSettings,
    *,
    sizes: Tensor | None = None,
    num_tokens: Tensor | None = None,
    max_response: int = 0,
) -> Paid:
    """What each response is paid, from its score [B], the size of that [B] and whether it was truncated [B].

    A response that ended is paid its score, times `reward_scale` and then held within `reward_clip` of zero. So is one
    that was truncated while `truncation` is terminal, unless the settings give a missing end a score of its own or a
    penalty (`missing_eos_penalty` of TRL), which are neither scaled nor clipped. With bootstrap it is paid 0: what it
    would have earned is left to the critic, and nothing is paid twice. A penalty for length, where the settings have
    one, is taken off all of them: `num_tokens` [B] are those behind the prompt, `max_response` the most there can be.
    """
    paid = scores.double() * settings.reward_scale
    paid_sizes = (scores if sizes is None else sizes).double().abs() * settings.reward_scale
    if settings.reward_clip is not None:
        paid_sizes = torch.where(paid.abs() > settings.reward_clip, settings.reward_clip, paid_sizes)
        paid = paid.clamp(-settings.reward_clip, settings.reward_clip)
    if not settings.pays_cut:
        cut = cut_sizes = torch.zeros_like(paid)
    elif settings.missing_end_score is not None:
        cut = torch.full_like(paid, settings.missing_end_score)
        cut_sizes = cut.abs()
    else:
        cut = paid - settings.missing_end_penalty
        cut_sizes = paid_sizes.clamp(min=settings.missing_end_penalty)
    is_cut = truncated.bool()
    amounts, sizes = torch.where(is_cut, cut, paid), torch.where(is_cut, cut_sizes, paid_sizes)
    if not isinstance(settings, CriticFreeSettings) or not settings.overlong_tokens:
        return Paid(amounts, sizes)
    assert num_tokens is not None, "a penalty for length needs lengths"
    penalties = overlong_penalties(num_tokens, max_response, settings)
    return Paid(amounts - penalties, torch.maximum(sizes, penalties))


def overlong_penalties(num_tokens: Tensor, max_response: int, settings: CriticFreeSettings) -> Tensor:
    """The amount taken off for length [B]: nothing up to `overlong_tokens` before the longest response, then in a line
    up to `overlong_penalty` at it (soft overlong punishment of DAPO, arXiv:2503.14476, section 3.4).

    `num_tokens` [B] and `max_response` count the same tokens, all behind the prompt: what a tool told fills a response
    as what was drawn does, and it is that whole which is truncated.
    """
    beyond = (num_tokens.double() - (max_response - settings.overlong_tokens)) / max(1, settings.overlong_tokens)
    return settings.overlong_penalty * beyond.clamp(0.0, 1.0)


def differ(amounts: Tensor, sizes: Tensor) -> Tensor:
    """Whether the samples of each group [P, N] were paid apart: bool [P].

    They were where the largest and the smallest amount differ by more than `SAME_SHARE` of the largest size. A number
    that is not finite differs from all others: it is not hidden, and ends the update that it would be part of.
    """
    spread = amounts.amax(1) - amounts.amin(1)
    return ~((spread <= SAME_SHARE * sizes.amax(1).clamp(min=SMALLEST_SIZE)) & spread.isfinite())


def groups_that_differ(paid: Paid, group_size: int) -> Tensor:
    """`differ` for groups that lie one behind the other: bool [B / group_size]."""
    return differ(*(values.view(-1, group_size) for values in paid))


def share_with_signal(paid: Paid, group_size: int) -> float:
    """The share of the groups whose samples were paid apart: the others teach nothing."""
    return float(groups_that_differ(paid, group_size).double().mean())
