"""What a tool told carries no loss, and what is earned behind it counts for what was drawn before."""

from __future__ import annotations

import torch

from meshwright.profiles.stages import TOLD
from meshwright.runtime.training.advantages import generalized_advantages, response_mask
from meshwright.runtime.training.told_tokens import ClosedColumns, drawn_mask

PROMPTS, RESPONSES, WIDTH = torch.tensor([3, 2]), torch.tensor([6, 4]), 10
RESPONSE = response_mask(PROMPTS, RESPONSES, WIDTH)
VERSIONS = torch.tensor([[0, 0, 4, 4, TOLD, TOLD, 5, 5, 0, 0], [0, 4, TOLD, 4, 4, 0, 0, 0, 0, 0]])
DRAWN = drawn_mask(RESPONSE, VERSIONS)


def test_told_tokens_are_no_part_of_the_mask() -> None:
    assert DRAWN.sum(1).tolist() == [4, 3]
    assert not (DRAWN & (VERSIONS == TOLD)).any()


def test_columns_come_back_to_where_they_were() -> None:
    columns, values = ClosedColumns(RESPONSE, DRAWN), torch.arange(20).view(2, 10)
    closed = columns.closed({"values": values, "mask": DRAWN})
    assert closed["mask"].int().diff(dim=1).le(0).all()
    assert torch.equal(columns.opened(closed)["values"], values)


def test_advantages_pass_over_what_was_told() -> None:
    """As of rows in which the told tokens never were, their values those behind the last token included."""
    torch.manual_seed(0)
    rewards, values, cut = torch.randn(2, WIDTH), torch.randn(2, WIDTH), torch.tensor([True, False])
    columns = ClosedColumns(RESPONSE, DRAWN)
    closed = columns.closed({"rewards": rewards, "values": values, "mask": DRAWN})
    found = columns.opened({"a": generalized_advantages(**closed, bootstrapped=cut, gamma=0.9, gae_lambda=0.8)})["a"]
    for row, prompt, length in zip(range(2), PROMPTS.tolist(), RESPONSES.tolist(), strict=True):
        kept = [*DRAWN[row].nonzero()[:, 0].tolist(), prompt - 1 + length]
        mask = torch.ones(1, len(kept), dtype=torch.bool)
        mask[0, -1] = False
        alone = generalized_advantages(
            rewards[row : row + 1, kept],
            values[row : row + 1, kept],
            mask,
            cut[row : row + 1],
            gamma=0.9,
            gae_lambda=0.8,
        )
        assert torch.equal(found[row, kept[:-1]], alone[0, :-1])
    assert not found[~DRAWN].any()
