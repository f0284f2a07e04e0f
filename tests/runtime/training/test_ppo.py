"""The mathematics of PPO: small examples worked out by hand, and laws."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from meshwright.planner.job.algorithm_settings import GRPO, PPO
from meshwright.runtime.training.advantages import ResponseRewards, compute_rewards, response_mask
from meshwright.runtime.training.losses import (
    LossShare,
    MaskedMean,
    Reference,
    experience_metrics,
    explained_variance,
    final_metrics,
    importance_weights,
    policy_loss,
    value_loss,
    within_target_kl,
)

ROWS, WIDTH = 6, 12
SETTINGS = PPO()


def batch(seed: int) -> dict[str, Tensor]:
    """A random batch with every kind of row: no response, one token and full width."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(1, 5, (ROWS,), generator=generator)
    responses = torch.randint(1, WIDTH - 5, (ROWS,), generator=generator)
    responses[0], responses[1], responses[2] = 0, 1, WIDTH - int(prompts[2])
    names = ("logprobs", "old_logprobs", "values", "old_values", "advantages", "returns", "entropy")
    return {
        **{name: torch.randn(ROWS, WIDTH, generator=generator) for name in names},
        "mask": response_mask(prompts, responses, WIDTH),
    }


def poisoned(x: Tensor, keep: Tensor) -> Tensor:
    """`x` with NaN and infinity wherever `keep` is False."""
    poison = torch.where(torch.arange(x.shape[1]) % 2 == 0, math.nan, math.inf)
    return torch.where(keep, x, poison)


def policy_share(b: dict[str, Tensor], rows: slice, num_tokens: int, weights: Tensor | None = None) -> LossShare:
    return policy_loss(
        b["logprobs"][rows],
        b["old_logprobs"][rows],
        b["advantages"][rows],
        b["mask"][rows],
        num_tokens=num_tokens,
        settings=PPO(entropy_coefficient=0.01),
        entropy=b["entropy"][rows],
        weights=None if weights is None else weights[rows],
    )


def value_share(b: dict[str, Tensor], rows: slice, num_tokens: int) -> LossShare:
    names = ("values", "old_values", "returns", "mask")
    return value_loss(*(b[name][rows] for name in names), num_tokens=num_tokens, settings=SETTINGS)


seeds = st.integers(0, 10_000)


@given(seeds)
@settings(max_examples=30)
def test_padding_changes_no_bit_of_the_losses_or_their_gradients(seed: int) -> None:
    b = batch(seed)
    dirty = {name: poisoned(x, b["mask"]) if x.dim() == 2 and name != "mask" else x for name, x in b.items()}
    num_tokens = int(b["mask"].sum())
    for share, leaf in ((policy_share, "logprobs"), (value_share, "values")):
        answers = []
        for source in (b, dirty):
            source[leaf] = source[leaf].clone().requires_grad_()
            loss, metrics = share(source, slice(None), num_tokens)
            (gradient,) = torch.autograd.grad(loss, source[leaf])
            answers.append((loss, gradient, torch.stack(list(metrics.values()))))
        assert all(torch.equal(clean, other) for clean, other in zip(*answers, strict=True))
        assert not answers[0][1][~b["mask"]].any()


@given(seeds, st.lists(st.integers(0, ROWS), max_size=3))
@settings(max_examples=30)
def test_micro_batches_add_up_to_the_batch(seed: int, cuts: list[int]) -> None:
    b = batch(seed)
    num_tokens = int(b["mask"].sum())
    bounds = sorted({0, *cuts, ROWS})
    for share in (policy_share, value_share):
        whole = share(b, slice(None), num_tokens)
        parts = [share(b, slice(*pair), num_tokens) for pair in pairwise(bounds)]
        torch.testing.assert_close(sum(part.loss for part in parts), whole.loss)
        for name, value in whole.metrics.items():
            torch.testing.assert_close(sum(part.metrics[name] for part in parts), value, rtol=1e-5, atol=1e-6)


@given(seeds)
@settings(max_examples=30)
def test_the_first_update_has_ratio_one_and_clips_nothing(seed: int) -> None:
    b = batch(seed)
    b["old_logprobs"] = b["logprobs"]
    b["old_values"] = b["values"]
    num_tokens = int(b["mask"].sum())
    metrics = policy_share(b, slice(None), num_tokens).metrics
    assert metrics["ratio"] == pytest.approx(1.0)
    assert metrics["clip_fraction"] == 0
    assert metrics["approx_kl"] == 0
    assert value_share(b, slice(None), num_tokens).metrics["value_clip_fraction"] == 0


def test_a_value_that_moved_by_less_than_the_clip_is_not_clipped() -> None:
    # The held value was the old one plus the move, which rounds: some of these were counted as clipped.
    b = batch(0)
    for name in ("values", "old_values"):
        b[name] = b[name].clamp(-0.45, 0.45) * SETTINGS.value_clip
    assert value_share(b, slice(None), int(b["mask"].sum())).metrics["value_clip_fraction"] == 0


def test_the_policy_loss_stops_rewarding_a_move_past_the_clip() -> None:
    # eps = 0.2. Ratios (2, 0.5, 2, 0.5), advantages (1, 1, -1, -1): the minimum of r A and clip(r) A is
    # (1.2, 0.5, -2, -0.8), so the loss is -(1.2 + 0.5 - 2 - 0.8) / 4 = 0.275; tokens 0 and 3 are clipped and have no
    # gradient, tokens 1 and 2 have -r A / 4 = (-0.125, 0.5).
    old = torch.zeros(1, 5)
    logprobs = torch.tensor([[2.0, 0.5, 2.0, 0.5, 1.0]]).log().requires_grad_()
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0, 0.0]])
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    loss, metrics = policy_loss(logprobs, old, advantages, mask, num_tokens=4, settings=SETTINGS)
    assert loss.item() == pytest.approx(0.275)
    assert metrics["clip_fraction"] == 0.5
    assert metrics["ratio"] == pytest.approx(1.25)
    loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0.0, -0.125, 0.5, 0.0, 0.0]]))


def test_the_value_loss_takes_the_worse_of_the_free_and_the_held_error() -> None:
    # c = 0.2, old values 0, returns 1. V = 0.8: held at 0.2, errors 0.2 and 0.8, the held one is worse.
    # V = -0.5: held at -0.2, errors 1.5 and 1.2, the free one is worse. Loss = (0.64 + 2.25) / 2 / 2 = 0.7225.
    values, mask = torch.tensor([[0.8, -0.5, 9.0]]), torch.tensor([[1, 1, 0]])
    loss, metrics = value_loss(values, torch.zeros(1, 3), torch.ones(1, 3), mask, num_tokens=2, settings=SETTINGS)
    assert float(loss) == pytest.approx(0.7225)
    assert metrics["value_clip_fraction"] == 0.5


def test_an_update_is_done_until_the_policy_is_half_as_far_again_as_the_target() -> None:
    far = {"approx_kl": 0.031}
    assert within_target_kl({"approx_kl": 0.03}, PPO(target_kl=0.02))
    assert not within_target_kl(far, PPO(target_kl=0.02))
    assert within_target_kl(far, PPO())
    assert within_target_kl({"value_loss": 9.0}, PPO(target_kl=0.02))  # a critic's


def test_an_entropy_bonus_lowers_the_loss_by_its_share() -> None:
    zeros, mask = torch.zeros(1, 3), torch.tensor([[1, 1, 0]])
    entropy = torch.tensor([[1.0, 3.0, 100.0]])
    with_bonus = PPO(entropy_coefficient=0.1)
    loss, metrics = policy_loss(zeros, zeros, zeros, mask, num_tokens=2, settings=with_bonus, entropy=entropy)
    assert float(loss) == pytest.approx(-0.2)  # -0.1 * (1 + 3) / 2
    assert metrics["entropy"] == 2.0


def test_importance_weights_are_one_for_fresh_tokens_and_capped_for_stale_ones() -> None:
    mask = torch.tensor([[1, 1, 1, 0]])
    weights = importance_weights(torch.tensor([[0.0, 5.0, math.log(0.5), 0.0]]), torch.zeros(1, 4), mask, cap=2.0)
    torch.testing.assert_close(weights, torch.tensor([[1.0, 2.0, 0.5, 0.0]]))


def test_importance_weights_scale_the_policy_loss_of_each_token() -> None:
    b = batch(0)
    num_tokens = int(b["mask"].sum())
    twice = policy_share(b, slice(None), num_tokens, weights=torch.full((ROWS, WIDTH), 2.0)).metrics
    once = policy_share(b, slice(None), num_tokens).metrics
    assert float(twice["policy_loss"]) == pytest.approx(2 * float(once["policy_loss"]), rel=1e-5)


def test_explained_variance_is_one_for_a_perfect_critic_and_zero_for_a_constant_one() -> None:
    b = batch(4)
    num_tokens = int(b["mask"].sum())
    for values, expected in ((b["returns"], 1.0), (torch.full((ROWS, WIDTH), 2.0), 0.0)):
        _, metrics = value_loss(values, values, b["returns"], b["mask"], num_tokens=num_tokens, settings=SETTINGS)
        reported = final_metrics({name: float(value) for name, value in metrics.items()})
        assert reported["explained_variance"] == pytest.approx(expected, abs=1e-6)
        assert "error_square" not in reported


def test_explained_variance_of_constant_returns_is_zero() -> None:
    sums = {"return": 2.0, "return_square": 4.0, "error": 0.0, "error_square": 1.0}
    assert explained_variance(sums) == 0.0


def test_experience_metrics_are_means_over_rows_and_tokens() -> None:
    # Two rows of 3 and 1 response tokens, log pi - log ref = 0.5 on each: 2.0 nats in all, 1 per row, 0.5 per token.
    mask = response_mask(torch.tensor([1, 1]), torch.tensor([3, 1]), 5)
    # The first was cut, which costs 0.5.
    metrics = experience_metrics(
        torch.tensor([1.0, 2.0]),
        torch.full((2, 5), 0.5),
        torch.zeros(2, 5),
        mask,
        torch.tensor([True, False]),
        rewards=compute_rewards(torch.tensor([1.0, 2.0]), torch.tensor([True, False]), PPO(missing_end_penalty=0.5)),
    )
    assert metrics == {
        "score": 1.5,
        "paid_score": 1.25,
        "kl_to_ref": 1.0,
        "kl_to_ref_per_token": 0.5,
        "response_tokens": 2.0,
        "truncated_fraction": 0.5,
    }


@pytest.mark.parametrize(
    ("field", "value"), [("clip_ratio", 0.0), ("value_clip", -1.0), ("kl_coefficient", -0.1), ("gamma", 1.5)]
)
def test_a_setting_out_of_range_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValidationError, match=field):
        PPO(**{field: value})


def test_a_mean_over_responses_counts_each_alike_however_long() -> None:
    b = batch(1)
    lengths = b["mask"].sum(1, keepdim=True).clamp(min=1)
    mean = MaskedMean(divisor=ROWS - 1, weights=1.0 / lengths)  # one row has no response
    share = policy_loss(
        b["logprobs"], b["old_logprobs"], b["advantages"], b["mask"], num_tokens=7, settings=GRPO(), mean=mean
    )
    alone = [
        policy_loss(
            *(b[n][r : r + 1] for n in ("logprobs", "old_logprobs", "advantages", "mask")),
            num_tokens=int(k),
            settings=GRPO(),
        )
        for r, k in enumerate(b["mask"].sum(1))
        if k
    ]
    assert float(share.loss) == pytest.approx(float(sum(one.loss for one in alone)) / len(alone), rel=1e-5)


def test_clip_higher_lets_likelier_tokens_grow_and_no_others() -> None:
    settings, mask = GRPO(clip_ratio=0.2, clip_ratio_high=0.5), torch.tensor([[True]])

    def loss(ratio: float, advantage: float) -> float:
        old, new = torch.zeros(1, 1), torch.tensor([[math.log(ratio)]])
        return float(policy_loss(new, old, torch.tensor([[advantage]]), mask, num_tokens=1, settings=settings).loss)

    assert loss(1.4, 1.0) == pytest.approx(-1.4)
    assert loss(2.0, 1.0) == pytest.approx(-1.5)
    assert loss(0.5, -1.0) == pytest.approx(0.8)


def test_the_estimate_of_the_divergence_is_that_of_k3_and_never_negative() -> None:
    b = batch(2)
    count = int(b["mask"].sum())
    given = [b[name] for name in ("logprobs", "old_logprobs", "advantages", "mask")]
    plain = policy_loss(*given, num_tokens=count, settings=GRPO())
    kept = policy_loss(*given, num_tokens=count, settings=GRPO(), reference=Reference(b["values"], 0.5))
    log_ratio = (b["values"] - b["logprobs"])[b["mask"]].double()
    expected = (log_ratio.exp() - log_ratio - 1).mean()
    assert float(kept.metrics["kl_to_ref_estimate"]) == pytest.approx(float(expected), rel=1e-5)
    assert float(kept.loss - plain.loss) == pytest.approx(0.5 * float(expected), rel=1e-4)
    assert float(expected) >= 0


def test_without_a_reference_no_divergence_is_reported() -> None:
    b = batch(3)
    given, paid = (torch.zeros(ROWS), b["logprobs"], None, b["mask"], torch.zeros(ROWS)), torch.zeros(ROWS)
    assert not any("kl" in name for name in experience_metrics(*given, rewards=ResponseRewards(paid, paid)))
