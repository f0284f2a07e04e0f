"""Attention of packed rows is that of each row alone, over what the cache has of it and its own tokens."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from meshwright.runtime.inference.attention import PackedAttention, packed_reads
from meshwright.runtime.model.limited_attention import AttentionLimits
from tests.runtime.model.filled_caches import KV_HEADS, MAX_TOKENS, NUM_ROWS, SIZE, filled
from tests.seeds import seeds

PER_GROUP = 3


def by_row(turned: Tensor, keys: Tensor, values: Tensor, limits: AttentionLimits) -> Tensor:
    """[T, heads * D] of one row's turned heads [T, kv_heads, ...] and its keys and values before [kv_heads, n, D]."""
    num_tokens, cached = len(turned), keys.shape[1]
    queries, new = turned[:, :, :-2], turned[:, :, -2:].permute(2, 1, 0, 3)
    keys, values = (torch.cat(both, dim=1) for both in ((keys, new[0]), (values, new[1])))
    scores = torch.einsum("thgd,hkd->htgk", queries, keys) * SIZE**-0.5
    scores = limits.cap * (scores / limits.cap).tanh() if limits.cap else scores
    distance = cached + torch.arange(num_tokens)[:, None] - torch.arange(cached + num_tokens)
    hidden = (distance < 0) | (distance >= (limits.window or MAX_TOKENS))
    weights = scores.masked_fill(hidden[:, None], -torch.inf).softmax(dim=-1)
    return torch.einsum("htgk,hkd->thgd", weights, values).flatten(1)


@pytest.mark.parametrize("limits", [AttentionLimits(), AttentionLimits(21), AttentionLimits(40, 1.5)])
@seeds(3, all=12)
def test_each_packed_row_sees_its_own_tokens_and_those_before(seed: int, limits: AttentionLimits) -> None:
    cache, cached = filled(2 * seed)  # of an even seed no two rows share blocks
    draw = random.Random(seed)
    rows = draw.sample(range(NUM_ROWS), draw.randint(1, 6))
    before, lengths = [], []
    for row in rows:
        begins = draw.random() < 0.6
        before.append(0 if begins else draw.randrange(cached[row] + 1))
        lengths.append(draw.randint(1, MAX_TOKENS - before[-1]))
        assert cache.tables.allocate(row, before[-1] + lengths[-1])
    turned = torch.randn(sum(lengths), KV_HEADS, PER_GROUP + 2, SIZE)
    kept = [cache.read(row, length) for row, length in zip(rows, before, strict=True)]
    reads = packed_reads(cache, rows, before, lengths, PER_GROUP)
    found = PackedAttention(cache, reads, turned, [limits]).attend(0, turned[:, :, :-2], turned[:, :, -2:])
    for own, answer, row, (keys, values), length in zip(
        turned.split(lengths), found.split(lengths), rows, kept, before, strict=True
    ):
        torch.testing.assert_close(answer, by_row(own, keys[0], values[0], limits), atol=1e-5, rtol=1e-5)
        now = cache.read(row, length + len(own))
        for held, old, new in zip(now, (keys, values), (own[:, :, -2], own[:, :, -1]), strict=True):
            assert torch.equal(held[0], torch.cat((old[0], new.transpose(0, 1)), dim=1))


def test_rows_that_begin_with_as_many_blocks_take_one_call() -> None:
    cache, _ = filled(0)
    for row in range(6):
        cache.tables.release(row)
        cache.tables.allocate(row, 64)
    reads = packed_reads(cache, range(6), [0, 0, 0, 0, 0, 9], [5, 40, 32, 33, 64, 2], PER_GROUP)
    assert [(part.num_tokens, part.block_index is None) for part in reads.parts] == [(32, True), (64, True), (2, False)]
