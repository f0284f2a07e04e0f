"""Gradients of the policy loss in float64, by where the old log-probabilities come from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.planner.job.algorithm_settings import GRPO
from meshwright.runtime.records.version_gap import Gap
from meshwright.runtime.training.losses import gap_shares, importance_weights, policy_loss
from tests.seeds import seeds

SETTINGS = GRPO(clip_ratio=0.2, importance_cap=1.5)


class Batch:
    """Random log-probabilities of a policy and of the one that sampled, [2, 40] float64, with a mask and advantages."""

    def __init__(self, seed: int) -> None:
        source = torch.Generator().manual_seed(seed)
        shape = (2, 40)
        self.policy = -torch.rand(shape, generator=source, dtype=torch.float64)
        self.behaviour = self.policy + 0.5 * torch.randn(shape, generator=source, dtype=torch.float64)
        self.advantages = torch.randn(shape, generator=source, dtype=torch.float64)
        self.mask = torch.rand(shape, generator=source) < 0.8
        self.num_tokens = int(self.mask.sum())

    def gradient(self, old: Tensor, weights: Tensor | None = None, ratio_cap: float | None = None) -> Tensor:
        """The gradient of the loss with respect to log pi, [2, 40]; `old` may be the leaf's own values."""
        logprobs = self.policy.clone().requires_grad_()
        share = policy_loss(
            logprobs,
            logprobs.detach() if old is self.policy else old,
            self.advantages,
            self.mask,
            num_tokens=self.num_tokens,
            settings=SETTINGS,
            weights=weights,
            ratio_cap=ratio_cap,
        )
        share.loss.backward()
        assert logprobs.grad is not None
        return logprobs.grad


@seeds(5, all=100)
def test_the_only_update_has_the_gradient_of_the_policy_gradient_loss(seed: int) -> None:
    """The ratio is 1, so the gradient is -A/N, weighted by min(pi / mu, cap) where tokens are stale."""
    batch = Batch(seed)
    expected = torch.where(batch.mask, -batch.advantages / batch.num_tokens, 0.0)
    torch.testing.assert_close(batch.gradient(batch.policy), expected, rtol=1e-12, atol=0)
    weights = importance_weights(batch.policy, batch.behaviour, batch.mask, cap=1.5)
    torch.testing.assert_close(batch.gradient(batch.policy, weights), expected * weights, rtol=1e-12, atol=0)


@seeds(5, all=100)
def test_the_only_update_has_the_gradient_of_a_pass_before_it(seed: int) -> None:
    batch = Batch(seed)
    recomputed = batch.policy.clone()  # another tensor, from another pass over the same weights
    assert torch.equal(batch.gradient(batch.policy), batch.gradient(recomputed))


@seeds(5, all=100)
def test_a_ratio_to_the_generator_is_clipped_as_in_ppo_and_truncated(seed: int) -> None:
    """The gradient is 0 where the clip binds, and -min(pi / mu, cap) A / N elsewhere."""
    batch, cap = Batch(seed), SETTINGS.importance_cap
    ratio = (batch.policy - batch.behaviour).exp()
    is_clipped = torch.where(batch.advantages > 0, ratio > 1.2, ratio < 0.8)
    expected = -ratio.clamp(max=cap) * batch.advantages / batch.num_tokens
    expected = torch.where(batch.mask & ~is_clipped, expected, 0.0)
    found = batch.gradient(batch.behaviour, ratio_cap=cap)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-18)
    assert bool(((ratio > cap) & (batch.advantages < 0) & batch.mask & (found != 0)).any())


def test_a_truncated_ratio_is_finite_where_the_ratio_is_not() -> None:
    logprobs = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    old, one = torch.full((1, 1), -2000.0, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    share = policy_loss(logprobs, old, -one, one, num_tokens=1, settings=SETTINGS, ratio_cap=1.5)
    share.loss.backward()
    assert float(share.loss.detach()) == pytest.approx(1.5)
    assert float(logprobs.grad or 0) == pytest.approx(1.5)


def test_gaps_of_micro_batches_add_up_to_that_of_the_update() -> None:
    batch = Batch(0)
    whole, others = Gap.split({**_gap(batch, slice(None)), "ratio": 1.0})
    parts = [Gap.split(_gap(batch, slice(row, row + 1)))[0] for row in range(2)]
    together = parts[0] + parts[1]
    assert others == {"ratio": 1.0}
    assert whole.num_tokens == together.num_tokens == batch.num_tokens
    assert whole.largest == together.largest
    for name in ("abs_difference_sum", "ratio_sum", "kl_sum"):
        assert getattr(whole, name) == pytest.approx(getattr(together, name))
    apart = (batch.behaviour - batch.policy)[batch.mask]
    assert whole.abs_difference_sum == pytest.approx(float(apart.abs().sum()))
    assert whole.kl_sum == pytest.approx(float((apart.neg().exp() - 1 + apart).sum()))


def test_metrics_without_a_gap_have_none() -> None:
    assert Gap.split({"ratio": 1.0}) == (Gap(), {"ratio": 1.0})


def _gap(batch: Batch, rows: slice) -> dict[str, float]:
    shares = gap_shares(batch.policy[rows], batch.behaviour[rows], batch.mask[rows])
    return {name: float(value) for name, value in shares.items()}
