"""A decode step reads every block once, for exactly the rows that hold it."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from meshwright.profiles.packing import BLOCK_TOKENS
from meshwright.runtime.model.block_attention import BlockReads, DecodeRows, plan_block_reads
from meshwright.runtime.model.block_tables import BlockTables
from meshwright.runtime.model.kv_cache import PagedCache
from tests.runtime.model.filled_caches import NUM_ROWS, filled
from tests.seeds import seeds


def of(cache: PagedCache, rows: np.ndarray, lengths: list[int]) -> BlockReads:  # type: ignore[type-arg]
    return plan_block_reads(cache.tables, DecodeRows(rows, np.array(lengths)[rows]))


def readers_of(reads: BlockReads) -> dict[int, list[int]]:
    """By block the rows that it is read for, once for every time that it is read."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    nobody = len(reads.step.lengths)
    pairs = [([block], [row]) for block, row in zip(reads.window.tolist(), reads.window_rows.tolist(), strict=True)]
    for one in reads.prefixes:
        pairs += zip(one.blocks.tolist(), one.readers.tolist(), strict=True)
    for blocks, rows in pairs:
        for block in blocks:
            found[block] += [row for row in rows if row != nobody]
    return {block: sorted(rows) for block, rows in found.items() if rows}


@seeds(2, all=8)
@pytest.mark.parametrize("num_rows", [NUM_ROWS, 5])
def test_every_block_is_read_for_the_rows_that_hold_it(seed: int, num_rows: int) -> None:
    cache, lengths = filled(seed)
    rows = np.random.default_rng(seed).permutation(NUM_ROWS)[:num_rows]
    held: defaultdict[int, list[int]] = defaultdict(list)
    for index, row in enumerate(rows.tolist()):
        for block in cache.tables.table[row, : lengths[row] // BLOCK_TOKENS + 1].tolist():
            held[block].append(index)
    assert readers_of(of(cache, rows, lengths)) == held


@seeds(2, all=8)
def test_what_is_said_is_put_in_the_order_of_the_rows(seed: int) -> None:
    cache, lengths = filled(seed)
    reads = of(cache, np.arange(NUM_ROWS), lengths)
    told = [*reads.window_rows.tolist(), *(row for one in reads.prefixes for row in one.readers.flatten().tolist())]
    for row in range(NUM_ROWS):
        said = reads.order[reads.offsets[row] : reads.offsets[row + 1]].tolist()
        assert said == [index for index, reader in enumerate(told) if reader == row]


def test_samples_of_a_prompt_read_it_as_one_prefix_and_prompts_of_one_length_together() -> None:
    tables, num_tokens = BlockTables(60, 9, 400), 3 * BLOCK_TOKENS + 5
    for first, tokens in ((0, num_tokens), (3, num_tokens), (6, BLOCK_TOKENS)):
        tables.allocate(first, tokens + 1, shared_tokens=tokens)
        for row in (first + 1, first + 2):
            tables.share(first, row, tokens)
            tables.allocate(row, tokens + 1)
    lengths = np.repeat([num_tokens, num_tokens, BLOCK_TOKENS], 3)
    three, one = plan_block_reads(tables, DecodeRows(np.arange(9), lengths)).prefixes
    assert three.blocks.tolist() == [tables.blocks_of_row(row)[:3].tolist() for row in (0, 3)]
    assert three.readers.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert one.blocks.tolist() == [tables.blocks_of_row(6)[:1].tolist()]
    assert one.readers.tolist() == [[6, 7, 8]]
    assert plan_block_reads(tables, DecodeRows(np.arange(9), lengths)).first >= 0


def test_few_blocks_that_lie_far_apart_are_copied_and_many_are_read_in_place() -> None:
    cache, lengths = filled(0)
    rows = np.arange(NUM_ROWS)
    assert of(cache, rows, lengths).first >= 0
    for row in range(1, NUM_ROWS):
        cache.tables.release(row)
    cache.tables.restore(1, [1])
    cache.tables.restore(2, [90])
    assert of(cache, np.array([1, 2]), [0, 5, 5]).first == -1
