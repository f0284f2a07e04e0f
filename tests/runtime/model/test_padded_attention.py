"""Rows side by side are answered as block by block; what is long or shared is not laid side by side."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from meshwright.runtime.model.block_attention import BlockAttention
from meshwright.runtime.model.block_reads import block_reads
from meshwright.runtime.model.padded_attention import PaddedAttention, padded_reads
from tests.runtime.model.filled_caches import KV_HEADS, NUM_ROWS, SIZE, filled


@pytest.mark.parametrize("seed", range(0, 8, 2))
def test_rows_side_by_side_are_answered_as_block_by_block(seed: int) -> None:
    cache, lengths = filled(seed)
    rows = np.array(random.Random(seed).sample(range(NUM_ROWS), (NUM_ROWS, 3)[seed // 4]))
    reads = padded_reads(cache, rows, np.array(lengths)[rows])
    assert reads
    query, new = torch.randn(len(rows), KV_HEADS, 3, SIZE), torch.randn(len(rows), KV_HEADS, 2, SIZE)
    by_block = block_reads(cache.tables, rows, np.array(lengths)[rows])
    expected = BlockAttention(cache, by_block).attend(0, query, new)
    found = PaddedAttention(cache, 3).at(reads).attend(0, query, new)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for index, row in enumerate(rows.tolist()):
        keys, values = cache.read(row, lengths[row] + 1)
        assert torch.equal(torch.stack([keys[0, :, -1], values[0, :, -1]], dim=1), new[index])


def test_rows_that_share_a_prefix_are_not_laid_side_by_side() -> None:
    cache, lengths = filled(1)
    assert padded_reads(cache, np.arange(NUM_ROWS), np.array(lengths)) is None
    assert block_reads(cache.tables, np.arange(NUM_ROWS), np.array(lengths)).num_shared


def test_scores_that_would_be_rounded_are_not_laid_side_by_side() -> None:
    cache, lengths = filled(0, torch.bfloat16)
    assert padded_reads(cache, np.arange(NUM_ROWS), np.array(lengths)) is None


def test_rows_that_would_fill_the_cache_of_a_core_are_not_laid_side_by_side() -> None:
    cache, lengths = filled(0)
    rows = np.arange(NUM_ROWS).repeat(40)
    assert padded_reads(cache, rows[:NUM_ROWS], np.array(lengths))
    assert padded_reads(cache, rows, np.array(lengths)[rows]) is None
