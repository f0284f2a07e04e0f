"""Rows side by side are answered as block by block; what is long, shared or on a GPU is not laid side by side."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from meshwright.runtime.model.block_attention import BlockAttention
from meshwright.runtime.model.block_reads import block_reads
from meshwright.runtime.model.padded_attention import PaddedAttention, is_small
from tests.runtime.model.filled_caches import KV_HEADS, NUM_ROWS, SIZE, filled


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(0, 8, 2))
def test_rows_side_by_side_are_answered_as_block_by_block(seed: int, dtype: torch.dtype) -> None:
    cache, lengths = filled(seed, dtype)
    rows = np.array(random.Random(seed).sample(range(NUM_ROWS), (NUM_ROWS, 3)[seed // 4]))
    reads = block_reads(cache.tables, rows, np.array(lengths)[rows])
    assert is_small(cache, reads)
    query = torch.randn(len(rows), KV_HEADS, 3, SIZE, dtype=dtype)
    key, value = (torch.randn(len(rows), KV_HEADS, SIZE, dtype=dtype) for _ in range(2))
    expected = BlockAttention(cache, reads).attend(0, query, key, value)
    found = PaddedAttention(cache, reads).attend(0, query, key, value)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    for index, row in enumerate(rows.tolist()):
        keys, values = cache.read(row, lengths[row] + 1)
        assert torch.equal(keys[0, :, -1], key[index])
        assert torch.equal(values[0, :, -1], value[index])


def test_rows_that_share_a_prefix_are_not_laid_side_by_side() -> None:
    cache, lengths = filled(1)
    reads = block_reads(cache.tables, np.arange(NUM_ROWS), np.array(lengths))
    assert reads.num_shared
    assert not is_small(cache, reads)


def test_rows_that_would_fill_the_cache_of_a_core_are_not_laid_side_by_side() -> None:
    cache, lengths = filled(0)
    rows = np.arange(NUM_ROWS).repeat(40)
    reads = block_reads(cache.tables, rows[:NUM_ROWS], np.array(lengths))
    assert is_small(cache, reads)
    long = block_reads(cache.tables, rows, np.array(lengths)[rows])
    assert not is_small(cache, long)
