"""Rewards, GAE and whitening: small examples worked out by hand, and laws."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshwright.planner.job.algorithm_settings import PPO, Truncation
from meshwright.runtime.training.advantages import (
    ends_response,
    generalized_advantages,
    moments,
    response_mask,
    token_rewards,
    whiten,
)
from meshwright.runtime.training.losses import ppo_targets

ROWS, WIDTH = 6, 12


def batch(seed: int) -> dict[str, Tensor]:
    """A random batch with every kind of row: no response, one token, full width, ended and truncated."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(1, 5, (ROWS,), generator=generator)
    responses = torch.randint(1, WIDTH - 5, (ROWS,), generator=generator)
    responses[0], responses[1], responses[2] = 0, 1, WIDTH - int(prompts[2])
    names = ("logprobs", "ref_logprobs", "values", "rewards")
    return {
        **{name: torch.randn(ROWS, WIDTH, generator=generator) for name in names},
        "scores": torch.randn(ROWS, generator=generator),
        "mask": response_mask(prompts, responses, WIDTH),
        "truncated": torch.rand(ROWS, generator=generator) < 0.5,
    }


def poisoned(x: Tensor, keep: Tensor) -> Tensor:
    """`x` with NaN and infinity wherever `keep` is False."""
    poison = torch.where(torch.arange(x.shape[1]) % 2 == 0, math.nan, math.inf)
    return torch.where(keep, x, poison)


seeds = st.integers(0, 10_000)


def test_the_mask_marks_the_predictions_of_response_tokens() -> None:
    # Row 0: tokens p p p r r . -> tokens 3 and 4 are predicted at 2 and 3. Row 1 fills the width: its last is masked.
    mask = response_mask(torch.tensor([3, 1]), torch.tensor([2, 5]), 6)
    assert mask.int().tolist() == [[0, 0, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]]
    assert ends_response(mask).int().tolist() == [[0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 1, 0]]


def test_the_score_lands_on_the_last_response_token_and_the_penalty_on_every_one() -> None:
    # log pi - log ref is 1 everywhere, beta = 0.1: each response token costs 0.1, the last one also earns the score 5.
    mask = response_mask(torch.tensor([2, 2]), torch.tensor([3, 0]), 6)
    rewards = token_rewards(torch.tensor([5.0, 7.0]), torch.ones(2, 6), torch.zeros(2, 6), mask, kl_coefficient=0.1)
    torch.testing.assert_close(rewards, torch.tensor([[0, -0.1, -0.1, 4.9, 0, 0], [0.0] * 6]))


def test_gae_of_a_row_that_ended() -> None:
    # gamma = 1, lambda = 0.5, rewards (0, 0, 1), values (0.5, 0.25, 0.5), nothing after the end:
    # delta = (-0.25, 0.25, 0.5); A_2 = 0.5, A_1 = 0.25 + 0.5 * 0.5 = 0.5, A_0 = -0.25 + 0.5 * 0.5 = 0.
    rewards, values = torch.tensor([[0.0, 0, 1, 0, 0]]), torch.tensor([[0.5, 0.25, 0.5, 8, 8]])
    mask = response_mask(torch.tensor([1]), torch.tensor([3]), 5)
    advantages = generalized_advantages(rewards, values, mask, torch.tensor([False]), gamma=1.0, gae_lambda=0.5)
    torch.testing.assert_close(advantages, torch.tensor([[0, 0.5, 0.5, 0, 0]]))


def test_gae_of_a_bootstrapped_row_continues_with_the_value_after_its_last_token() -> None:
    # As above, with nothing paid, and the critic says 2 after the last token: delta = (-0.25, 0.25, 1.5);
    # A_2 = 1.5, A_1 = 0.25 + 0.75 = 1, A_0 = -0.25 + 0.5 = 0.25.
    rewards, values = torch.zeros(1, 5), torch.tensor([[0.5, 0.25, 0.5, 2, 8]])
    mask = response_mask(torch.tensor([1]), torch.tensor([3]), 5)
    advantages = generalized_advantages(rewards, values, mask, torch.tensor([True]), gamma=1.0, gae_lambda=0.5)
    torch.testing.assert_close(advantages, torch.tensor([[0.25, 1, 1.5, 0, 0]]))


@pytest.mark.parametrize("truncation", get_args(Truncation))
def test_a_response_that_was_cut_earns_no_more_than_one_that_ended(truncation: Truncation) -> None:
    # All scores are 1 and the critic says so everywhere: nothing is better than expected, cut or not.
    mask, ones = response_mask(torch.tensor([2, 2]), torch.tensor([4, 4]), 8), torch.ones(2, 8)
    goals = ppo_targets(
        scores=torch.ones(2),
        logprobs=ones,
        ref_logprobs=ones,
        values=ones,
        mask=mask,
        truncated=torch.tensor([True, False]),
        settings=PPO(whiten_advantages=False, truncation=truncation),
    )
    assert not goals.advantages.any()
    assert goals.returns[mask].eq(1).all()


def test_bootstrapping_pays_no_score_at_a_cut_and_keeps_the_penalty() -> None:
    # One response token each, the critic says 3 after it; log pi - log ref is 1 and beta 0.5: the cut row returns
    # -0.5 + 3 whatever its score, the other one 7 - 0.5.
    mask = response_mask(torch.tensor([1, 1]), torch.tensor([1, 1]), 3)
    goals = ppo_targets(
        scores=torch.tensor([100.0, 7.0]),
        logprobs=torch.ones(2, 3),
        ref_logprobs=torch.zeros(2, 3),
        values=torch.tensor([[1.0, 3.0, 9.0]] * 2),
        mask=mask,
        truncated=torch.tensor([1, 0], dtype=torch.uint8),
        settings=PPO(kl_coefficient=0.5, truncation="bootstrap"),
    )
    assert goals.returns[mask].tolist() == [2.5, 6.5]


@pytest.mark.parametrize(
    ("features", "start"),
    [(torch.eye(WIDTH), 1.0), (torch.stack([torch.ones(WIDTH), torch.arange(WIDTH) / WIDTH], dim=1), 0.0)],
    ids=["tabular", "linear"],
)
def test_a_critic_of_a_fixed_policy_finds_the_score_where_nine_in_ten_are_cut(features: Tensor, start: float) -> None:
    # Values [S] are a table or a line over positions, fitted to the returns of one batch after another; all scores -1.
    generator, score = torch.Generator().manual_seed(0), -1.0
    weights = torch.full((features.shape[1],), start)
    rows = 200
    for _ in range(60):
        truncated = torch.rand(rows, generator=generator) < 0.9
        lengths = torch.where(truncated, WIDTH - 3, torch.randint(1, WIDTH - 3, (rows,), generator=generator))
        mask = response_mask(torch.full((rows,), 2), lengths, WIDTH)
        goals = ppo_targets(
            scores=torch.full((rows,), score),
            logprobs=torch.zeros(rows, WIDTH),
            ref_logprobs=torch.zeros(rows, WIDTH),
            values=(features @ weights).expand(rows, WIDTH),
            mask=mask,
            truncated=truncated,
            settings=PPO(),
        )
        inputs = features.expand(rows, *features.shape)[mask]
        errors = goals.returns[mask] - inputs @ weights
        weights = weights + torch.linalg.lstsq(inputs, errors[:, None], driver="gelsd").solution[:, 0]
        assert min(score, start) - 0.1 < float((inputs @ weights).min())
        assert float((inputs @ weights).max()) < max(score, start) + 0.1
    torch.testing.assert_close(inputs @ weights, torch.full((len(inputs),), score))


@given(seeds, st.sampled_from([0.0, 0.9, 1.0]))
@settings(max_examples=30)
def test_gae_with_lambda_one_is_the_discounted_return_minus_the_value(seed: int, gamma: float) -> None:
    b = batch(seed)
    advantages = generalized_advantages(
        b["rewards"], b["values"], b["mask"], b["truncated"], gamma=gamma, gae_lambda=1.0
    )
    for row, mask in enumerate(b["mask"]):
        positions = mask.nonzero().flatten().tolist()
        for start in positions:
            rest = [i for i in positions if i >= start]
            expected = sum(gamma**k * float(b["rewards"][row, i]) for k, i in enumerate(rest))
            if b["truncated"][row]:
                expected += gamma ** len(rest) * float(b["values"][row, rest[-1] + 1])
            assert math.isclose(
                float(advantages[row, start]), expected - float(b["values"][row, start]), rel_tol=1e-4, abs_tol=1e-5
            )


@given(seeds)
@settings(max_examples=30)
def test_gae_with_lambda_zero_is_the_one_step_difference(seed: int) -> None:
    b = batch(seed)
    b["truncated"][:] = False
    advantages = generalized_advantages(b["rewards"], b["values"], b["mask"], b["truncated"], gamma=1.0, gae_lambda=0.0)
    following = torch.where(b["mask"].roll(-1, 1), b["values"].roll(-1, 1), 0.0)
    expected = torch.where(b["mask"], b["rewards"] + following - b["values"], 0.0)
    torch.testing.assert_close(advantages, expected)


@given(seeds, st.sampled_from(get_args(Truncation)))
@settings(max_examples=30)
def test_padding_changes_no_bit_of_the_targets(seed: int, truncation: Truncation) -> None:
    b, ppo = batch(seed), PPO(truncation=truncation)
    mask = b["mask"]
    after_the_end = ends_response(mask).roll(1, 1) & b["truncated"][:, None] & (truncation == "bootstrap")
    clean = ppo_targets(
        **{name: b[name] for name in ("scores", "logprobs", "ref_logprobs", "values", "mask", "truncated")},
        settings=ppo,
    )
    dirty = ppo_targets(
        scores=b["scores"],
        logprobs=poisoned(b["logprobs"], mask),
        ref_logprobs=poisoned(b["ref_logprobs"], mask),
        values=poisoned(b["values"], mask | after_the_end),
        mask=mask,
        truncated=b["truncated"],
        settings=ppo,
    )
    assert torch.equal(clean.advantages, dirty.advantages)
    assert torch.equal(clean.returns, dirty.returns)


def test_whitened_advantages_have_mean_zero_and_variance_one_over_the_response() -> None:
    b = batch(1)
    inside = whiten(b["rewards"] * 7 + 3, b["mask"])[b["mask"]]
    assert float(inside.mean()) == pytest.approx(0, abs=1e-6)
    assert float(inside.var(correction=0)) == pytest.approx(1, abs=1e-5)


def test_whitening_a_constant_gives_zeros() -> None:
    mask = torch.tensor([[1, 1, 0]])
    assert whiten(torch.full((1, 3), 4.0), mask).tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("size", [1e-8, 0.35, 3.3, 10.1, 100.1, -7.7, 1e8])
def test_whitening_what_differs_by_rounding_alone_gives_exactly_zeros(size: float) -> None:
    x, mask = torch.full((7, 33), size), torch.ones(7, 33)
    assert not whiten(x, mask).any()
    x[2, 4:] = torch.nextafter(x[2, 4:], torch.tensor(torch.inf))
    assert not whiten(x, mask).any()
    assert not whiten(x.double() - size, mask, size=abs(size)).any()
    x[2, 4:] *= 1.01
    assert whiten(x, mask).all()


def test_a_critic_that_expects_all_that_is_paid_leaves_nothing_to_whiten() -> None:
    """Rounding of values and rewards, which GAE adds up, is not made a deviation of 1."""
    mask = response_mask(torch.tensor([2, 2]), torch.tensor([9, 9]), WIDTH)
    goals = ppo_targets(
        scores=torch.full((2,), 10.1),
        logprobs=torch.zeros(2, WIDTH),
        ref_logprobs=torch.zeros(2, WIDTH),
        values=torch.full((2, WIDTH), 10.1) * (1 + 1e-7 * torch.randn(2, WIDTH, generator=torch.manual_seed(0))),
        mask=mask,
        truncated=torch.zeros(2),
        settings=PPO(),
    )
    assert not goals.advantages.any()


def test_shards_whitened_with_the_summed_moments_equal_the_batch_whitened_whole() -> None:
    b = batch(2)
    shards = [(b["rewards"][rows], b["mask"][rows]) for rows in (slice(0, 2), slice(2, ROWS))]
    totals = torch.stack([moments(*shard) for shard in shards]).sum(dim=0)
    together = torch.cat([whiten(*shard, totals) for shard in shards])
    torch.testing.assert_close(together, whiten(b["rewards"], b["mask"]))


def test_returns_are_unwhitened_advantages_plus_values() -> None:
    b = batch(3)
    inputs = {name: b[name] for name in ("scores", "logprobs", "ref_logprobs", "values", "mask", "truncated")}
    plain = ppo_targets(**inputs, settings=PPO(whiten_advantages=False))
    white = ppo_targets(**inputs, settings=PPO(whiten_advantages=True))
    torch.testing.assert_close(plain.returns[b["mask"]], (plain.advantages + b["values"])[b["mask"]])
    assert torch.equal(white.returns, plain.returns)
    torch.testing.assert_close(white.advantages, whiten(plain.advantages, b["mask"]))
