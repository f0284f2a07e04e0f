"""Rewards and advantages from scores: scale, clip and penalties, GAE and whitening, and baselines from groups.

These are pure functions of tensors that know no model, process or layout. A batch is right-padded, [B, S], and
index i of every per-token array concerns the prediction of token i + 1: `logprobs[i] = log p(token[i+1] |
token[..i])`, `values[i]` is the critic's output after token i, and `mask[i]` is true if token i + 1 belongs to the
response (its end-of-sequence token included). A row's response is one contiguous run of tokens, interrupted only by
tool tokens; the last column is never part of it. Entries outside the mask, NaN and infinity included, do not change a
single bit of a result. The rows of a batch are the groups of its prompts in order, so [B] is [prompts, group_size]. A
group whose samples all have the same reward, by `differ`, gets exactly 0 from every comparison.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.planner.job.algorithm_settings import GRPO, RLOO, CriticFreeSettings, Reinforce, RewardedSettings
from meshwright.profiles.stages import TOOL_TOKEN_VERSION

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
    """The reward of each response, from its score [B], the size of the score [B] and whether it was truncated [B].

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
    """The penalty for length [B]: 0 up to `overlong_tokens` before the length limit `max_response`, then rising
    linearly to `overlong_penalty` at the limit (soft overlong punishment of DAPO, arXiv:2503.14476, section 3.4).

    `num_tokens` [B] and `max_response` count all tokens after the prompt, tool tokens included, since the length limit
    applies to both.
    """
    beyond = (num_tokens.double() - (max_response - settings.overlong_tokens)) / max(1, settings.overlong_tokens)
    return settings.overlong_penalty * beyond.clamp(0.0, 1.0)


def differ(amounts: Tensor, sizes: Tensor) -> Tensor:
    """True [P] for groups [P, N] whose samples have different rewards.

    They do if the largest and the smallest amount differ by more than `RELATIVE_TOLERANCE` of the largest size. An
    amount that is not finite always differs, so that it is not hidden and the update is skipped.
    """
    spread = amounts.amax(1) - amounts.amin(1)
    return ~((spread <= RELATIVE_TOLERANCE * sizes.amax(1).clamp(min=SMALLEST_SIZE)) & spread.isfinite())


def groups_that_differ(paid: ResponseRewards, group_size: int) -> Tensor:
    """`differ` for rows [B] that are consecutive groups: bool [B / group_size]."""
    return differ(*(values.view(-1, group_size) for values in paid))


def share_with_signal(paid: ResponseRewards, group_size: int) -> float:
    """The share of groups whose samples have different rewards; other groups have no advantage to learn from."""
    return float(groups_that_differ(paid, group_size).double().mean())


_VARIANCE_FLOOR = 1e-8
"""Added to the variance, as `masked_whiten` of TRL and verl does."""


def response_mask(prompt_lengths: Tensor, response_lengths: Tensor, width: int) -> Tensor:
    """The response mask [B, width] of right-padded rows, from the lengths [B] of prompts and responses in tokens."""
    column = torch.arange(width, device=prompt_lengths.device)
    first = prompt_lengths[:, None] - 1
    return (column >= first) & (column < first + response_lengths[:, None])


def ends_response(mask: Tensor) -> Tensor:
    """True [B, S] at the prediction of each row's last response token; nowhere in a row without a response."""
    mask = mask.bool()
    return mask & ~_shift_left(mask)


def token_rewards(
    scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, kl_coefficient: float
) -> Tensor:
    """The reward of each token [B, S]: r_i = -beta (log pi(i) - log ref(i)), plus the row's score at its last token.

    `scores` [B] are the amounts of `advantages.compute_rewards`; `logprobs` and `ref_logprobs` are [B, S], of
    policies at the temperature of sampling over all tokens; beta is `kl_coefficient`. The penalty is part of the
    reward and of no loss (InstructGPT, arXiv:2203.02155, equation 2, per token).
    """
    penalty = -kl_coefficient * (logprobs - ref_logprobs)
    rewards = torch.where(ends_response(mask), penalty + scores[:, None], penalty)
    return torch.where(mask.bool(), rewards, 0.0)


def generalized_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, bootstrapped: Tensor, *, gamma: float, gae_lambda: float
) -> Tensor:
    """Advantages [B, S], zero outside the mask (GAE, arXiv:1506.02438, equations 11, 12 and 16).

        delta_i = r_i + gamma V_{i+1} - V_i        A_i = delta_i + gamma lambda A_{i+1}

    After the last response token A is zero, and so is V, except in rows that are `bootstrapped` [B], where V is the
    critic's value after the last token. Returns, the critic's targets, are A + V.

    By default a truncated response ends at the length limit, as in the PPO of TRL, verl and OpenRLHF: the score was
    given to the truncated text, so no further reward is expected. Bootstrapping treats truncation as a time limit and
    not as an end (Pardo et al., Time Limits in Reinforcement Learning, arXiv:1712.00378), for jobs in which truncated
    text has no score. The value after the last token is never itself a target, so it depends on how well the critic
    generalises to longer responses than it has seen.
    """
    mask = mask.bool()
    after = torch.where(bootstrapped.bool()[:, None], _shift_left(values), 0.0)
    following = torch.where(ends_response(mask), after, _shift_left(values))
    deltas = torch.where(mask, rewards + gamma * following - values, 0.0)
    # A loop over hundreds of columns: numpy's operations on a row take a tenth of torch's time.
    advantages = deltas.T.contiguous()
    columns, decays = advantages.numpy(), (mask.T.to(deltas.dtype) * (gamma * gae_lambda)).numpy()
    for column in range(len(columns) - 2, -1, -1):
        columns[column] += decays[column] * columns[column + 1]
    return torch.where(mask, advantages.T, 0.0)


def moments(x: Tensor, mask: Tensor) -> Tensor:
    """Count, sum and sum of squares of the masked entries: float64 [3]. Moments of disjoint shards add up."""
    entries = x[mask.bool()].double()
    return torch.stack([entries.new_tensor(len(entries)), entries.sum(), entries.square().sum()])


def whiten(x: Tensor, mask: Tensor, totals: Tensor | None = None, *, size: float | None = None) -> Tensor:
    """`x` [B, S] with mean 0 and (population) variance 1 over the masked entries, and 0 elsewhere.

    If the deviation is at most `advantages.RELATIVE_TOLERANCE` of `size`, the largest term that `x` was computed from
    (default: its root mean square), the entries are equal up to rounding, and all of them become exactly 0. `totals`
    [3] are the moments of the whole batch; they must be given if `x` is only a shard of it.
    """
    count, total, squares = moments(x, mask) if totals is None else totals
    mean, mean_square = total / count.clamp(min=1.0), squares / count.clamp(min=1.0)
    variance = (mean_square - mean.square()).clamp(min=0.0)
    whitened, in_mask = torch.zeros_like(x), mask.bool()
    size = float(mean_square.sqrt()) if size is None else size
    if variance <= (RELATIVE_TOLERANCE * max(size, SMALLEST_SIZE)) ** 2:
        return whitened
    whitened[in_mask] = ((x[in_mask].double() - mean) * torch.rsqrt(variance + _VARIANCE_FLOOR)).to(x.dtype)
    return whitened


def _shift_left(x: Tensor) -> Tensor:
    """`x` [B, S] shifted left by one column; zero (False) in the last column."""
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], dim=1)


def sampled_mask(response: Tensor, versions: Tensor) -> Tensor:
    """The mask [B, S] of the predictions of sampled tokens, from that of all response tokens: without tool tokens."""
    return response.bool() & (versions != TOOL_TOKEN_VERSION)


class SampledColumns:
    """An order of each row's columns that makes its sampled tokens contiguous, without tool tokens between them.

    Sampled tokens are first, then the columns after the response, then prompt and tool tokens.
    """

    def __init__(self, response: Tensor, sampled: Tensor) -> None:
        """Takes the masks [B, S] of the predictions of response tokens, and of sampled tokens (`sampled`)."""
        is_after = response.bool().flip(1).cumsum(1).flip(1) == 0
        rank = torch.where(sampled.bool(), 0, torch.where(is_after, 1, 2))
        self._order = rank.argsort(dim=1, stable=True)
        self._back = self._order.argsort(dim=1)

    def compact(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Fields [B, S] with their columns in this order."""
        return {name: values.gather(1, self._order) for name, values in fields.items()}

    def restore(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Fields [B, S] with their columns in the original order."""
        return {name: values.gather(1, self._back) for name, values in fields.items()}


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

    `response_rewards` are the rewards of its rows from `advantages.compute_rewards`; `logprobs` and `ref_logprobs`
    [B, S] are those of the policy before the update and of the reference, if there is one.
    """
    if isinstance(settings, GRPO):
        return group_advantages(
            response_rewards, mask, group_size, by_std=settings.normalise_by_std, dtype=logprobs.dtype
        )
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


def group_advantages(
    response_rewards: ResponseRewards, mask: Tensor, group_size: int, *, by_std: bool, dtype: torch.dtype
) -> Tensor:
    """The advantages of GRPO [B, S]: those of `relative_to_group` at each token of the mask [B, S]."""
    amounts, sizes = response_rewards
    return _per_token(relative_to_group(amounts, group_size, by_std=by_std, sizes=sizes), mask, dtype)


def relative_to_group(amounts: Tensor, group_size: int, *, by_std: bool, sizes: Tensor | None = None) -> Tensor:
    """Each sample's reward minus the mean of its group, float64 [B]; with `by_std` divided by the group's sample
    standard deviation (GRPO, arXiv:2402.03300, section 4.1.2; without it Dr. GRPO, arXiv:2503.20783, section 3.2).

    `sizes` [B] are those of `advantages.ResponseRewards`, by default the absolute amounts. No epsilon is added to the
    deviation: it would matter only for a group whose rewards are all the same, which gets 0.
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
    rewards = ResponseRewards(amounts.double(), (amounts if sizes is None else sizes).double().abs())
    return torch.where(groups_that_differ(rewards, differences.shape[1])[:, None], differences, 0.0).reshape(-1)


def returns_to_go(rewards: Tensor, mask: Tensor) -> Tensor:
    """The sum of each token's reward and of the rewards after it [B, S] (REINFORCE++, arXiv:2501.03262)."""
    values = torch.zeros_like(rewards)
    return generalized_advantages(rewards, values, mask, torch.zeros(len(rewards)), gamma=1.0, gae_lambda=1.0)


def _per_token(row_values: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Each row's value [B] repeated over its response tokens, [B, S]."""
    return torch.where(mask.bool(), row_values[:, None], 0.0).to(dtype)
