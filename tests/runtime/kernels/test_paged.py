"""Attention by kernels over a paged cache answers and keeps what attention by torch does over gathered blocks."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from meshwright.profiles.packing import BLOCK_TOKENS
from meshwright.runtime.inference.attention import GatheredAttention, PagedAttention, TableReads, table_reads
from meshwright.runtime.kernels import paged_attention
from meshwright.runtime.model.attention import rotate
from meshwright.runtime.model.kv_cache import PagedCache
from meshwright.runtime.model.limited_attention import AttentionLimits
from tests.runtime.kernels.where import DEVICE
from tests.runtime.model.filled_caches import KV_HEADS, MAX_TOKENS, NUM_ROWS, SIZE, filled
from tests.seeds import seeds

QUERIES = 3


def asked(seed: int) -> tuple[PagedCache, TableReads, Tensor, tuple[Tensor, Tensor]]:
    """A cache, what some rows read of it, their heads as projected, and the angles of all positions."""
    cache, lengths = filled(seed, device=DEVICE)
    rows = random.Random(seed).sample(range(NUM_ROWS), (NUM_ROWS, 3)[seed // 4])
    reads = table_reads(cache.tables, np.array(rows), np.array(lengths)[rows]).to(DEVICE)
    heads = torch.randn(len(rows), KV_HEADS, QUERIES + 2, SIZE, device=DEVICE)
    angles = torch.rand(MAX_TOKENS, SIZE // 2, device=DEVICE) * 6
    return cache, reads, heads, (angles.cos(), angles.sin())


def turned(heads: Tensor, angles: tuple[Tensor, Tensor], positions: Tensor) -> Tensor:
    cos, sin = (torch.cat([of_all[positions.long()]] * 2, dim=-1)[:, None, None] for of_all in angles)
    return rotate(heads, cos, sin)


@pytest.mark.parametrize("part", [1024, 2 * BLOCK_TOKENS])
@seeds(2, all=8)
def test_rows_are_answered_alike_and_what_is_new_is_kept(seed: int, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention, "_MIN_PART", part)
    monkeypatch.setattr(paged_attention, "_MAX_PART", part)
    assert_alike(seed, AttentionLimits())


@pytest.mark.parametrize("limits", [AttentionLimits(BLOCK_TOKENS + 3, 1.5), AttentionLimits(5)])
@seeds(1, all=8)
def test_rows_are_answered_alike_within_limits(
    seed: int, limits: AttentionLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_attention, "_MIN_PART", 2 * BLOCK_TOKENS)
    monkeypatch.setattr(paged_attention, "_MAX_PART", 2 * BLOCK_TOKENS)
    assert_alike(seed, limits)


def assert_alike(seed: int, limits: AttentionLimits) -> None:
    """The kernel answers and keeps what torch's operations do."""
    cache, reads, heads, angles = asked(seed)
    found = PagedAttention(cache, reads, [angles], [limits], QUERIES).attend(0, heads)
    kept = cache.keys.clone(), cache.values.clone()
    queries_and_key = turned(heads[:, :, :-1], angles, reads.lengths)
    new = torch.stack([queries_and_key[:, :, -1], heads[:, :, -1]], dim=2)
    expected = GatheredAttention(cache, reads, [limits]).attend(0, queries_and_key[:, :, :-1], new)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close((cache.keys, cache.values), kept, atol=1e-6, rtol=1e-6)


def test_rows_that_nobody_asks_for_write_to_the_spare_block_alone() -> None:
    cache, reads, heads, angles = asked(0)
    before = cache.keys.clone()
    spare = TableReads(reads.lengths * 0, reads.tables * 0, reads.states)
    PagedAttention(cache, spare, [angles], [AttentionLimits()], QUERIES).attend(0, heads)
    assert torch.equal(cache.keys[:, 1:], before[:, 1:])
    assert not torch.equal(cache.keys[:, 0], before[:, 0])


def test_a_long_row_is_cut_where_there_are_few() -> None:
    query = torch.empty(2, 1, QUERIES, SIZE, device=DEVICE)
    few, many = (paged_attention.KeySplit(query.expand(-1, heads, -1, -1), 4096, 100) for heads in (1, 256))
    assert few.num_parts > many.num_parts
    assert many.num_parts * many.tokens >= 4096 <= few.num_parts * few.tokens
