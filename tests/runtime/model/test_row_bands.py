"""Bands of rows: every row is in one, in order, and they are read for less than one band would be."""

import random

import pytest

from meshwright.runtime.model.row_bands import bands


def aged(num_rows: int, seed: int) -> list[int]:
    """As slots are refilled: rows of all ages, most of them young."""
    draw = random.Random(seed)
    return [20 + min(500, int(draw.expovariate(1 / 64))) for _ in range(num_rows)]


MIXED = [aged(num_rows, seed) for seed, num_rows in enumerate((1, 2, 7, 33, 64, 128))]


def read(lengths: list[int], rows: slice) -> int:
    return len(lengths[rows]) * max(lengths[rows])


@pytest.mark.parametrize("lengths", [*MIXED, [], [300] * 40, [10] * 40, [5_000, 100], [5_000]])
def test_the_bands_are_the_rows_in_order(lengths: list[int]) -> None:
    assert [row for band in bands(lengths) for row in range(len(lengths))[band]] == list(range(len(lengths)))


@pytest.mark.parametrize("lengths", [[300] * 40, [10, 20] * 20, [250, 20], [100_000], [100_000] * 2])
def test_rows_that_are_alike_or_few_are_one_band(lengths: list[int]) -> None:
    assert list(bands(lengths)) == [slice(0, len(lengths))]


def test_old_rows_before_young_ones_are_bands_of_their_own() -> None:
    assert list(bands([400] * 10 + [30] * 30 + [200] * 10)) == [slice(0, 10), slice(10, 40), slice(40, 50)]


@pytest.mark.parametrize("lengths", MIXED[3:])
def test_bands_are_read_for_a_fifth_less(lengths: list[int]) -> None:
    assert sum(read(lengths, band) for band in bands(lengths)) < 0.8 * read(lengths, slice(None))
