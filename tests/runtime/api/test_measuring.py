"""What is measured is asked for within limits, of plans that keep the rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.planner.plan.plan import Plan
from meshwright.profiles.errors import BadInput
from meshwright.runtime.api.measurements import calibrate, profile


@pytest.mark.parametrize("minutes", [-1.0, float("nan"), float("inf")])
def test_minutes_that_are_none_are_refused_before_anything_is_measured(
    small_plan: Plan, tmp_path: Path, minutes: float
) -> None:
    with pytest.raises(BadInput, match=r"minutes=.* is out of range"):
        profile(small_plan.facts, tmp_path / "table.json", minutes=minutes)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_holds_no_run_corrects_nothing(small_plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=str(tmp_path)):
        calibrate(small_plan, tmp_path)


def test_a_plan_that_breaks_a_rule_is_refused_before_its_run_is_read(small_plan: Plan, tmp_path: Path) -> None:
    broken = small_plan.model_copy(update={"placements": small_plan.placements[1:]})
    with pytest.raises(BadInput, match=r"plan: .* is placed 0 times; place it once"):
        calibrate(broken, tmp_path)
