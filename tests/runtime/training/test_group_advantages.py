"""Samples are judged by the others of their prompt or of their step, whatever lies outside the mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.planner.plan.critic_free_settings import GRPO, RLOO, CriticFreeSettings, Reinforce
from meshwright.runtime.training.advantages import response_mask
from meshwright.runtime.training.group_advantages import (
    critic_free_advantages,
    leave_one_out,
    overlong_penalties,
    relative_to_group,
    returns_to_go,
    share_with_signal,
)

GROUP, WIDTH, MAX_RESPONSE = 4, 12, 8
PROMPTS, RESPONSES = torch.full((8,), 3), torch.tensor([1, 8, 3, 5, 2, 8, 4, 6])
MASK = response_mask(PROMPTS, RESPONSES, WIDTH)
NOT_CUT = torch.zeros(8)
ALL: list[CriticFreeSettings] = [
    GRPO(),
    GRPO(normalise_by_std=False, loss_mean="constant"),
    RLOO(),
    Reinforce(),
    Reinforce(group_baseline=True),
]


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def advantages(
    settings: CriticFreeSettings, *, scores: Tensor, ref: Tensor | None = None, logprobs: Tensor | None = None
) -> Tensor:
    return critic_free_advantages(
        scores=scores,
        logprobs=noise(1, 8, WIDTH) if logprobs is None else logprobs,
        ref_logprobs=ref,
        mask=MASK,
        truncated=NOT_CUT,
        settings=settings,
        group_size=GROUP,
        max_response=MAX_RESPONSE,
    )


def test_a_group_has_mean_zero_and_deviation_one() -> None:
    found = relative_to_group(noise(0, 8), GROUP, by_std=True).view(-1, GROUP)
    assert torch.allclose(found.mean(1), torch.zeros(2).double())
    assert torch.allclose(found.std(1), torch.ones(2).double(), atol=1e-5)


def test_without_the_deviation_distances_stay_what_they_are() -> None:
    scores = noise(0, 8)
    found = relative_to_group(scores, GROUP, by_std=False)
    assert torch.allclose(found[0] - found[3], scores[0] - scores[3])


def test_leaving_one_out_compares_with_the_mean_of_the_others() -> None:
    rewards = torch.tensor([1.0, 2.0, 3.0, 6.0])
    assert leave_one_out(rewards, 4).tolist() == pytest.approx([1 - 11 / 3, 2 - 10 / 3, 3 - 3, 6 - 2])


def test_leaving_one_out_is_the_distance_to_the_mean_times_n_over_n_less_one() -> None:
    rewards = noise(2, 8)
    apart = relative_to_group(rewards, GROUP, by_std=False)
    assert torch.allclose(leave_one_out(rewards, GROUP), apart * GROUP / (GROUP - 1))


def test_a_return_is_what_is_paid_from_a_token_on() -> None:
    rewards = torch.where(MASK, noise(3, 8, WIDTH), 0.0)
    found = returns_to_go(rewards, MASK)
    assert torch.allclose(found[1, 2:10], rewards[1, 2:10].flip(0).cumsum(0).flip(0))
    assert not found[~MASK].any()


def test_length_costs_nothing_at_first_and_the_whole_penalty_at_the_longest() -> None:
    settings = GRPO(overlong_tokens=4, overlong_penalty=2.0)
    lengths = torch.tensor([1, 4, 5, 6, 8])
    assert overlong_penalties(lengths, 8, settings).tolist() == [0.0, 0.0, 0.5, 1.0, 2.0]
    assert not overlong_penalties(lengths, 8, GRPO()).any()


def test_groups_of_equal_scores_teach_nothing() -> None:
    scores = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0])
    assert share_with_signal(scores, GROUP) == 0.5
    assert not advantages(GRPO(), scores=scores)[:4].any()


@pytest.mark.parametrize("settings", ALL, ids=str)
def test_nothing_outside_the_mask_counts(settings: CriticFreeSettings) -> None:
    scores, logprobs, ref = noise(4, 8), noise(1, 8, WIDTH), noise(5, 8, WIDTH)
    odd = torch.where(MASK, logprobs, torch.nan)
    found = advantages(settings, scores=scores, ref=ref, logprobs=logprobs)
    assert torch.equal(found, advantages(settings, scores=scores, ref=torch.where(MASK, ref, torch.inf), logprobs=odd))
    assert not found[~MASK].any()


@pytest.mark.parametrize("settings", ALL, ids=str)
def test_a_better_sample_of_a_group_has_the_larger_advantage(settings: CriticFreeSettings) -> None:
    scores = torch.arange(8.0).double()
    found = advantages(settings, scores=scores)[:, 2]  # the first token of every response
    assert all(found[row] < found[row + 1] for row in (0, 1, 2, 4, 5, 6))


@pytest.mark.parametrize("settings", [RLOO(), Reinforce()], ids=str)
def test_going_away_from_the_reference_costs_advantage_where_it_is_part_of_the_reward(
    settings: CriticFreeSettings,
) -> None:
    scores, logprobs, away = noise(4, 8), noise(1, 8, WIDTH), torch.zeros(8, WIDTH).double()
    away[3, 2:7] = 1.0
    near, far = (advantages(settings, scores=scores, ref=logprobs - x, logprobs=logprobs) for x in (0 * away, away))
    assert far[3, 2] < near[3, 2]
    assert torch.equal(
        advantages(GRPO(), scores=scores, ref=logprobs, logprobs=logprobs),
        advantages(GRPO(), scores=scores, ref=logprobs - away, logprobs=logprobs),
    )


def test_without_a_reference_nothing_is_charged() -> None:
    scores, logprobs = noise(4, 8), noise(1, 8, WIDTH)
    same = advantages(RLOO(), scores=scores, ref=logprobs, logprobs=logprobs)
    assert torch.equal(advantages(RLOO(), scores=scores, logprobs=logprobs), same)
