"""Attention over gathered blocks answers as attention block by block does, and tables say what rows hold."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from meshwright.profiles.packing import BLOCK_TOKENS
from meshwright.runtime.inference.attention import GatheredAttention, step_reads, table_reads
from meshwright.runtime.model.block_attention import BlockAttention, DecodeRows, plan_block_reads
from meshwright.runtime.model.limited_attention import AttentionLimits, attend_limited
from meshwright.runtime.model.padded_attention import PaddedReads
from tests.runtime.model.filled_caches import KV_HEADS, NUM_ROWS, SIZE, filled
from tests.seeds import seeds


@seeds(2, all=8)
def test_rows_are_answered_as_block_by_block(seed: int) -> None:
    cache, lengths = filled(seed)
    rows = np.array(random.Random(seed).sample(range(NUM_ROWS), (NUM_ROWS, 3)[seed // 4]))
    held = np.array(lengths)[rows]
    query, new = torch.randn(len(rows), KV_HEADS, 3, SIZE), torch.randn(len(rows), KV_HEADS, 2, SIZE)
    expected = BlockAttention(cache, plan_block_reads(cache.tables, DecodeRows(rows, held))).attend(0, query, new)
    found = GatheredAttention(cache, table_reads(cache.tables, rows, held), [AttentionLimits()]).attend(0, query, new)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "limits", [AttentionLimits(1), AttentionLimits(BLOCK_TOKENS + 2, 1.5), AttentionLimits(500, 0.7)]
)
@seeds(2, all=4)
def test_rows_are_answered_within_a_window_and_with_capped_scores(seed: int, limits: AttentionLimits) -> None:
    """Each row twice, whose blocks are more than a layer of the cache has."""
    cache, lengths = filled(seed)
    rows, held = np.tile(np.arange(NUM_ROWS), 2), np.tile(lengths, 2)
    query, new = (
        torch.randn(2 * NUM_ROWS, KV_HEADS, 3, SIZE),
        torch.randn(NUM_ROWS, KV_HEADS, 2, SIZE).repeat(2, 1, 1, 1),
    )
    attention = GatheredAttention(cache, table_reads(cache.tables, rows, held), [limits])
    assert len(attention._parts[limits.window, limits.chunked]) == 2
    found = attention.attend(0, query, new)
    for row, length in enumerate(held):
        keys, values = (heads[0, None] for heads in cache.read(row % NUM_ROWS, length + 1))
        expected = attend_limited(query[row].flatten(0, 1)[None, :, None], keys, values, limits)
        torch.testing.assert_close(found[row], expected.flatten(), atol=1e-5, rtol=1e-5)


def test_a_table_has_the_blocks_of_a_row_up_to_its_new_token() -> None:
    cache, lengths = filled(1)
    reads = table_reads(cache.tables, np.arange(NUM_ROWS), np.array(lengths))
    assert reads.lengths.tolist() == lengths
    assert reads.tables.shape[1] == max(lengths) // BLOCK_TOKENS + 1
    for row, length in enumerate(lengths):
        blocks = length // BLOCK_TOKENS + 1
        assert reads.tables[row, :blocks].tolist() == cache.tables.blocks_of_row(row)[:blocks].tolist()


def test_a_cpu_reads_few_rows_side_by_side_and_those_that_share_block_by_block() -> None:
    kinds = []
    for seed in (0, 1):
        cache, lengths = filled(seed)
        kinds.append(type(step_reads(cache, np.arange(NUM_ROWS), np.array(lengths))))
    assert kinds == [PaddedReads, DecodeRows]
