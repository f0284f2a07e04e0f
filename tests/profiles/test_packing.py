"""Rows are dealt to micro-batches of nearly equal tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshwright.profiles.packing import deal


@given(st.lists(st.integers(1, 500), min_size=1, max_size=40), st.integers(1, 9))
def test_every_row_is_dealt_once_into_as_few_micro_batches_as_may_be(lengths: list[int], size: int) -> None:
    dealt = deal(lengths, size)
    assert sorted(index for micro_batch in dealt for index in micro_batch) == list(range(len(lengths)))
    assert len(dealt) == -(-len(lengths) // size)
    assert all(1 <= len(micro_batch) <= size for micro_batch in dealt)


def test_the_longest_goes_first_and_to_the_fewest_tokens_that_have_room() -> None:
    # 90 and 50 begin, 40 joins 50, and only beside 90 is there room for 10.
    assert deal([10, 40, 90, 50], 2) == ((2, 0), (3, 1))
    # 40 joins 50; at 90 tokens each, 20 goes to the first, 10 to the second, which has fewer then, as 5 has no choice.
    assert deal([90, 50, 40, 20, 10, 5], 3) == ((0, 3, 5), (1, 2, 4))


def test_a_long_tail_is_spread_evenly() -> None:
    lengths = [200, 150, *[60] * 14, *[30] * 16]
    dealt = deal(lengths, 8)
    sums = [sum(lengths[index] for index in micro_batch) for micro_batch in dealt]
    assert max(sums) < 1.25 * min(sums)
