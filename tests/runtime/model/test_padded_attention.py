"""Rows side by side are answered as block by block; what is long or shared is not laid side by side."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from meshwright.runtime.model.block_attention import BlockAttention, DecodeRows, plan_block_reads
from meshwright.runtime.model.kv_cache import PagedCache
from meshwright.runtime.model.padded_attention import PaddedAttention, padded_reads
from tests.runtime.model.filled_caches import KV_HEADS, NUM_ROWS, SIZE, filled


@pytest.mark.parametrize("seed", range(0, 8, 2))
def test_rows_side_by_side_are_answered_as_block_by_block(seed: int) -> None:
    cache, lengths = filled(seed)
    rows = np.array(random.Random(seed).sample(range(NUM_ROWS), (NUM_ROWS, 3)[seed // 4]))
    reads = padded_reads(cache, DecodeRows(rows, np.array(lengths)[rows]))
    assert reads
    query, new = torch.randn(len(rows), KV_HEADS, 3, SIZE), torch.randn(len(rows), KV_HEADS, 2, SIZE)
    by_block = plan_block_reads(cache.tables, DecodeRows(rows, np.array(lengths)[rows]))
    expected = BlockAttention(cache, by_block).attend(0, query, new)
    found = PaddedAttention(cache, 3).prepare(reads).attend(0, query, new)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for index, row in enumerate(rows.tolist()):
        keys, values = cache.read(row, lengths[row] + 1)
        assert torch.equal(torch.stack([keys[0, :, -1], values[0, :, -1]], dim=1), new[index])


def answered(cache: PagedCache, padded: PaddedAttention, rows: list[int], lengths: list[int], step: int) -> None:
    """Rows that have drawn so many tokens are answered as block by block."""
    asked, cached = np.array(rows), np.array([lengths[row] + step for row in rows])
    for row, length in zip(rows, cached.tolist(), strict=True):
        assert cache.tables.allocate(row, length + 1)
    reads = padded_reads(cache, step_of := DecodeRows(asked, cached))
    assert reads
    attention, by_block = padded.prepare(reads), BlockAttention(cache, plan_block_reads(cache.tables, step_of))
    for layer in range(len(cache.keys)):
        query, new = torch.randn(len(rows), KV_HEADS, 3, SIZE), torch.randn(len(rows), KV_HEADS, 2, SIZE)
        found = attention.attend(layer, query, new).clone()
        torch.testing.assert_close(found, by_block.attend(layer, query, new), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [[3, 0, 5], list(range(NUM_ROWS))])  # whose copies are kept, and are not
def test_rows_that_go_on_are_answered_as_block_by_block(rows: list[int]) -> None:
    cache, _ = filled(0, num_layers=3)
    lengths = [7 + 9 * row for row in range(NUM_ROWS)]
    cache.tables.release(*range(NUM_ROWS))
    padded = PaddedAttention(cache, 3)
    for step in (*range(40), 39, 39):  # the last one again, as when it is timed
        answered(cache, padded, rows, lengths, step)
    for step in range(40, 44):  # one has ended
        answered(cache, padded, rows[1:], lengths, step)


def test_a_row_that_takes_the_slot_of_another_has_its_own_past() -> None:
    cache, lengths = filled(0)
    padded, rows = PaddedAttention(cache, 3), [2, 4]
    answered(cache, padded, rows, lengths, 0)
    held = cache.tables.blocks_of_row(2).tolist()
    cache.tables.release(2)
    cache.tables.restore(2, [block for block in range(1, 91) if not cache.tables._num_readers[block]][: len(held)])
    answered(cache, padded, rows, lengths, 1)


def test_what_is_cached_anew_is_read_anew() -> None:
    cache, lengths = filled(0)
    padded, rows = PaddedAttention(cache, 3), [2, 4]
    answered(cache, padded, rows, lengths, 0)
    cache.keys.normal_()
    padded.reset()
    answered(cache, padded, rows, lengths, 1)


def test_rows_that_share_a_prefix_are_not_laid_side_by_side() -> None:
    cache, lengths = filled(1)
    assert padded_reads(cache, DecodeRows(np.arange(NUM_ROWS), np.array(lengths))) is None
    assert plan_block_reads(cache.tables, DecodeRows(np.arange(NUM_ROWS), np.array(lengths))).num_shared


def test_scores_that_would_be_rounded_are_not_laid_side_by_side() -> None:
    cache, lengths = filled(0, torch.bfloat16)
    assert padded_reads(cache, DecodeRows(np.arange(NUM_ROWS), np.array(lengths))) is None


def test_rows_that_would_fill_the_cache_of_a_core_are_not_laid_side_by_side() -> None:
    cache, lengths = filled(0)
    rows = np.arange(NUM_ROWS).repeat(40)
    assert padded_reads(cache, DecodeRows(rows[:NUM_ROWS], np.array(lengths)))
    assert padded_reads(cache, DecodeRows(rows, np.array(lengths)[rows])) is None
