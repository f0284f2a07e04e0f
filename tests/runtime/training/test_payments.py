"""A response is paid its score after scale, clip and penalties, and groups are compared by what is paid."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from meshwright.planner.job.algorithm_settings import GRPO, PPO
from meshwright.runtime.training.advantages import (
    RELATIVE_TOLERANCE,
    ResponseRewards,
    compute_rewards,
    groups_that_differ,
    overlong_penalties,
    share_with_signal,
)

NOT_CUT = torch.zeros(4)


def amounts(scores: list[float], truncated: Tensor, settings: PPO) -> list[float]:
    return compute_rewards(torch.tensor(scores), truncated, settings).amounts.tolist()


def signal(paid: ResponseRewards) -> float:
    return share_with_signal(paid, 4)


def test_scores_are_scaled_and_then_clipped_and_a_missing_end_is_neither() -> None:
    scores, cut = [2.0, -9.0, 0.25, 3.0], torch.tensor([False, False, False, True])
    assert amounts(scores, cut, PPO(reward_scale=2.0, reward_clip=3.0, missing_end_score=-7.0)) == [3, -3, 0.5, -7]
    assert amounts(scores, cut, PPO(reward_clip=2.5, missing_end_penalty=1.0)) == [2, -2.5, 0.25, 1.5]


def test_a_missing_end_is_paid_a_score_of_its_own_or_less_than_its_score() -> None:
    scores, cut = [2.0, 3.0], torch.tensor([True, False])
    assert amounts(scores, cut, PPO()) == [2, 3]
    assert amounts(scores, cut, PPO(missing_end_score=-1.0)) == [-1, 3]
    assert amounts(scores, cut, PPO(missing_end_penalty=0.5)) == [1.5, 3]
    assert amounts(scores, cut, PPO(truncation="bootstrap")) == [0, 3]


def test_length_costs_nothing_at_first_and_the_whole_penalty_at_the_longest() -> None:
    settings = GRPO(overlong_tokens=4, overlong_penalty=2.0)
    lengths = torch.tensor([1, 4, 5, 6, 8])
    assert overlong_penalties(lengths, 8, settings).tolist() == [0.0, 0.0, 0.5, 1.0, 2.0]
    assert compute_rewards(
        torch.ones(5), torch.zeros(5), settings, num_tokens=lengths, max_response=8
    ).amounts.tolist() == [
        1.0,
        1.0,
        0.5,
        0.0,
        -1.0,
    ]
    assert compute_rewards(torch.ones(5), torch.zeros(5), GRPO()).amounts.tolist() == [1.0] * 5


@pytest.mark.parametrize("size", [1e-8, 0.35, 3.3, 10.1, 100.1, -7.7, 1e8])
def test_rounding_of_float32_is_no_difference_and_a_thousandth_is_one(size: float) -> None:
    """Whatever the size of the scores is."""
    alike = torch.full((4,), size)
    for _ in range(8):
        alike[1] = torch.nextafter(alike[1], torch.tensor(torch.inf))
    assert len(set(alike.tolist())) == 2
    assert signal(compute_rewards(alike, NOT_CUT, GRPO())) == 0.0
    apart = torch.tensor([size, size, size * 1.001, size])
    assert signal(compute_rewards(apart, NOT_CUT, GRPO())) == 1.0


def test_scores_that_a_clip_makes_alike_are_no_signal() -> None:
    paid = compute_rewards(torch.tensor([5.0, 10.0, 7.0, 1.5]), NOT_CUT, GRPO(reward_clip=1.0))
    assert signal(paid) == 0.0


def test_a_clipped_score_hides_no_difference_of_those_within_the_clip() -> None:
    """What a clip leaves is exact, however large the score was."""
    assert signal(compute_rewards(torch.tensor([1e9, 1e9, 0.5, 1.0]), NOT_CUT, GRPO(reward_clip=1.0))) == 1.0


def test_scores_that_missing_ends_replace_are_no_signal_and_one_that_is_not_replaced_is() -> None:
    scores, settings = torch.tensor([5.0, 10.0, 7.0, 1.5]), GRPO(missing_end_score=-1.0)
    assert signal(compute_rewards(scores, torch.ones(4), settings)) == 0.0
    assert signal(compute_rewards(torch.ones(4), torch.tensor([0.0, 0.0, 0.0, 1.0]), settings)) == 1.0


def test_a_penalty_that_cancels_a_score_leaves_its_rounding_and_no_signal() -> None:
    """0.1 in float32 less a penalty of 0.1 is some 1e-9, which differs by as much from nothing at all."""
    scores = torch.tensor([0.1, 0.1, 0.1, 0.1])
    scores[2] = torch.nextafter(scores[2], torch.tensor(1.0))
    settings = GRPO(missing_end_penalty=0.1)
    assert signal(compute_rewards(scores, torch.ones(4), settings)) == 0.0
    lengths = torch.full((4,), 8)
    settings = GRPO(overlong_tokens=4, overlong_penalty=0.1)
    assert signal(compute_rewards(scores, NOT_CUT, settings, num_tokens=lengths, max_response=8)) == 0.0


def test_rewards_that_cancel_leave_the_rounding_of_the_largest_and_no_signal() -> None:
    total = torch.tensor([1e-6, 0.0, -1e-6, 0.0])
    assert signal(compute_rewards(total, NOT_CUT, GRPO(), sizes=torch.full((4,), 10.0))) == 0.0
    assert signal(compute_rewards(total, NOT_CUT, GRPO())) == 1.0


def test_length_alone_may_be_the_signal() -> None:
    settings = GRPO(overlong_tokens=4, overlong_penalty=1.0)
    lengths = torch.tensor([4, 4, 4, 8])
    assert signal(compute_rewards(torch.ones(4), NOT_CUT, settings, num_tokens=lengths, max_response=8)) == 1.0


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_a_score_that_is_not_finite_is_not_hidden(odd: float) -> None:
    assert signal(compute_rewards(torch.tensor([1.0, odd, 1.0, 1.0]), NOT_CUT, GRPO())) == 1.0


def test_the_threshold_is_a_share_of_the_largest_size_of_a_group_and_of_no_other_group() -> None:
    draw = np.random.default_rng(0)
    for _ in range(200):
        size = 10.0 ** draw.uniform(-8, 8)
        below, above = size * (1 - 0.9 * RELATIVE_TOLERANCE), size * (1 - 1.1 * RELATIVE_TOLERANCE)
        groups = torch.tensor([[size, below], [size, above], [1e9, 1e9]], dtype=torch.float64).view(-1)
        assert groups_that_differ(ResponseRewards(groups, groups), 2).tolist() == [False, True, False]
