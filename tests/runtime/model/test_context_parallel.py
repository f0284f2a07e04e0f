"""Parts of rows: they join to the rows, and what is gathered for a pass is not kept for the way back."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from meshwright.profiles.layout import Layout
from meshwright.runtime.model.context_parallel import (
    Gathered,
    SequenceShard,
    num_padding_tokens,
    num_tokens_of_rank,
    sequence_shard,
)
from meshwright.runtime.model.mesh import build_mesh
from tests.runtime.ranks import run_on_ranks

LENGTHS = (19, 1, 8, 5)
"""Of rows that 2 x cp slices divide, and that they do not; one is shorter than its slices are many."""


def _part(cp: int) -> dict[str, Tensor | list[int]]:
    mesh = build_mesh(Layout(cp=cp), 0)
    if not mesh.is_member:
        return {}
    parts = SequenceShard(LENGTHS, mesh.groups.cp)
    values = torch.arange(1, sum(LENGTHS) + 1)
    own = parts.select(values)
    return {
        "own": own,
        "joined": parts.gather_values(own),
        "gathered": parts.gather(torch.stack((own, parts.positions), dim=1)),
        "scattered": parts.reduce_scatter(parts.gather(own)),
        "scores": [sum(end - row for _, row, end in parts.slices())],
    }


@pytest.mark.parametrize("cp", [2, 4])
def test_the_parts_of_rows_join_to_the_rows(cp: int) -> None:
    values = torch.arange(1, sum(LENGTHS) + 1)
    sizes = [-(-length // (2 * cp)) * 2 * cp for length in LENGTHS]
    starts = list(accumulate(sizes, initial=0))
    found = [answer for answer in run_on_ranks(4, _part, cp) if answer]
    assert len({tuple(answer["scores"]) for answer in found}) == 1  # balanced: each sees as many keys
    for answer in found:
        assert torch.equal(answer["joined"], values)
        assert torch.equal(answer["scattered"], cp * answer["own"])
        for start, size, row in zip(starts, sizes, values.split(LENGTHS), strict=False):
            padded = torch.nn.functional.pad(row, (0, size - len(row)))
            assert torch.equal(answer["gathered"][start : start + size], torch.stack((padded, torch.arange(size)), 1))
    assert sum(len(answer["own"]) for answer in found) == sum(sizes)


class _Counted(SequenceShard):
    """Counts what is gathered."""

    num_gathers = 0

    def gather(self, own: Tensor) -> Tensor:
        self.num_gathers += 1
        return super().gather(own)


def _gather_and_return() -> tuple[int, int, float]:
    """Gathers forward, and with the backward pass; how far the gradient is from the sum over ranks."""
    mesh = build_mesh(Layout(cp=4), 0)
    parts = _Counted((64,), mesh.groups.cp)
    own = torch.full((parts.num_tokens, 8), float(mesh.cp_rank + 1), requires_grad=True)
    with Gathered(own, parts).whole() as whole:
        loss = (whole[8:40] ** 3).sum() * (mesh.cp_rank + 1)
    forward = parts.num_gathers
    loss.backward()
    seen = ((parts.positions >= 8) & (parts.positions < 40)).unsqueeze(1)
    expected = seen * (1 + 2 + 3 + 4) * 3 * own.detach() ** 2
    assert own.grad is not None
    return forward, parts.num_gathers, float((own.grad - expected).abs().max())


def test_what_is_gathered_is_not_kept_but_gathered_again_and_its_gradients_are_summed() -> None:
    assert run_on_ranks(4, _gather_and_return) == [(1, 2, 0.0)] * 4


def _who_cuts() -> tuple[bool, int]:
    """Whether a layout without cp cuts rows, and the tokens of every rank of one that does."""
    whole, cut = build_mesh(Layout(dp=4), 0), build_mesh(Layout(cp=4), 0)
    assert num_tokens_of_rank(LENGTHS, whole) == sum(LENGTHS)
    return sequence_shard(LENGTHS, whole) is not None, num_tokens_of_rank(LENGTHS, cut)


def test_rows_are_cut_where_the_layout_says_and_all_ranks_have_as_many_tokens() -> None:
    slices = [-(-length // 8) for length in LENGTHS]
    assert run_on_ranks(4, _who_cuts) == [(False, 2 * sum(slices))] * 4


@pytest.mark.parametrize(("layout", "padding"), [("tp4,sp", [0, 3, 2, 1, 0]), ("tp4", [0] * 5)])
def test_tokens_are_padded_to_what_sequence_parallelism_cuts(layout: str, padding: list[int]) -> None:
    assert [num_padding_tokens(num_tokens, Layout.parse(layout)) for num_tokens in range(5)] == padding
