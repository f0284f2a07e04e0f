"""Of each prompt the samples that score best are trained on, of equal ones those that were dealt first."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch

from meshwright.planner.job.algorithm_settings import GRPO
from meshwright.profiles.errors import RunFailed
from meshwright.profiles.stages import RESPONSE_LENGTHS, REWARD_ERROR, REWARDS, SAMPLED_LENGTHS, SEQUENCE_DIGESTS
from meshwright.runtime.execution.sample_selection import FilterFilling, SampleFilter, SampleReward, best
from meshwright.runtime.messages.experience import StepExperience

SAMPLES = SampleFilter(num_prompts=2, num_sampled=4, num_kept=2)


def scored(scores: Sequence[float], samples: SampleFilter = SAMPLES) -> FilterFilling:
    """A filling that has taken its wave, whose tokens tell their rows."""
    filling = samples.filling(5)
    assert not filling.is_full
    wave = filling.next_wave()
    assert wave.is_wave
    assert wave.step == 5
    for row, score in zip(wave.rows, scores, strict=True):
        wave.experience.put("scores", row, torch.tensor([score]))
        wave.experience.put("tokens", row, torch.tensor([row]))
    filling.take(known(wave))
    assert filling.is_full
    return filling


def known(wave: StepExperience, truncated: Sequence[int] = ()) -> StepExperience:
    """A wave with what is told of its responses: all of 1 token, each another."""
    for row in wave.rows:
        wave.experience.put("truncated", row, torch.tensor([row in truncated], dtype=torch.uint8))
        for name in (RESPONSE_LENGTHS, SAMPLED_LENGTHS):
            wave.experience.put(name, row, torch.tensor([1]))
        wave.experience.put(SEQUENCE_DIGESTS, row, torch.tensor([row]))
    return wave


def kept(filling: FilterFilling, num_rows: int = 4) -> list[int]:
    batch = StepExperience(step=5, rows=range(num_rows))
    filling.fill(batch)
    assert batch.experience.rows("tokens") == batch.experience.rows("scores") == tuple(batch.rows)
    return [int(batch.experience.get("tokens", row)) for row in batch.rows]


def test_the_best_of_each_prompt_are_kept_in_the_order_in_which_they_were_dealt() -> None:
    assert kept(scored([1.0, 4.0, 2.0, 3.0, 0.0, 9.0, 8.0, 7.0])) == [1, 3, 5, 6]


def test_of_equal_samples_those_that_were_dealt_first_are_kept() -> None:
    filling = scored([0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0])
    assert kept(filling) == [0, 1, 4, 5]
    assert filling.metrics["tied_prompts"] == 1.0
    assert scored([0.0, 1.0, 1.0, 0.0, 3.0, 1.0, 2.0, 1.0]).metrics["tied_prompts"] == 0.0


def test_no_sample_that_is_dropped_is_better_than_one_that_is_kept() -> None:
    draw = random.Random(0)
    for number, size in itertools.product(range(1, 6), range(6, 9)):
        scores = [float(draw.randrange(4)) for _ in range(size)]
        chosen = best(scores, number)
        assert len(set(chosen)) == number
        worst = min(scores[index] for index in chosen)
        dropped = [index for index in range(size) if index not in chosen]
        assert all(scores[index] <= worst for index in dropped)
        last_tied = max(index for index in chosen if scores[index] == worst)
        assert all(index > last_tied for index in dropped if scores[index] == worst)


def test_a_score_that_is_no_number_is_below_all_others() -> None:
    assert best([float("nan"), -1e9, 3.0, float("nan")], 3) == (0, 1, 2)
    assert best([float("nan"), float("-inf"), 3.0], 2) == (1, 2)


def test_every_sample_is_counted() -> None:
    found = scored([1.0, 4.0, 2.0, 3.0, 0.0, 9.0, 8.0, 7.0]).metrics
    assert (found["generated_samples"], found["trained_samples"], found["dropped_samples"]) == (8, 4, 4)
    assert found["sampled_score"] == 34 / 8


def test_samples_are_compared_by_all_that_they_are_paid() -> None:
    samples = SampleFilter(num_prompts=1, num_sampled=3, num_kept=1, reward=SampleReward((1.0, 0.5), 2.0))
    filling = samples.filling(0)
    wave = filling.next_wave()
    paid = (([1.0, 0.0], 0.0), ([0.0, 3.0], 0.0), ([0.0, 0.0], 0.9))  # 1.0, 1.5 and 1.8
    for row, (rewards, score) in enumerate(paid):
        wave.experience.put(REWARDS, row, torch.tensor(rewards))
        wave.experience.put("scores", row, torch.tensor([score]))
        wave.experience.put("tokens", row, torch.tensor([row]))
    filling.take(known(wave))
    assert kept(filling, 1) == [2]
    assert filling.metrics["sampled_score"] == pytest.approx(4.3 / 3)


def test_a_sample_that_is_paid_less_for_its_missing_end_is_not_kept_for_its_score() -> None:
    paid = SampleReward(settings=GRPO(missing_end_score=-1.0))
    filling = SampleFilter(num_prompts=1, num_sampled=3, num_kept=1, reward=paid).filling(0)
    wave = known(filling.next_wave(), truncated=[0])
    for row, score in enumerate((9.0, 0.5, 1.0)):
        wave.experience.put("scores", row, torch.tensor([score]))
        wave.experience.put("tokens", row, torch.tensor([row]))
    filling.take(wave)
    assert kept(filling, 1) == [2]
    assert filling.metrics["sampled_score"] == 3.5


def test_a_rank_fills_in_the_rows_that_it_was_given() -> None:
    filling = SAMPLES.filling(0)
    wave = filling.next_wave()
    for row in wave.rows:
        wave.experience.put("scores", row, torch.tensor([float(row)]))
    wave.experience.put("values", 7, torch.tensor([7.0]))
    filling.take(known(wave))
    batch = StepExperience(step=0, rows=range(4))
    filling.fill(batch)
    assert batch.experience.rows("values") == (3,)


def test_a_reward_that_fails_ends_the_run() -> None:
    filling = SAMPLES.filling(0)
    wave = filling.next_wave()
    for row in wave.rows:
        wave.experience.put("scores", row, torch.tensor([1.0]))
    wave.experience.put(REWARD_ERROR, 1, torch.tensor(list(b"reward r of sample 0/1: gone"), dtype=torch.uint8))
    with pytest.raises(RunFailed, match="reward r of sample 0/1: gone"):
        filling.take(known(wave))
