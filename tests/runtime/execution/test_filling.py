"""A batch is filled with the first groups that have a signal, in dealt order, and every prompt is counted."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

import pytest
import torch

from meshwright.profiles.errors import RunFailed
from meshwright.profiles.stages import REWARD_ERROR, REWARDS
from meshwright.runtime.execution.filling import GroupSampling, PaidBy, WaveFilling
from meshwright.runtime.messages.step_experience import StepExperience

SAMPLING = GroupSampling(num_groups=3, group_size=2, num_prompts=4, most_waves=75)
ALIKE, APART = (1.0, 1.0), (0.0, 1.0)


def put(wave: StepExperience, groups: Sequence[tuple[float, float]]) -> StepExperience:
    """Scores of a wave, and tokens that tell their rows."""
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
    assert (found["waves"], found["drawn_prompts"], found["trained_prompts"], found["dropped_prompts"]) == (2, 8, 3, 5)
    assert found["groups_with_signal"] == 5 / 8
    assert found["drawn_score"] == (5 * 0.5 + 3 * 1.0) / 8


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
            num_groups=1, group_size=2, num_prompts=1, most_waves=100, paid=PaidBy((1.0, 0.5), of_model)
        )
        filling = sampling.filling(0)
        wave = put(filling.next_wave(), [APART])
        for row, rewards in enumerate(([1.0, 0.0], [0.0, 2.0])):
            wave.experience.put(REWARDS, row, torch.tensor(rewards))
        filling.take(wave)
        assert filling.metrics["groups_with_signal"] == share


def test_a_reward_that_failed_ends_the_run() -> None:
    filling = SAMPLING.filling(0)
    wave = put(filling.next_wave(), [APART] * 4)
    wave.experience.put(REWARD_ERROR, 1, torch.tensor(list(b"reward r of sample 0/1: gone"), dtype=torch.uint8))
    with pytest.raises(RunFailed, match="reward r of sample 0/1: gone"):
        filling.take(wave)


def test_waves_end_where_a_smaller_share_has_a_signal_than_any_job_may_expect() -> None:
    filling = SAMPLING.filling(7)
    for _ in range(SAMPLING.most_waves):
        filling.take(put(filling.next_wave(), [ALIKE] * 4))
    with pytest.raises(RunFailed, match="step 7: 0 of 300 groups have a signal, where a batch needs 3"):
        filling.next_wave()
