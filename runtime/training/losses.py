"""The policy and value losses of PPO and their metrics; the policy loss also serves algorithms without a critic.

All are pure functions of tensors, with the shapes and index meaning of `meshwright.runtime.training.advantages`. Every
loss and every metric is a sum over masked tokens divided by the number of response tokens of the whole minibatch
(`num_tokens`, over all micro-batches and data-parallel ranks), or by the divisor of `MaskedMean`. Shares therefore
add up: neither the micro-batch size nor the layout changes the result.

The KL penalty of GRPO is a term of `policy_loss`. That of PPO is part of the reward: see `advantages.token_rewards`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.planner.job.algorithm_settings import PPO, LearningSettings
from meshwright.runtime.records.version_gap import GAP
from meshwright.runtime.training.advantages import (
    ResponseRewards,
    compute_rewards,
    generalized_advantages,
    token_rewards,
    whiten,
)


class Targets(NamedTuple):
    """The targets of the policy and the value loss, [B, S] each and zero outside the mask."""

    advantages: Tensor
    returns: Tensor  # advantages before whitening, plus values


MAXIMUM = "max_"
"""Prefix of the metrics that are maxima over tokens; all others are sums or means, whose shares add up."""


class LossShare(NamedTuple):
    """One micro-batch's share of a loss (a scalar with a gradient) and of its metrics (detached float64 scalars).

    Shares of metrics add up, except those that begin with `MAXIMUM`.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


class MaskedMean(NamedTuple):
    """The weighted mean of an actor's loss: terms times `weights` [B, S] (1 if absent), summed, over `divisor`.

    The divisor is that of the whole minibatch.
    """

    divisor: float
    weights: Tensor | None = None

    def share(self, x: Tensor, mask: Tensor) -> Tensor:
        """This micro-batch's share, a scalar [], of the mean of `x` [B, S] over the mask."""
        weighted = x if self.weights is None else x * self.weights
        return torch.where(mask.bool(), weighted, 0.0).sum() / self.divisor


class Reference(NamedTuple):
    """The reference log-probabilities [B, S] of a KL loss, and its coefficient."""

    logprobs: Tensor
    coefficient: float


def ppo_targets(
    *,
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    values: Tensor,
    mask: Tensor,
    truncated: Tensor,
    settings: PPO,
) -> Targets:
    """Advantages and returns of a whole batch: rewards, then GAE, then whitening.

    `scores` [B] are those of the reward model; `truncated` [B] marks rows truncated at the length limit, which
    `settings.truncation` says how to reward.
    """
    response_rewards = compute_rewards(scores, truncated, settings)
    amounts = response_rewards.amounts.to(values.dtype)
    rewards = token_rewards(amounts, logprobs, ref_logprobs, mask, kl_coefficient=settings.kl_coefficient)
    bootstrapped = truncated.bool() & (settings.truncation == "bootstrap")
    advantages = generalized_advantages(
        rewards, values, mask, bootstrapped, gamma=settings.gamma, gae_lambda=settings.gae_lambda
    )
    returns = torch.where(mask.bool(), advantages + values, 0.0)
    if settings.whiten_advantages:
        value_sizes = values[mask.bool()].double().abs()
        advantages = whiten(advantages, mask, size=float(torch.cat([response_rewards.sizes, value_sizes]).max()))
    return Targets(advantages, returns)


def importance_weights(logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor, *, cap: float) -> Tensor:
    """Truncated importance weights min(pi / mu, cap) [B, S] for tokens sampled by an older policy mu; zero outside the
    mask.

    `logprobs` are the trainer's at the start of the update (the proximal policy), `behaviour_logprobs` the sampler's.
    Both are over the whole vocabulary (see `runtime.inference.sampling`), so top-k and top-p do not change a weight.
    """
    log_ratio = torch.where(mask.bool(), logprobs - behaviour_logprobs, 0.0)
    return torch.where(mask.bool(), log_ratio.exp().clamp(max=cap), 0.0)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    num_tokens: int,
    settings: LearningSettings,
    entropy: Tensor | None = None,
    weights: Tensor | None = None,
    mean: MaskedMean | None = None,
    reference: Reference | None = None,
    ratio_cap: float | None = None,
) -> LossShare:
    """The clipped surrogate loss (PPO, arXiv:1707.06347, equations 7 and 9), negated so that lower is better.

        rho_i = exp(log pi(i) - log old(i))
        L = -1/N sum_i w_i min(rho_i A_i, clip(rho_i, 1 - eps, 1 + eps') A_i) - c/N sum_i H_i + b/N sum_i K_i
        K_i = exp(log ref(i) - log pi(i)) - (log ref(i) - log pi(i)) - 1

    eps' equals eps unless clip-higher is set (DAPO, arXiv:2503.14476, section 3.1). K is the k3 estimate of
    KL(pi || ref), weighted by b if a `reference` is given (GRPO, arXiv:2402.03300, equations 3 and 4). `mean` replaces
    1/N sum_i by the mean over R responses of each one's mean over its tokens (GRPO, equation 3), or by 1/(R M) times
    the sum over all tokens, where M is the maximum length of a response (Dr. GRPO, arXiv:2503.20783, section 3.2). 1/N
    is that of DAPO, section 3.3.

    `old_logprobs` [B, S] are those of the policy at the start of the update; `weights` w [B, S], 1 if absent, are the
    `importance_weights` of stale tokens (decoupled PPO, arXiv:2110.00641). `entropy` H [B, S] is required if c > 0.

    With a `ratio_cap` C the old log-probabilities are those of the policy mu that sampled, and rho = pi / mu is itself
    the importance weight of a token. It is truncated as in V-trace (IMPALA, arXiv:1802.01561, section 4.1): rho_i is
    replaced by min(rho_i, C), and its gradient by min(rho_i, C) grad log pi(i), which is not zero where it is
    truncated.
    The metrics include those of `movement`, of the ratio before it is truncated.
    """
    assert entropy is not None or settings.entropy_coefficient == 0, "an entropy bonus needs the entropy"
    log_ratio = torch.where(mask.bool(), logprobs - old_logprobs, 0.0)
    ratio = log_ratio.exp() if ratio_cap is None else _truncated_ratio(log_ratio, ratio_cap)
    clipped, mean = ratio.clamp(*settings.clip_range), mean or MaskedMean(num_tokens)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    if weights is not None:
        surrogate = surrogate * weights
    loss = -mean.share(surrogate, mask)
    sums = {
        "policy_loss": loss,
        "clip_fraction": _share((clipped * advantages < ratio * advantages).double(), mask, num_tokens),
        **movement(log_ratio, mask, num_tokens=num_tokens),
    }
    if entropy is not None:
        sums["entropy"] = _share(entropy, mask, num_tokens)
        loss = loss - settings.entropy_coefficient * mean.share(entropy, mask)
    if reference is not None:
        log_ref = torch.where(mask.bool(), reference.logprobs - logprobs, 0.0)
        divergence = log_ref.exp() - log_ref - 1
        sums["kl_to_ref_estimate"] = _share(divergence, mask, num_tokens)
        loss = loss + reference.coefficient * mean.share(divergence, mask)
    return LossShare(loss, _detached(sums))


def _truncated_ratio(log_ratio: Tensor, cap: float) -> Tensor:
    """The ratio [B, S], at most `cap`, with the gradient of its logarithm times its value."""
    return (log_ratio - (log_ratio.detach() - math.log(cap)).clamp(min=0)).exp()


def gap_shares(logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Shares, [] each, of the sums of a `Gap` over masked tokens, by the names that `Gap.split` reads.

    `logprobs` [B, S] are those of the trainer before an update, `behaviour_logprobs` [B, S] those of the generator with
    the same weights.
    """
    log_ratio = torch.where(mask.bool(), behaviour_logprobs - logprobs, 0.0).detach().double()
    size = log_ratio.abs()
    return {
        f"{GAP}abs_difference_sum": size.sum(),
        f"{MAXIMUM}{GAP}largest": size.amax(),
        f"{GAP}num_tokens": mask.bool().sum().double(),
        f"{GAP}ratio_sum": torch.where(mask.bool(), size.exp(), 0.0).sum(),
        f"{GAP}kl_sum": (torch.expm1(-log_ratio) + log_ratio).sum(),
    }


def movement(log_ratio: Tensor, mask: Tensor, *, num_tokens: int) -> dict[str, Tensor]:
    """Shares, [] each, of the metrics of how far a policy has moved in a step, from log rho = log pi - log old [B, S].

    `ratio` is the mean of rho, and `approx_kl` the k3 estimate of KL(old || pi), rho - 1 - log rho, which is never
    negative.
    """
    ratio = log_ratio.exp()
    return {
        "ratio": _share(ratio, mask, num_tokens),
        "approx_kl": _share(ratio - 1 - log_ratio, mask, num_tokens),
    }


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, num_tokens: int, settings: PPO
) -> LossShare:
    """The clipped value loss: half the larger squared error of the value and of the value clipped near its old one.

        L = 1/2N sum_i max((V_i - R_i)^2, (clip(V_i, V_i^old - c, V_i^old + c) - R_i)^2)

    All tensors are [B, S]. This is the form of the PPO authors' code (openai/baselines, ppo2) that RLHF trainers kept;
    c is `value_clip`.
    """
    clipped = values.clamp(old_values - settings.value_clip, old_values + settings.value_clip)
    error = torch.where(mask.bool(), values - returns, 0.0)
    clipped_error = torch.where(mask.bool(), clipped - returns, 0.0)
    loss = _share(0.5 * torch.maximum(error.square(), clipped_error.square()), mask, num_tokens)
    sums = {
        "value_loss": loss,
        "value_clip_fraction": _share((clipped_error.square() > error.square()).double(), mask, num_tokens),
        "value": _share(values, mask, num_tokens),
        "return": _share(returns.double(), mask, num_tokens),
        "return_square": _share(returns.double().square(), mask, num_tokens),
        "error": _share(error.double(), mask, num_tokens),
        "error_square": _share(error.double().square(), mask, num_tokens),
    }
    return LossShare(loss, _detached(sums))


def within_target_kl(metrics: Mapping[str, float], settings: LearningSettings) -> bool:
    """False once `approx_kl` exceeds 1.5 x `target_kl`; then this update and the rest of the step are skipped.

    `metrics` are those of the whole minibatch before its update; a critic's have no `approx_kl`. The rule and the
    estimator are those of Spinning Up and Stable-Baselines3.
    https://github.com/DLR-RM/stable-baselines3/blob/v2.6.0/stable_baselines3/ppo/ppo.py
    """
    return settings.target_kl is None or metrics.get("approx_kl", 0.0) <= 1.5 * settings.target_kl


def explained_variance(sums: Mapping[str, float]) -> float:
    """1 - Var(R - V) / Var(R), from the metrics of `value_loss` over a minibatch; 0 when returns are constant."""
    variance = sums["return_square"] - sums["return"] ** 2
    if variance <= 0:
        return 0.0
    return 1 - (sums["error_square"] - sums["error"] ** 2) / variance


def final_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Metrics to report for one update, from those already summed over micro-batches and data-parallel ranks.

    Means stay as they are; the moments of returns and errors become `explained_variance`.
    """
    moments = ("return_square", "error", "error_square")
    reported = {name: float(value) for name, value in sums.items() if name not in moments}
    if "return_square" in sums:
        reported["explained_variance"] = explained_variance(sums)
    return reported


def experience_metrics(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor | None,
    mask: Tensor,
    truncated: Tensor,
    *,
    rewards: ResponseRewards,
) -> dict[str, float]:
    """Metrics of a whole batch of experience: means over its rows [B], the divergence also per token.

    `score` is the score before, and `paid_score` after scale, clip and penalties (see `compute_rewards`). `kl_to_ref`
    is the k1 estimate log pi - log ref, summed over each response, which the reward is penalised by; it is absent
    without a reference.
    """
    num_tokens = mask.bool().sum()
    divergence = {}
    if ref_logprobs is not None:
        log_ratio = float((logprobs - ref_logprobs)[mask.bool()].double().sum())
        divergence["kl_to_ref"] = log_ratio / len(scores)
        divergence["kl_to_ref_per_token"] = log_ratio / max(1, int(num_tokens))
    return {
        "score": float(scores.double().mean()),
        "paid_score": float(rewards.amounts.mean()),
        **divergence,
        "response_tokens": float(num_tokens / len(scores)),
        "truncated_fraction": float(truncated.double().mean()),
    }


def _share(x: Tensor, mask: Tensor, num_tokens: int) -> Tensor:
    """The sum of the masked entries, divided by `num_tokens`."""
    assert num_tokens > 0, "a minibatch has at least one response token"
    return torch.where(mask.bool(), x, 0.0).sum() / num_tokens


def _detached(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().double() for name, value in sums.items()}
