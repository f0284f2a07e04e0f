"""The truncation benchmark: what it sets beside each other differs in cut rows alone, and its scores are constant."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.truncation.__main__ import course
from benchmarks.truncation.runs import write_constant_reward
from benchmarks.truncation.treatments import (
    TREATMENTS,
    Treatment,
    advantages_at_ones,
    targets_paid_twice,
    treated,
)
from meshwright.planner.job.algorithm_settings import PPO
from meshwright.runtime.training import training_batch
from meshwright.runtime.training.losses import ppo_targets
from tests.runtime.checkpoints import expected_scores, tokens, write_checkpoint

BEFORE, TERMINAL, BOOTSTRAP = TREATMENTS


def test_paid_twice_a_cut_row_of_which_all_is_known_seems_good() -> None:
    ended, cut = advantages_at_ones(BEFORE, num_tokens=4)
    assert ended == [0.0] * 4
    assert cut == pytest.approx([0.95**k for k in (3, 2, 1, 0)])


@pytest.mark.parametrize("treatment", [TERMINAL, BOOTSTRAP])
def test_paid_once_nothing_is_left_to_learn_of_it(treatment: Treatment) -> None:
    assert advantages_at_ones(treatment, num_tokens=4) == ([0.0] * 4, [0.0] * 4)


def test_rows_that_ended_are_treated_alike() -> None:
    draw = torch.Generator().manual_seed(0)
    logprobs, ref, values = torch.randn(3, 2, 7, generator=draw)
    mask = torch.arange(7) < torch.tensor([[6], [4]])
    facts = {"scores": torch.tensor([0.3, -2.0]), "logprobs": logprobs, "ref_logprobs": ref, "values": values}
    for settings in (PPO(whiten_advantages=False), PPO(whiten_advantages=False, truncation="bootstrap")):
        truncated = torch.tensor([False, True])
        twice = targets_paid_twice(**facts, mask=mask, truncated=truncated, settings=settings)
        once = ppo_targets(**facts, mask=mask, truncated=truncated, settings=settings)
        assert torch.equal(twice.advantages[0], once.advantages[0])
        assert (twice.advantages[1, :4] != once.advantages[1, :4]).all()


def test_runs_learn_from_the_treatment_and_from_todays_targets_again_after_it() -> None:
    with treated(BEFORE):
        assert training_batch.ppo_targets is targets_paid_twice
    assert training_batch.ppo_targets is ppo_targets


def test_the_constant_reward_says_one_whatever_it_reads(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", head="ForSequenceClassification")
    scores = expected_scores(write_constant_reward(source, tmp_path / "constant"), tokens())
    torch.testing.assert_close(scores, torch.ones_like(scores), atol=1e-5, rtol=0)


def test_a_course_has_the_mean_since_the_step_before() -> None:
    assert course([1.0, 2.0, 4.0, 6.0, 9.0], [0, 2, 3]) == [1.0, 3.0, 6.0]
