"""A run is named by whose time it is."""

from __future__ import annotations

import pytest

from meshwright.planner.report.contents import clock_label, run_label
from tests.planner.report.pages import contents_of, plan_of


@pytest.mark.parametrize(
    ("told", "shown"),
    [("simulated", "SIMULATED"), ("rehearsed", "REHEARSAL"), ("measured", "MEASURED"), ("guessed", "GUESSED")],
)
def test_the_clock_is_told_in_capitals_before_the_name(told: str, shown: str) -> None:
    (run,) = contents_of(plan_of(), told).runs
    assert clock_label(run) == shown
    assert run_label(run) == f"{shown} the {told} one"
