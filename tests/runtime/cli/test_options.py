"""A number that an option takes is finite."""

from __future__ import annotations

import math

import pytest
import typer

from meshwright.runtime.cli.options import finite


@pytest.mark.parametrize("value", [None, 0.0, -2.5, 1e308])
def test_a_finite_number_and_none_at_all_are_taken_as_they_are(value: float | None) -> None:
    assert finite(value) == value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_infinity_and_what_is_no_number_are_refused(value: float) -> None:
    with pytest.raises(typer.BadParameter, match="is not a finite number"):
        finite(value)
