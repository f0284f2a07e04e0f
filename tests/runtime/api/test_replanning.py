"""Planning anew is asked for with a plan that keeps the rules and the directory of its run."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright import api


def test_a_directory_that_holds_no_run_says_nothing(small_plan: api.Plan, tmp_path: Path) -> None:
    with pytest.raises(api.BadInput, match=str(tmp_path)):
        api.replan(small_plan, tmp_path)


def test_a_plan_that_breaks_a_rule_is_refused_before_its_run_is_read(small_plan: api.Plan, tmp_path: Path) -> None:
    broken = small_plan.model_copy(update={"placements": small_plan.placements[1:]})
    with pytest.raises(api.BadInput, match=r"plan: .* is placed 0 times; place it once"):
        api.replan(broken, tmp_path)
