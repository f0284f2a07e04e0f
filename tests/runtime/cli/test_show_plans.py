"""Plans beside each other on a terminal: what is alike is told once, what differs of each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.planner.analysis.cluster_sizing import Fit
from meshwright.planner.analysis.plan_comparison import compare_plans
from meshwright.profiles.documents import Difference
from meshwright.runtime.cli import view_search
from tests.planner.plans import random_plan


def test_a_stage_that_both_place_alike_has_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    plan = random_plan(0)
    view_search.print_comparison(compare_plans(plan, plan), "a", "b")
    rows = capsys.readouterr().out.splitlines()
    assert sum("actor_train" in row for row in rows) == 1
    assert sum(" both " in row for row in rows) == len(plan.placements)


def test_a_stage_that_they_place_otherwise_has_two(capsys: pytest.CaptureFixture[str]) -> None:
    found = compare_plans(random_plan(0), random_plan(1))
    facts = tuple(Difference(f"workload.key{number}", 1, 2) for number in range(25))
    view_search.print_comparison(replace(found, facts=facts), "a", "b")
    text = capsys.readouterr().out
    assert text.count(" b ") >= sum(row.one != row.other for row in found.stages)
    assert "workload.key0 is 1 in a and 2 in b" in text
    assert "and 5 more; --json has them all." in text


def test_a_job_that_fits_nowhere_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    view_search.print_fit(Fit(min_ranks=None, max_ranks=128, points=(), answers=None), None)
    assert "no plan fits on up to 128 devices" in capsys.readouterr().err
