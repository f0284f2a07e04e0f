"""Rows that share a call attend as each does alone, forward and backward."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from meshwright.runtime.model.attention import CoreAttention
from tests.runtime.model.test_equal_rows import alike_here_and_there, seeded
from tests.runtime.model.test_kv_cache import ATTENTION, ROTARY, Row, attend, continued, random_rows, used_cache


def test_equal_neighbours_share_a_call() -> None:
    packing = ROTARY.pack([5, 5, 5, 2, 5], torch.empty(0))
    assert [run.num_rows for run in packing.runs] == [3, 1, 1]
    rows = continued(used_cache(), [0, 1, 3, 4, 5], [7, 7, 7, 7, 6], [2] * 5)
    assert [run.num_rows for run in rows.runs] == [4, 1]


@seeded
def test_rows_together_answer_and_learn_as_each_does_alone(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [length for _, _, length in alike_here_and_there(draw)]
    rows, tail = random_rows(lengths, seed), draw.randint(0, 3)
    together, alone = trained(rows, tail=tail), [trained([row]) for row in rows]
    for found, expected in zip(together, (torch.cat(parts) for parts in zip(*alone, strict=True)), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def trained(rows: list[Row], *, tail: int = 0, attention: CoreAttention = ATTENTION) -> tuple[Tensor, ...]:
    """What the rows answer, without what is behind them, and the gradients of its squares by what they are given."""
    leaves = [Row(*(heads.clone().requires_grad_() for heads in row)) for row in rows]
    output = attend(leaves, tail=tail, attention=attention)[: sum(len(row.query) for row in rows)]
    output.square().sum().backward()
    gradients = (torch.cat([heads.grad.flatten(1) for heads in kind]) for kind in zip(*leaves, strict=True))
    return output.detach(), *gradients


@seeded
def test_rows_continued_together_answer_as_each_does_alone(seed: int) -> None:
    draw = random.Random(seed)
    rows = alike_here_and_there(draw)
    whole = random_rows([cached + length for _, cached, length in rows], seed)
    together, alone = used_cache(), used_cache()
    for cache in (together, alone):
        for (slot, cached, _), row in zip(rows, whole, strict=True):
            if cached:
                attend([row.chunk(0, cached)], continued(cache, [slot], [0], [cached]))
    chunks = [row.chunk(cached, length) for (_, cached, length), row in zip(rows, whole, strict=True)]
    slots, before, lengths = map(list, zip(*rows, strict=True))
    found = attend(chunks, continued(together, slots, before, lengths), tail=draw.randint(0, 3))
    expected = [
        attend([chunk], continued(alone, [slot], [cached], [length]))
        for (slot, cached, length), chunk in zip(rows, chunks, strict=True)
    ]
    torch.testing.assert_close(found[: sum(lengths)], torch.cat(expected), atol=1e-6, rtol=0)
    torch.testing.assert_close(together.keys, alone.keys, atol=0, rtol=0, equal_nan=True)
