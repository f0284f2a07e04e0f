"""Gaps of parts add up to the gap of the whole, and where nothing was compared nothing is said."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.runtime.records.version_gap import Gap


def gap(apart: list[int]) -> Gap:
    """Of tokens that lie so far apart, in units that add without rounding."""
    total = float(sum(apart))
    return Gap(
        abs_difference_sum=total,
        largest=float(max(apart, default=0)),
        num_tokens=len(apart),
        ratio_sum=total + len(apart),
        kl_sum=2 * total,
    )


@given(st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=4))
def test_the_gap_of_all_ranks_is_that_of_all_their_tokens(of_ranks: list[list[int]]) -> None:
    together = sum(map(gap, of_ranks), start=Gap())
    assert together == gap([apart for of_rank in of_ranks for apart in of_rank])


@given(st.lists(st.integers(0, 99), min_size=1))
def test_a_gap_is_told_by_its_mean_and_its_largest(apart: list[int]) -> None:
    told = gap(apart).metrics("generator_gap")
    assert told == {"generator_gap": statistics.fmean(apart), "max_generator_gap": max(apart)}


@given(st.lists(st.integers(0, 99), min_size=1))
def test_the_names_of_the_field_have_means_over_tokens(apart: list[int]) -> None:
    mean = statistics.fmean(apart)
    assert gap(apart).mismatch() == pytest.approx({"token_mult_prob_error": mean + 1, "gen_kl_error": 2 * mean})


def test_nothing_compared_is_no_metric() -> None:
    assert Gap().metrics("cache_gap") == Gap().mismatch() == {}
