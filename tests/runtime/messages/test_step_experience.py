"""The experience of a step counts its tokens by what it holds."""

from __future__ import annotations

import pytest
import torch

from meshwright.runtime.messages.step_experience import StepExperience


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
