"""The losses of PPO and their metrics, the actor's also of algorithms without a critic: pure functions of tensors.

Shapes and the meaning of an index are those of `meshwright.runtime.training.advantages`. Every loss and every metric is
a sum over masked tokens divided by the number of response tokens of the whole minibatch (`num_tokens`, over all
micro-batches and data-parallel ranks), or by what `Mean` says. Shares therefore add up: neither the micro-batch nor the
layout changes the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.planner.plan.learning_settings import LearningSettings
from meshwright.planner.plan.ppo_settings import PPO
from meshwright.runtime.training.advantages import generalized_advantages, token_rewards, whiten
from meshwright.runtime.training.payments import Paid, pay


class Targets(NamedTuple):
    """What the two losses aim at, [B, S] each and zero outside the mask."""

    advantages: Tensor
    returns: Tensor  # advantages before whitening, plus values


class LossShare(NamedTuple):
    """One micro-batch's share of a loss (a scalar with a gradient) and of its metrics (detached float64 scalars)."""

    loss: Tensor
    metrics: dict[str, Tensor]


class Mean(NamedTuple):
    """What an actor's loss is a mean over: terms are multiplied by `weights` [B, S], one when absent, and their sum is
    divided by `divisor`, which is that of the whole minibatch."""

    divisor: float
    weights: Tensor | None = None

    def of(self, x: Tensor, mask: Tensor) -> Tensor:
        """This micro-batch's share."""
        weighted = x if self.weights is None else x * self.weights
        return torch.where(mask.bool(), weighted, 0.0).sum() / self.divisor


class Reference(NamedTuple):
    """The log-probabilities [B, S] of the policy that a loss keeps to, and how much it counts."""

    logprobs: Tensor
    coefficient: float


def targets(
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

    `scores` [B] are the reward model's, and `truncated` [B] the rows that were cut by length; `settings.truncation`
    says what that means.
    """
    paid = pay(scores, truncated, settings)
    amounts = paid.amounts.to(values.dtype)
    rewards = token_rewards(amounts, logprobs, ref_logprobs, mask, kl_coefficient=settings.kl_coefficient)
    bootstrapped = truncated.bool() & (settings.truncation == "bootstrap")
    advantages = generalized_advantages(
        rewards, values, mask, bootstrapped, gamma=settings.gamma, gae_lambda=settings.gae_lambda
    )
    returns = torch.where(mask.bool(), advantages + values, 0.0)
    if settings.whiten_advantages:
        said = values[mask.bool()].double().abs()
        advantages = whiten(advantages, mask, size=float(torch.cat([paid.sizes, said]).max()))
    return Targets(advantages, returns)


def importance_weights(logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor, *, cap: float) -> Tensor:
    """min(pi / mu, cap) [B, S], zero outside the mask: what corrects for tokens sampled by an older policy mu.

    `logprobs` are the trainer's at the start of the update (the proximal policy), `behaviour_logprobs` the sampler's,
    both over all tokens as `runtime.generation.sampling` says: filters of sampling change no weight.
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
    mean: Mean | None = None,
    reference: Reference | None = None,
) -> LossShare:
    """The clipped surrogate (PPO, arXiv:1707.06347, equations 7 and 9), negated so that lower is better.

        rho_i = exp(log pi(i) - log old(i))
        L = -1/N sum_i w_i min(rho_i A_i, clip(rho_i, 1 - eps, 1 + eps') A_i) - c/N sum_i H_i + b/N sum_i K_i
        K_i = exp(log ref(i) - log pi(i)) - (log ref(i) - log pi(i)) - 1

    eps' is eps but where clip-higher is asked for (DAPO, arXiv:2503.14476, section 3.1), and K, the k3 estimate of
    KL(pi || ref), counts by b where a `reference` is given (GRPO, arXiv:2402.03300, equations 3 and 4). `mean` replaces
    1/N: by 1/R sum over R responses of 1/|o| sum over the tokens of one (GRPO, equation 3), or by 1/(R M) sum over all
    tokens, M being the longest response (Dr. GRPO, arXiv:2503.20783, section 3.2). 1/N is DAPO's, section 3.3.

    `old_logprobs` are those of the policy at the start of the update; `weights` w [B, S], one when absent, are the
    `importance_weights` of stale tokens (decoupled PPO, arXiv:2110.00641). `entropy` H [B, S] is needed when c > 0.
    `approx_kl` is the k3 estimate of KL(old || pi), rho - 1 - log rho, which is never negative.
    """
    assert entropy is not None or settings.entropy_coefficient == 0, "an entropy bonus needs the entropy"
    log_ratio = torch.where(mask.bool(), logprobs - old_logprobs, 0.0)
    ratio = log_ratio.exp()
    clipped, mean = ratio.clamp(*settings.clip_range), mean or Mean(num_tokens)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    if weights is not None:
        surrogate = surrogate * weights
    loss = -mean.of(surrogate, mask)
    sums = {
        "policy_loss": loss,
        "clip_fraction": _share((clipped * advantages < ratio * advantages).double(), mask, num_tokens),
        "ratio": _share(ratio, mask, num_tokens),
        "approx_kl": _share(ratio - 1 - log_ratio, mask, num_tokens),
    }
    if entropy is not None:
        sums["entropy"] = _share(entropy, mask, num_tokens)
        loss = loss - settings.entropy_coefficient * mean.of(entropy, mask)
    if reference is not None:
        log_ref = torch.where(mask.bool(), reference.logprobs - logprobs, 0.0)
        divergence = log_ref.exp() - log_ref - 1
        sums["kl_to_ref_estimate"] = _share(divergence, mask, num_tokens)
        loss = loss + reference.coefficient * mean.of(divergence, mask)
    return LossShare(loss, _detached(sums))


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, num_tokens: int, settings: PPO
) -> LossShare:
    """Half the squared error, the worse of the value and of the value held near its old one, of tensors [B, S].

        L = 1/2N sum_i max((V_i - R_i)^2, (clip(V_i, V_i^old - c, V_i^old + c) - R_i)^2)

    It is the form of the PPO authors' code (openai/baselines, ppo2) that RLHF trainers kept; c is `value_clip`.
    """
    held = values.clamp(old_values - settings.value_clip, old_values + settings.value_clip)
    error = torch.where(mask.bool(), values - returns, 0.0)
    held_error = torch.where(mask.bool(), held - returns, 0.0)
    loss = _share(0.5 * torch.maximum(error.square(), held_error.square()), mask, num_tokens)
    sums = {
        "value_loss": loss,
        "value_clip_fraction": _share((held_error.square() > error.square()).double(), mask, num_tokens),
        "value": _share(values, mask, num_tokens),
        "return": _share(returns.double(), mask, num_tokens),
        "return_square": _share(returns.double().square(), mask, num_tokens),
        "error": _share(error.double(), mask, num_tokens),
        "error_square": _share(error.double().square(), mask, num_tokens),
    }
    return LossShare(loss, _detached(sums))


def within_target(metrics: Mapping[str, float], settings: LearningSettings) -> bool:
    """Whether an update is done whose metrics over its whole minibatch are these, taken before its step.

    Not where the policy is already further from that of the start of the step than 1.5 times `target_kl`: then neither
    it nor the updates after it in the step are done, as in Spinning Up and Stable-Baselines3, whose estimator
    `approx_kl` is. A critic's metrics have none.
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
    """What is reported of one update, from metrics already summed over micro-batches and data-parallel ranks.

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
    paid: Paid,
) -> dict[str, float]:
    """What is reported of a whole batch of experience: means over its rows [B], the divergence also per token.

    `score` is what rewards and the reward model said and `paid_score` what the rows were paid for it, see `pay`.
    `kl_to_ref` is the k1 estimate log pi - log ref, summed over each row's response: what the reward is charged for;
    there is none without a reference.
    """
    num_tokens = mask.bool().sum()
    divergence = {}
    if ref_logprobs is not None:
        log_ratio = float((logprobs - ref_logprobs)[mask.bool()].double().sum())
        divergence["kl_to_ref"] = log_ratio / len(scores)
        divergence["kl_to_ref_per_token"] = log_ratio / max(1, int(num_tokens))
    return {
        "score": float(scores.double().mean()),
        "paid_score": float(paid.amounts.mean()),
        **divergence,
        "response_tokens": float(num_tokens / len(scores)),
        "truncated_fraction": float(truncated.double().mean()),
    }


def _share(x: Tensor, mask: Tensor, num_tokens: int) -> Tensor:
    """The masked entries' sum over `num_tokens`."""
    assert num_tokens > 0, "a minibatch has at least one response token"
    return torch.where(mask.bool(), x, 0.0).sum() / num_tokens


def _detached(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().double() for name, value in sums.items()}
