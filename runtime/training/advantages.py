"""Advantages from scores: the reward of each token, GAE, and whitening.

These are pure functions of tensors that know no model, process or layout. A batch is right-padded, [B, S], and index i
of every per-token array concerns the prediction of token i + 1: `logprobs[i] = log p(token[i+1] | token[..i])`,
`values[i]` is the critic's output after token i, and `mask[i]` is true if token i + 1 belongs to the response (its
end-of-sequence token included). A row's response is one contiguous run; the last column is never part of it. Entries
outside the mask, NaN and infinity included, do not change a single bit of a result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.runtime.training.payments import RELATIVE_TOLERANCE, SMALLEST_SIZE

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

    `scores` [B] are the amounts of `payments.pay`; `logprobs` and `ref_logprobs` are [B, S], of policies at the
    temperature of sampling over all tokens; beta is `kl_coefficient`. The penalty is part of the reward and of no loss
    (InstructGPT, arXiv:2203.02155, equation 2, per token).
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
    not as an end (Pardo et al., Time Limits in Reinforcement Learning, arXiv:1712.00378), for rewards without a score
    there. The value after the last token is never itself a target, so it depends on how well the critic generalises to
    longer responses than it has seen.
    """
    mask = mask.bool()
    after = torch.where(bootstrapped.bool()[:, None], _shift_left(values), 0.0)
    following = torch.where(ends_response(mask), after, _shift_left(values))
    deltas = torch.where(mask, rewards + gamma * following - values, 0.0)
    columns, in_mask = deltas.T.contiguous(), mask.T.contiguous()  # each iteration reads contiguous memory
    running = torch.zeros_like(columns[0])
    for column in range(len(columns) - 1, -1, -1):
        running = torch.where(in_mask[column], columns[column] + gamma * gae_lambda * running, 0.0)
        columns[column] = running
    return columns.T.contiguous()


def moments(x: Tensor, mask: Tensor) -> Tensor:
    """Count, sum and sum of squares of the masked entries: float64 [3]. Moments of disjoint shards add up."""
    entries = x[mask.bool()].double()
    return torch.stack([entries.new_tensor(len(entries)), entries.sum(), entries.square().sum()])


def whiten(x: Tensor, mask: Tensor, totals: Tensor | None = None, *, size: float | None = None) -> Tensor:
    """`x` [B, S] with mean 0 and (population) variance 1 over the masked entries, and 0 elsewhere.

    If the deviation is at most `payments.SAME_SHARE` of `size`, the largest term that `x` was computed from (default:
    its root mean square), the entries are equal up to rounding, and all of them become exactly 0. `totals` [3] are the
    moments of the whole batch; they must be given if `x` is only a shard of it.
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
