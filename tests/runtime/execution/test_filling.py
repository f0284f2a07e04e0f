"""A batch is filled with the first groups that have a signal, in dealt order, and every prompt is counted."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from meshwright.planner.job.algorithm_settings import GRPO, RewardedSettings
from meshwright.profiles.errors import RunFailed
from meshwright.profiles.stages import RESPONSE_LENGTHS, REWARD_ERROR, REWARDS, SAMPLED_LENGTHS, SEQUENCE_DIGESTS
from meshwright.runtime.execution.sample_selection import GroupSampling, SampleReward, WaveFilling
from meshwright.runtime.messages.experience import StepExperience

SAMPLING = GroupSampling(num_groups=3, group_size=2, num_sampled=2, num_prompts=4, max_waves=75)
ALIKE, APART = (1.0, 1.0), (0.0, 1.0)


def put(
    wave: StepExperience,
    groups: Sequence[tuple[float, ...]],
    *,
    truncated: Sequence[int] = (),
    lengths: Mapping[int, int] | None = None,
) -> StepExperience:
    """Scores of a wave, tokens that tell their rows, and what is known of responses: of 1 token and not truncated."""
    for row in wave.rows:
        wave.experience.put("truncated", row, torch.tensor([row in truncated], dtype=torch.uint8))
        for name in (RESPONSE_LENGTHS, SAMPLED_LENGTHS):
            wave.experience.put(name, row, torch.tensor([(lengths or {}).get(row, 1)]))
        wave.experience.put(SEQUENCE_DIGESTS, row, torch.tensor([row]))
    for row, score in zip(wave.rows, (score for group in groups for score in group), strict=True):
        wave.experience.put("scores", row, torch.tensor([score]))
        wave.experience.put("tokens", row, torch.tensor([row]))
    return wave


def filled(*waves: Sequence[tuple[float, float]]) -> WaveFilling:
    filling = SAMPLING.filling(5)
    for groups in waves:
        assert not filling.is_full
        filling.take(put(filling.next_wave(), groups))
    assert filling.is_full
    return filling


def trained(filling: WaveFilling) -> list[int]:
    batch = StepExperience(step=5, rows=range(6))
    filling.fill(batch)
    assert batch.experience.rows("tokens") == batch.experience.rows("scores") == tuple(batch.rows)
    return [int(batch.experience.get("tokens", row)) for row in batch.rows]


def test_the_first_groups_with_a_signal_are_trained_on_in_dealt_order() -> None:
    assert trained(filled([APART, ALIKE, APART, ALIKE], [ALIKE, APART, APART, APART])) == [0, 1, 4, 5, 10, 11]


def test_groups_that_are_trained_on_are_draws_of_all_groups_with_a_signal() -> None:
    """A group that is likelier to have a signal is as likely to be met as among all that have one, whatever the waves
    were: the mean over what is trained on is that of a group with a signal."""
    draw, num_kinds, seen = random.Random(0), 4, []
    for _ in range(1500):
        filling = SAMPLING.filling(0)
        kinds: dict[int, int] = {}
        while not filling.is_full:
            wave = filling.next_wave()
            of_wave = [draw.randrange(num_kinds) for _ in range(SAMPLING.num_prompts)]
            kinds |= zip(wave.rows[:: SAMPLING.group_size], of_wave, strict=True)
            filling.take(put(wave, [APART if draw.random() < kind / num_kinds else ALIKE for kind in of_wave]))
        seen += [kinds[row] for row in trained(filling)[:: SAMPLING.group_size]]
    expected = sum(kind * kind for kind in range(num_kinds)) / sum(range(num_kinds))
    error = statistics.stdev(seen) / len(seen) ** 0.5
    assert abs(statistics.fmean(seen) - expected) < 3 * error


def test_every_prompt_is_counted() -> None:
    found = filled([APART, ALIKE, APART, ALIKE], [ALIKE, APART, APART, APART]).metrics
    assert (found["waves"], found["sampled_prompts"], found["trained_prompts"], found["dropped_prompts"]) == (
        2,
        8,
        3,
        5,
    )
    assert found["groups_with_signal"] == 5 / 8
    assert found["sampled_score"] == (5 * 0.5 + 3 * 1.0) / 8


def test_a_rank_fills_in_the_rows_that_it_holds() -> None:
    filling = SAMPLING.filling(0)
    wave = put(filling.next_wave(), [APART] * 4)
    wave.experience.put("values", 3, torch.tensor([7.0]))
    filling.take(wave)
    batch = StepExperience(step=0, rows=range(6))
    filling.fill(batch)
    assert batch.experience.rows("values") == (3,)


def test_rewards_of_hosts_are_added_up_before_groups_are_compared() -> None:
    """Two rewards that differ and make up for each other are no signal; a reward model's score beside them may be."""
    for of_model, share in ((0.0, 0.0), (1.0, 1.0)):
        sampling = GroupSampling(
            num_groups=1,
            group_size=2,
            num_sampled=2,
            num_prompts=1,
            max_waves=100,
            reward=SampleReward((1.0, 0.5), of_model),
        )
        filling = sampling.filling(0)
        wave = put(filling.next_wave(), [APART])
        for row, rewards in enumerate(([1.0, 0.0], [0.0, 2.0])):
            wave.experience.put(REWARDS, row, torch.tensor(rewards))
        filling.take(wave)
        assert filling.metrics["groups_with_signal"] == share


def share(settings: RewardedSettings, groups: Sequence[tuple[float, float]], **known: Any) -> float:
    """Of these groups, those with a signal, of responses with 8 tokens at most."""
    sampling = GroupSampling(
        num_groups=1,
        group_size=2,
        num_sampled=2,
        num_prompts=len(groups),
        max_waves=1,
        reward=SampleReward(settings=settings, max_response=8),
    )
    filling = sampling.filling(0)
    filling.take(put(filling.next_wave(), groups, **known))
    return filling.metrics["groups_with_signal"]


def test_the_best_samples_of_a_prompt_are_its_group_and_a_signal_is_a_difference_between_them() -> None:
    sampling = GroupSampling(num_groups=2, group_size=2, num_sampled=3, num_prompts=3, max_waves=9)
    filling = sampling.filling(5)
    filling.take(put(filling.next_wave(), [(1.0, 0.0, 1.0), (0.0, 1.0, 0.0), (2.0, 2.0, 3.0)]))
    batch = StepExperience(step=5, rows=range(4))
    filling.fill(batch)
    # The best two of the first prompt are alike. Of the second sample 0 is kept, the first of those that tie.
    assert [int(batch.experience.get("tokens", row)) for row in batch.rows] == [3, 4, 6, 8]
    found = filling.metrics
    assert found["groups_with_signal"] == 2 / 3
    assert (found["generated_samples"], found["trained_samples"], found["dropped_samples"]) == (9, 4, 5)
    assert found["tied_prompts"] == 2 / 3
    assert found["dropped_prompts"] == 1


def test_groups_are_compared_by_what_is_paid() -> None:
    assert share(GRPO(), [(5.0, 10.0)]) == 1
    assert share(GRPO(reward_clip=1.0), [(5.0, 10.0)]) == 0
    assert share(GRPO(missing_end_score=-1.0), [(5.0, 10.0)], truncated=[0, 1]) == 0
    assert share(GRPO(missing_end_score=-1.0), [(5.0, 5.0)], truncated=[1]) == 1
    assert share(GRPO(missing_end_penalty=0.5), [(5.0, 5.5)], truncated=[1]) == 0
    overlong = GRPO(overlong_tokens=4, overlong_penalty=1.0)
    assert share(overlong, [(5.0, 5.0)], lengths={0: 4, 1: 6}) == 1
    assert share(overlong, [(5.0, 5.5)], lengths={0: 4, 1: 6}) == 0


def test_scores_that_differ_by_rounding_are_no_signal() -> None:
    """Groups of one score each, the second of which is the next float; `tests.runtime.training` has more of them."""
    draw = random.Random(0)
    scores = torch.tensor([draw.choice([-1, 1]) * 10 ** draw.uniform(-8, 8) for _ in range(300)])
    following = torch.nextafter(scores, torch.tensor(torch.inf))
    assert share(GRPO(), list(zip(scores.tolist(), scores.tolist(), strict=True))) == 0
    assert share(GRPO(), list(zip(scores.tolist(), following.tolist(), strict=True))) == 0
    assert share(GRPO(), list(zip(scores.tolist(), (scores * 1.001).tolist(), strict=True))) == 1


def test_rewards_that_add_up_to_nothing_leave_no_signal_in_their_rounding() -> None:
    sampling = GroupSampling(
        num_groups=1, group_size=2, num_sampled=2, num_prompts=1, max_waves=1, reward=SampleReward((0.1, -0.3))
    )
    filling = sampling.filling(0)
    wave = put(filling.next_wave(), [APART])
    for row, rewards in enumerate(([300.0, 100.0], [30.3, 10.1])):
        del wave.experience.fields()["scores"][row]  # type: ignore[attr-defined]
        wave.experience.put(REWARDS, row, torch.tensor(rewards))
    filling.take(wave)
    assert wave.score(0) != wave.score(1)
    assert filling.metrics["groups_with_signal"] == 0


def test_the_same_response_twice_is_no_signal_however_far_apart_a_model_scores_it() -> None:
    """As one in bf16 does, in micro-batches of other shapes."""
    filling = GroupSampling(num_groups=1, group_size=2, num_sampled=2, num_prompts=1, max_waves=1).filling(0)
    wave = put(filling.next_wave(), [(0.5, 0.504)])
    wave.experience.put(SEQUENCE_DIGESTS, 1, torch.tensor([0]))
    filling.take(wave)
    assert filling.metrics["groups_with_signal"] == 0


def test_a_reward_that_failed_ends_the_run() -> None:
    filling = SAMPLING.filling(0)
    wave = put(filling.next_wave(), [APART] * 4)
    wave.experience.put(REWARD_ERROR, 1, torch.tensor(list(b"reward r of sample 0/1: gone"), dtype=torch.uint8))
    with pytest.raises(RunFailed, match="reward r of sample 0/1: gone"):
        filling.take(wave)


def test_waves_end_where_a_smaller_share_has_a_signal_than_any_job_may_expect() -> None:
    filling = SAMPLING.filling(7)
    for _ in range(SAMPLING.max_waves):
        filling.take(put(filling.next_wave(), [ALIKE] * 4))
    with pytest.raises(RunFailed, match="step 7: 0 of 300 groups have a signal, where a batch needs 3"):
        filling.next_wave()
