"""Micro-batches have the tokens and the squares of a typical batch, and under a cap the number that drawn ones take."""

from __future__ import annotations

import math

import numpy as np
import pytest

from meshwright.cost_models import micro_batches as module
from meshwright.cost_models.micro_batches import MicroBatches, capped_micro_batches, micro_batches
from meshwright.profiles.lengths import Histogram
from meshwright.profiles.packing import micro_batches_by_rows, micro_batches_by_tokens
from meshwright.profiles.workload import Workload


def test_packed_micro_batches_have_the_tokens_and_the_squares_of_their_rows() -> None:
    lengths = Histogram((10, 20, 30, 40), (0.25, 0.25, 0.25, 0.25))
    # 40 meets 10 and 30 meets 20; 100 tokens and 3000 squares are two micro-batches of 5/3 rows of 30 tokens.
    assert micro_batches(lengths, 4, 2) == ((2, pytest.approx(5 / 3), pytest.approx(30)),)
    assert micro_batches(lengths, 4, 1) == ((1, 1, 10), (1, 1, 20), (1, 1, 30), (1, 1, 40))
    assert micro_batches(lengths, 4, 8) == ((1, pytest.approx(10 / 3), pytest.approx(30)),)
    assert micro_batches(Histogram((7,), (1.0,)), 12, 4) == ((3, 4, 7),)


@pytest.mark.parametrize("num_rows", [1, 7, 64, 1000])
@pytest.mark.parametrize("size", [1, 4, 16])
def test_no_row_is_forgotten_and_no_token_is_added(num_rows: int, size: int) -> None:
    lengths = Histogram((10, 20, 300), (0.5, 0.3, 0.2))
    found = micro_batches(lengths, num_rows, size)
    assert sum(number for number, _, _ in found) == -(-num_rows // size)
    assert all(1 <= rows <= size for _, rows, _ in found)
    tokens = sum(number * rows * tokens for number, rows, tokens in found)
    assert tokens == pytest.approx(sum(lengths.stratified_sample(num_rows)))


@pytest.mark.parametrize("size", [1, 4, 16, 64])
def test_of_many_rows_a_part_stands_for_all(long_tail: Workload, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = long_tail.sequence_lengths
    found = micro_batches(lengths, 16384, size)
    monkeypatch.setattr(module, "_MAX_SPLIT_ROWS", 2**20)
    every = micro_batches(lengths, 16384, size)

    def amounts(batches: tuple[MicroBatches, ...]) -> list[float]:
        """Tokens, and squares of lengths."""
        return [math.fsum(n * rows * tokens**power for n, rows, tokens in batches) for power in (1, 2)]

    assert sum(batch.number for batch in found) == sum(batch.number for batch in every)
    assert amounts(found) == pytest.approx(amounts(every), rel=5e-3)


@pytest.mark.parametrize(("rows", "size"), [(12, 4), (12, 5), (4096, 64), (1, 1)])
def test_rows_that_are_alike_fill_micro_batches_that_are_alike(rows: int, size: int) -> None:
    """Where the size divides the rows none is dealt, and the answer is that of dealing."""
    dealt = micro_batches_by_rows([30] * rows, size)
    found = micro_batches(Histogram((30,), (1.0,)), rows, size)
    assert sum(batch.number for batch in found) == len(dealt)
    assert sum(batch.number * batch.rows for batch in found) == pytest.approx(rows)
    assert {batch.tokens for batch in found} == {30}


@pytest.mark.parametrize("num_rows", [4, 16, 64, 256])
@pytest.mark.parametrize("times", [1, 2, 4, 16])
def test_under_a_cap_there_are_as_many_as_drawn_batches_take_on_average(
    long_tail: Workload, num_rows: int, times: int
) -> None:
    lengths, cap = long_tail.sequence_lengths, times * long_tail.max_tokens
    found = capped_micro_batches(lengths, num_rows, cap)
    number, draw = 32768 // num_rows, np.random.default_rng(7)
    batches = draw.choice(lengths.tokens, (number, num_rows), p=lengths.probabilities).tolist()
    drawn = np.mean([len(micro_batches_by_tokens(batch, cap)) for batch in batches])
    assert sum(number for number, _, _ in found) == pytest.approx(drawn, rel=0.02)


@pytest.mark.parametrize(("num_rows", "times"), [(16, 1), (256, 4), (5000, 2)])
def test_under_a_cap_no_token_is_added_and_none_is_forgotten(long_tail: Workload, num_rows: int, times: int) -> None:
    lengths, cap = long_tail.sequence_lengths, times * long_tail.max_tokens
    found = capped_micro_batches(lengths, num_rows, cap)
    assert sum(n * rows * tokens for n, rows, tokens in found) == pytest.approx(num_rows * lengths.mean, rel=5e-3)
    assert all(rows * tokens <= cap for _, rows, tokens in found)


def test_under_a_cap_rows_that_are_alike_fill_it() -> None:
    assert capped_micro_batches(Histogram((30,), (1.0,)), 12, 120) == ((3, 4, 30),)
    assert capped_micro_batches(Histogram((30,), (1.0,)), 12, 119) == ((4, 3, 30),)


@pytest.mark.parametrize("num_rows", [1, 3, 16, 200])
@pytest.mark.parametrize("times", [1, 3, 8])
def test_batches_that_are_dealt_together_are_dealt_as_one_by_one(
    long_tail: Workload, num_rows: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = long_tail.sequence_lengths, num_rows, times * long_tail.max_tokens
    together = capped_micro_batches(*asked)
    monkeypatch.setattr(module, "_MIN_TOGETHER", 2**20)
    assert capped_micro_batches(*asked) == together
