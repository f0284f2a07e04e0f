"""The experience of a step counts its tokens by what it holds."""

from __future__ import annotations

import pytest
import torch

from meshwright.profiles.stages import REWARDS, SEQUENCE_DIGESTS
from meshwright.runtime.messages.experience import StepExperience, digest_of


def held(*lengths: tuple[int, int]) -> StepExperience:
    """Rows of so many prompt and response tokens."""
    batch = StepExperience(step=3, rows=range(len(lengths)))
    for row, (prompt, response) in enumerate(lengths):
        batch.experience.put("tokens", row, torch.zeros(prompt + response, dtype=torch.int64))
        batch.experience.put("prompt_lengths", row, torch.tensor([prompt]))
    return batch


def test_a_row_has_the_tokens_of_its_prompt_and_its_response() -> None:
    batch = held((3, 4), (1, 0))
    assert batch.lengths() == {0: 7, 1: 1}
    assert [batch.prompt_length(row) for row in batch.rows] == [3, 1]


def test_the_length_of_a_row_that_is_not_held_is_not_made_up() -> None:
    with pytest.raises(KeyError):
        StepExperience(step=0, rows=range(2)).lengths()


def test_two_batches_share_nothing() -> None:
    one, other = held((1, 1)), StepExperience(step=3, rows=range(1))
    assert one.experience.rows("tokens") == (0,)
    assert other.experience.rows("tokens") == ()


def test_a_row_is_paid_the_reward_models_score_or_the_weighted_sum_of_all() -> None:
    batch = held((3, 4), (1, 2))
    for row, score in enumerate((2.0, -1.0)):
        batch.experience.put("scores", row, torch.tensor([score]))
        batch.experience.put(REWARDS, row, torch.tensor([1.0, 4.0]))
    assert [float(batch.score(row)) for row in batch.rows] == [2.0, -1.0]
    batch.sum_rewards((3.0, 0.25), 0.5)
    batch.sum_rewards((3.0, 0.25), 0.5)  # the critic does it again
    assert [float(batch.score(row)) for row in batch.rows] == [5.0, 3.5]


def test_without_a_reward_model_the_sum_is_that_of_the_rewards_on_hosts() -> None:
    batch = held((3, 4))
    batch.experience.put(REWARDS, 0, torch.tensor([1.0, 4.0]))
    batch.sum_rewards((3.0, 0.25), 0.5)
    assert float(batch.score(0)) == 4.0


def test_a_sum_is_known_to_the_rounding_of_its_largest_term() -> None:
    batch = held((3, 4), (1, 2))
    for row, score in enumerate((2.0, -1.0)):
        batch.experience.put("scores", row, torch.tensor([score]))
        batch.experience.put(REWARDS, row, torch.tensor([7.0, 42.0]))
    assert [float(batch.score_size(row)) for row in batch.rows] == [2.0, 1.0]
    batch.sum_rewards((3.0, -0.5), 1.0)
    assert [float(batch.score(row)) for row in batch.rows] == [2.0, -1.0]
    assert [float(batch.score_size(row)) for row in batch.rows] == [21.0, 21.0]


def test_sequences_that_are_the_same_token_by_token_have_one_score_of_the_reward_model() -> None:
    batch = StepExperience(step=0, rows=range(4))
    for row, (tokens, score) in enumerate((([1, 2], 0.5), ([1, 3], 0.7), ([1, 2], 0.5000001), ([1, 2, 0], 0.5000002))):
        batch.experience.put("tokens", row, torch.tensor(tokens))
        batch.experience.put("scores", row, torch.tensor([score]))
    kept = [float(batch.score(row)) for row in batch.rows]
    batch.share_scores_of_duplicates()
    assert [float(batch.score(row)) for row in batch.rows] == [kept[0], kept[1], kept[0], kept[3]]


def test_a_rank_without_tokens_knows_the_same_sequences_by_their_digests() -> None:
    batch = StepExperience(step=0, rows=range(2), is_wave=True)
    for row in batch.rows:
        batch.experience.put(SEQUENCE_DIGESTS, row, torch.tensor([digest_of(torch.tensor([1, 2]))]))
        batch.experience.put("scores", row, torch.tensor([float(row)]))
    batch.share_scores_of_duplicates()
    assert [float(batch.score(row)) for row in batch.rows] == [0.0, 0.0]


def test_other_tokens_have_another_digest() -> None:
    some = [torch.tensor(tokens) for tokens in ([1, 2], [2, 1], [1, 2, 0], [], [0])]
    assert len({digest_of(tokens) for tokens in some}) == len(some)
    assert all(0 <= digest_of(tokens) < 2**63 for tokens in some)


def test_held_out_batches_have_a_key_of_their_own() -> None:
    assert held().key == 3
    assert StepExperience(step=3, rows=range(0), held_out="held_out").key == -1


def test_held_out_batches_and_waves_are_told_from_the_batch_of_their_step() -> None:
    keys = {
        StepExperience(step=0, rows=range(1), **kind).key for kind in ({}, {"held_out": "held_out"}, {"is_wave": True})
    }
    assert len(keys) == 3
    assert keys.isdisjoint(StepExperience(step=step, rows=range(1)).key for step in range(1, 9))
