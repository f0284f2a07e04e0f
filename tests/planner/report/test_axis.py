"""Axes: every tick and every value lies within the width, in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.report.charts import at_values, linear


@given(st.floats(1e-6, 1e9))
def test_a_linear_axis_has_a_few_round_ticks_within_it(high: float) -> None:
    axis = linear(0.0, high)
    assert 3 <= len(axis.ticks) <= 9
    assert axis.ticks[0] == 0
    assert axis.ticks[-1] <= high * (1 + 1e-9)


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=8))
def test_swept_values_lie_in_order_within_the_width(values: list[float]) -> None:
    axis = at_values(values)
    places = [axis.percent(value) for value in sorted(set(values))]
    assert places == sorted(places)
    assert 0 <= places[0] <= places[-1] <= 100


def test_doublings_are_spread_evenly() -> None:
    places = [at_values([8, 16, 32]).percent(value) for value in (8, 16, 32)]
    assert places[1] - places[0] == pytest.approx(places[2] - places[1])
