"""What is told of a search: a bound only when every scope has one, and nothing twice."""

from __future__ import annotations

from meshwright.planner.search.search_control import ProgressReporter, SearchProgress


def course(num_scopes: int) -> tuple[ProgressReporter, list[SearchProgress]]:
    told: list[SearchProgress] = []
    return ProgressReporter(told.append, num_scopes), told


def test_the_bound_is_the_least_of_all_scopes_and_none_before_each_has_one() -> None:
    found, told = course(2)
    found.raise_bound(0, 5.0)
    found.raise_bound(1, 3.0)
    found.raise_bound(1, 4.0)
    assert [one.bound_seconds for one in told] == [0.0, 3.0, 4.0]
    assert {one.gap for one in told} == {None}


def test_the_gap_is_between_the_best_plan_and_the_bound() -> None:
    found, told = course(1)
    found.raise_bound(0, 6.0)
    found.add_plan(10.0)
    found.add_plan(8.0)
    assert [one.gap for one in told] == [None, 0.4, 0.25]
    found.raise_bound(0, 9.0)
    assert told[-1].gap == 0.0


def test_what_changes_nothing_is_not_told() -> None:
    found, told = course(1)
    found.set_phase("costing", 1, 7)
    found.set_phase("costing", 1, 7)
    found.raise_bound(0, 0.0)
    assert told == [SearchProgress(phase="costing", done=1, total=7, period_seconds=None, bound_seconds=0.0)]
    found.set_phase("searching", 0, 1)
    assert told[-1].phase == "searching"


def test_a_search_that_tells_nobody_goes_on() -> None:
    ProgressReporter(None, 1).add_plan(1.0)
