"""What a search is asked to beat, and what it says when nothing does."""

from __future__ import annotations

import math
import time

import pytest

from meshwright.planner.solver.problem import Mode, Problem, Resource, Run, Task
from meshwright.planner.solver.result import Answer, Limits, Result, picked_modes


def test_without_a_gap_only_what_is_shorter_by_a_tick_is_worth_finding() -> None:
    assert Limits().improving_makespan(100) == 99
    assert Limits().comparable_makespan(100) == 100


@pytest.mark.parametrize("gap", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("makespan", [1, 7, 100, 12345])
def test_what_is_left_when_nothing_shorter_is_found_is_within_the_gap(gap: float, makespan: int) -> None:
    limits = Limits(gap=gap)
    bound = limits.improving_makespan(makespan) + 1
    assert makespan - bound <= gap * makespan
    longest = limits.comparable_makespan(makespan)
    assert limits.improving_makespan(longest) < makespan <= longest
    assert limits.improving_makespan(longest + 1) >= makespan


@pytest.mark.parametrize(("num_ranks", "gap"), [(8, 0.01), (1024, 0.01), (1025, 0.03), (131072, 0.03)])
def test_a_search_that_is_given_no_gap_takes_the_usual_one(num_ranks: int, gap: float) -> None:
    assert Limits(seed=3).with_default_gap(num_ranks) == Limits(seed=3, gap=gap)
    assert Limits(gap=0.0).with_default_gap(num_ranks).gap == 0.0
    assert Limits().tolerance == 0.0


def test_what_is_asked_for_comes_before_what_is_better() -> None:
    limits = Limits(max_makespan=50)
    assert [limits.target(makespan) for makespan in (80, 51, 50, 20)] == [50, 50, 49, 19]


def test_of_an_acceptable_answer_only_what_is_shorter_by_more_than_the_gap_is_worth_finding() -> None:
    limits = Limits(max_makespan=50, max_acceptable_makespan=60, gap=0.2)
    assert [limits.target(makespan) for makespan in (80, 61, 60, 50)] == [50, 50, 48, 40]


def test_time_is_left_until_the_deadline_and_for_ever_without_one() -> None:
    assert Limits().seconds_left == math.inf
    assert Limits(deadline=time.monotonic() - 1).seconds_left < 0
    assert 50 < Limits(deadline=time.monotonic() + 60).seconds_left <= 60


def test_an_answer_that_is_beaten_is_longer_than_what_was_asked() -> None:
    result = Result.beaten(41)
    assert (result.status, result.answer, result.objective, result.bound) == ("beaten", None, None, 42)


def test_an_answer_gives_its_modes_the_ranks_that_it_found() -> None:
    mode = Mode(resource=Resource(0, 2, "P"), ticks=3)
    tasks = (Task("a", (mode.at(0), mode)),)
    problem = Problem(num_ranks=8, device_units=1, tasks=tasks, activities=(Run(name="a", task="a"),), anywhere=True)
    answer = Answer(picked={"a": 1}, first_ranks={"a": 6}, starts={"a": 0})
    assert picked_modes(problem, answer) == {"a": mode.at(6)}
