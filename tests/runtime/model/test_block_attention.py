"""A decode step over blocks answers each row as attention over its own keys does, wherever they lie."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.profiles.packing import BLOCK_TOKENS
from meshwright.runtime.model.block_attention import BlockAttention, DecodeRows, plan_block_reads
from meshwright.runtime.model.kv_cache import PagedCache
from tests.runtime.model.filled_caches import KV_HEADS, NUM_ROWS, SIZE, filled
from tests.seeds import seeds

HEADS = 6


def asked(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """New queries, and new keys and values."""
    queries, new = (torch.randn(NUM_ROWS, KV_HEADS, n, SIZE, dtype=dtype) for n in (HEADS // KV_HEADS, 2))
    return queries, new


def one_by_one(cache: PagedCache, rows: list[int], lengths: list[int], query: Tensor) -> Tensor:
    """From what each row has cached, the new token too."""
    answers = []
    for index, row in enumerate(rows):
        keys, values = (held[0].unsqueeze(0) for held in cache.read(row, lengths[row] + 1))
        answers.append(F.scaled_dot_product_attention(query[index : index + 1], keys, values))
    return torch.cat(answers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@seeds(2, all=8)
def test_every_row_is_answered_as_if_it_were_alone(seed: int, dtype: torch.dtype) -> None:
    cache, lengths = filled(seed, dtype)
    rows = random.Random(seed).sample(range(NUM_ROWS), (NUM_ROWS, 3)[seed // 4])
    reads = plan_block_reads(cache.tables, DecodeRows(np.array(rows), np.array(lengths)[rows]))
    assert (reads.num_shared > 0) == (seed % 2 == 1 and len(rows) > 3) or len(rows) == 3
    query, new = (heads[: len(rows)] for heads in asked(dtype))
    found = BlockAttention(cache, reads).attend(0, query, new).view(query.shape)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found, one_by_one(cache, rows, lengths, query), atol=tolerance, rtol=tolerance)
    for index, row in enumerate(rows):
        keys, values = cache.read(row, lengths[row] + 1)
        assert torch.equal(torch.stack([keys[0, :, -1], values[0, :, -1]], dim=1), new[index])


@seeds(2, all=4)
def test_rows_that_go_on_are_answered_as_if_they_began(seed: int) -> None:
    cache, lengths = filled(seed)
    rows, cached = np.arange(NUM_ROWS), np.array(lengths) // BLOCK_TOKENS * BLOCK_TOKENS + np.arange(NUM_ROWS)
    cache.tables.release(*rows)
    for row, length in enumerate(cached.tolist()):
        assert cache.tables.allocate(row, length + 1)
    going_on = BlockAttention(cache, plan_block_reads(cache.tables, DecodeRows(rows, cached)))
    for further in (0, 1, 1, 2, 3):
        step = DecodeRows(rows, cached + further)
        assert going_on.advance_to(step)
        query, new = asked(torch.float32)
        found = going_on.attend(0, query, new).view(query.shape)
        torch.testing.assert_close(found, one_by_one(cache, [*rows], [*step.cached], query), atol=1e-5, rtol=1e-5)
    assert not going_on.advance_to(DecodeRows(rows, cached + 5))
    assert not going_on.advance_to(DecodeRows(rows[1:], cached[1:] + 4))
    cache.tables.release(0)
    assert not going_on.advance_to(DecodeRows(rows, cached + 4))


def test_a_row_that_holds_a_single_block_goes_on_in_it() -> None:
    cache, _ = filled(0)
    row, cached = np.array([3]), np.array([5])
    going_on = BlockAttention(cache, plan_block_reads(cache.tables, DecodeRows(row, cached)))
    for further in range(4):
        assert going_on.advance_to(DecodeRows(row, cached + further))
        query, new = (heads[:1] for heads in asked(torch.float32))
        found = going_on.attend(0, query, new).view(query.shape)
        lengths = [5 + further] * NUM_ROWS
        torch.testing.assert_close(found, one_by_one(cache, [3], lengths, query), atol=1e-5, rtol=1e-5)


def test_rows_do_not_go_on_in_a_new_block() -> None:
    cache, _ = filled(0)
    rows, cached = np.arange(NUM_ROWS), np.full(NUM_ROWS, BLOCK_TOKENS - 2)
    going_on = BlockAttention(cache, plan_block_reads(cache.tables, DecodeRows(rows, cached)))
    assert [going_on.advance_to(DecodeRows(rows, cached + further)) for further in (1, 2)] == [True, False]
