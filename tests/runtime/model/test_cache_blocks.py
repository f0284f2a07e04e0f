"""Blocks: none is lost, none is held twice but where rows share it, and none is promised that is not there."""

from __future__ import annotations

import random

import numpy as np

from meshwright.profiles.packing import BLOCK_TOKENS, num_blocks_for
from meshwright.runtime.model.block_tables import BlockTables
from tests.seeds import seeds


@seeds(4, all=20)
def test_every_block_is_free_or_held_and_rows_hold_what_they_need(seed: int) -> None:
    draw, tables, held = random.Random(seed), BlockTables(40, 9, 400), dict.fromkeys(range(9), 0)
    for _ in range(300):
        row = draw.randrange(9)
        if draw.random() < 0.3:
            tables.release(row)
            held[row] = 0
        else:
            wanted = draw.randint(1, 400)
            fits = num_blocks_for(wanted) - num_blocks_for(held[row]) <= tables.num_free
            assert tables.allocate(row, wanted) == fits
            held[row] = max(held[row], wanted) if fits else held[row]
        blocks = np.concatenate([tables.blocks_of_row(row) for row in held])
        assert len(set(blocks.tolist())) == len(blocks) == tables.num_used == 40 - tables.num_free
        assert all(len(tables.blocks_of_row(row)) == num_blocks_for(most) for row, most in held.items())
        assert 0 not in blocks


def test_the_lowest_free_blocks_are_taken_first() -> None:
    tables = BlockTables(6, 3, 200)
    for row in range(3):
        tables.allocate(row, 2 * BLOCK_TOKENS)
    tables.release(0)
    tables.release(2)
    tables.allocate(2, 3 * BLOCK_TOKENS)
    assert tables.blocks_of_row(2).tolist() == [1, 2, 5]


def test_whole_blocks_that_others_are_to_read_are_taken_from_the_other_end() -> None:
    tables, num_tokens = BlockTables(9, 3, 200), 2 * BLOCK_TOKENS + 1
    tables.allocate(0, num_tokens, shared_tokens=num_tokens)
    tables.share(0, 1, num_tokens)
    tables.allocate(1, num_tokens)
    assert [tables.blocks_of_row(row).tolist() for row in (0, 1)] == [[9, 8, 1], [9, 8, 2]]
    tables.release(0)
    tables.release(1)
    tables.allocate(2, num_tokens)
    assert tables.blocks_of_row(2).tolist() == [1, 2, 3]


def test_a_shared_block_is_free_when_its_last_reader_is_gone() -> None:
    tables = BlockTables(6, 3, 200)
    tables.allocate(0, 2 * BLOCK_TOKENS + 1)
    for row in (1, 2):
        tables.share(0, row, 2 * BLOCK_TOKENS + 1)
        assert tables.allocate(row, 2 * BLOCK_TOKENS + 2)
    assert tables.num_free == 1
    assert tables.is_shared(tables.blocks_of_row(1)).tolist() == [True, True, False]
    for row, free in ((0, 2), (2, 3), (1, 6)):
        tables.release(row)
        assert tables.num_free == free


def test_rows_that_need_another_block_are_named() -> None:
    tables, rows = BlockTables(9, 3, 200), np.array([2, 0, 1])
    for row, tokens in ((0, 33), (1, 32), (2, 64)):
        tables.allocate(row, tokens)
    assert tables.rows_short_of_blocks(rows, np.array([65, 34, 33])).tolist() == [0, 2]


def test_what_is_restored_is_as_it_was() -> None:
    tables, other = BlockTables(8, 3, 200), BlockTables(8, 3, 200)
    tables.allocate(0, 70)
    tables.share(0, 1, 70)
    tables.allocate(1, 70)
    for row in (1, 0):
        other.restore(row, tables.blocks_of_row(row).tolist())
    for one in (tables, other):
        one.release(0)
        one.allocate(2, 40)
    assert [tables.blocks_of_row(row).tolist() for row in range(3)] == [
        other.blocks_of_row(row).tolist() for row in range(3)
    ]


def test_rows_say_how_many_tokens_they_have_room_for_and_whether_they_share() -> None:
    tables = BlockTables(6, 3, 200)
    tables.allocate(0, BLOCK_TOKENS + 1)
    tables.allocate(1, 3)
    assert tables.tokens_left(np.array([0, 1]), np.array([BLOCK_TOKENS + 1, 3])) == BLOCK_TOKENS - 3
    assert not tables.has_shared_blocks
    before = tables.num_changes
    tables.share(0, 2, BLOCK_TOKENS)
    assert tables.has_shared_blocks
    tables.release(0)
    assert not tables.has_shared_blocks
    assert tables.num_changes == before + 2


@seeds(3, all=10)
def test_blocks_that_one_row_reads_are_moved_together_and_those_of_several_stay(seed: int) -> None:
    draw, tables, num_moved = random.Random(seed), BlockTables(60, 9, 400), 0
    for _ in range(60):
        row = draw.randrange(9)
        tables.release(row)
        if draw.random() < 0.3:
            tables.share(source := draw.randrange(9), row, len(tables.blocks_of_row(source)) * BLOCK_TOKENS)
        tables.allocate(row, draw.randint(1, 400))
        before, readers = [tables.blocks_of_row(row).tolist() for row in range(9)], tables._num_readers.copy()
        moved, to = (blocks.tolist() for blocks in tables.compact())
        now_at, num_moved = dict(zip(moved, to, strict=True)), num_moved + len(moved)
        assert [tables.blocks_of_row(row).tolist() for row in range(9)] == [
            [now_at.get(b, b) for b in held] for held in before
        ]
        assert all(readers[block] == 1 for block in moved)
        assert sorted(tables._free, reverse=True) == tables._free
        assert set(tables._free) == set(range(1, 61)) - {
            b for row in range(9) for b in tables.blocks_of_row(row).tolist()
        }
        if moved:
            alone, free = (tables._num_readers == 1).nonzero()[0], tables._free
            assert not free or free[-1] > alone.max()
    assert num_moved


def test_for_few_gaps_no_block_is_moved() -> None:
    tables = BlockTables(20, 3, 600)
    tables.allocate(0, BLOCK_TOKENS)
    tables.allocate(1, 9 * BLOCK_TOKENS)
    tables.release(0)
    assert [len(blocks) for blocks in tables.compact()] == [0, 0]
    tables.allocate(0, BLOCK_TOKENS)
    tables.allocate(2, 5 * BLOCK_TOKENS)
    tables.release(0, 1)
    before = tables.num_changes
    assert [blocks.tolist() for blocks in tables.compact()] == [[15, 14, 13, 12, 11], [1, 2, 3, 4, 5]]
    assert tables.num_changes == before + 1


@seeds(20, all=200)
def test_blocks_taken_ahead_and_given_back_leave_as_many_as_before(seed: int) -> None:
    draw = random.Random(seed)
    tables, rows = BlockTables(60, 4, 20 * BLOCK_TOKENS), np.arange(4)
    held = np.array([draw.randint(1, 9 * BLOCK_TOKENS) for _ in rows])
    for row, length in enumerate(held.tolist()):
        tables.allocate(row, length)
    before = [tables.blocks_of_row(row).tolist() for row in rows]
    assert tables.allocate_all(rows, held + draw.randint(1, 5 * BLOCK_TOKENS))
    assert [tables.blocks_of_row(row).tolist()[: len(blocks)] for row, blocks in enumerate(before)] == before
    tables.truncate(rows, held)
    assert [tables.blocks_of_row(row).tolist() for row in rows] == before
    assert tables.num_used == sum(map(len, before))


def test_where_blocks_are_too_few_for_all_rows_none_gets_any() -> None:
    tables, rows = BlockTables(4, 2, 4 * BLOCK_TOKENS), np.arange(2)
    tables.allocate(0, 1)
    tables.allocate(1, 1)
    assert not tables.allocate_all(rows, np.array([2, 3]) * BLOCK_TOKENS)
    assert tables.num_used == 2
    assert tables.allocate_all(rows, np.array([2, 2]) * BLOCK_TOKENS)
    assert tables.num_used == 4
