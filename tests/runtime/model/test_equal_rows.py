"""Rows that are alike and next to each other are one run, and no other is."""

from __future__ import annotations

import random
from itertools import pairwise

from meshwright.runtime.model.kv_cache import EqualRows, group_equal_rows
from tests.runtime.model.test_kv_cache import NUM_SLOTS
from tests.seeds import seeds

seeded = seeds(3, all=10)


def alike_here_and_there(draw: random.Random) -> list[tuple[int, int, int]]:
    """Slot, cached tokens and length of rows, of which many are as the one before and some slots are left out."""
    rows = [(draw.randrange(2), 0, draw.randint(1, 20))]
    while (slot := rows[-1][0] + draw.choice((1, 1, 1, 2))) < NUM_SLOTS:
        another = draw.choice((0, draw.randint(1, 20))), draw.randint(1, 20)
        rows.append((slot, *draw.choice((rows[-1][1:], rows[-1][1:], another))))
    return rows


@seeded
def test_rows_are_told_in_as_few_runs_as_they_make(seed: int) -> None:
    rows = alike_here_and_there(random.Random(seed))
    runs = group_equal_rows(rows)
    assert rows == [(run.first_slot + row, run.cached, run.length) for run in runs for row in range(run.num_rows)]
    for run, following in pairwise(runs):
        assert (run.first_slot + run.num_rows, *run[1:3]) != following[:3]


def test_the_last_token_of_a_row_sees_what_is_cached_and_its_own() -> None:
    assert EqualRows(first_slot=2, cached=7, length=3).num_keys == 10


def test_rows_of_one_length_with_different_tokens_cached_are_apart() -> None:
    assert group_equal_rows([(0, 4, 2), (1, 4, 2), (2, 5, 2), (4, 5, 2)]) == (
        EqualRows(0, 4, 2, num_rows=2),
        EqualRows(2, 5, 2),
        EqualRows(4, 5, 2),
    )
    assert group_equal_rows([]) == ()
