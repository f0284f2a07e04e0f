"""A coarse problem bounds the one it was made of, and fewer options answer the same."""

from __future__ import annotations

import pytest

from meshwright.planner.brute_force import best_makespan
from meshwright.planner.solver.bounds import least_makespan, within
from meshwright.planner.solver.coarse import around, coarsened, possible
from meshwright.planner.solver.problem import Problem
from tests.planner.problems import random_blocks

SEEDS = range(20)


def asked(seed: int) -> Problem:
    return random_blocks(seed, num_ranks=4, num_calls=4, num_options=3)


def best(problem: Problem) -> float:
    found = best_makespan(problem.everywhere()) if all(call.options for call in problem.calls) else None
    return float("inf") if found is None else found


@pytest.mark.parametrize("seed", SEEDS)
def test_what_another_option_can_stand_in_for_is_not_missed(seed: int) -> None:
    assert best(possible(asked(seed))) == best(asked(seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_no_answer_is_shorter_than_the_best_of_the_coarse_problem(seed: int) -> None:
    problem = asked(seed)
    for parts, ticks in ((1, 1), (4, 3)):
        assert best(coarsened(problem, parts=parts, ticks=ticks)) <= best(problem)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_coarse_problem_of_whole_blocks_and_single_ticks_has_the_same_best(seed: int) -> None:
    problem = asked(seed)
    assert best(coarsened(problem, parts=problem.device_blocks, ticks=1)) == best(problem)


@pytest.mark.parametrize("seed", SEEDS)
def test_options_that_cannot_meet_a_makespan_are_in_no_answer_within_it(seed: int) -> None:
    problem = asked(seed)
    shortest = best(problem)
    if shortest < float("inf"):
        assert best(within(problem, int(shortest))) == shortest
        assert least_makespan(problem) <= shortest


def test_what_is_around_some_options_has_their_size_and_their_layout_where_it_matters() -> None:
    problem = asked(3)
    picked = tuple(call.options[-1] for call in problem.calls)
    for call, option in zip(around(problem, picked).calls, picked, strict=True):
        assert option in call.options
        places = {other.place for other in call.options}
        assert {place.num_ranks for place in places} == {option.place.num_ranks}
        assert places == {option.place} or call.name not in problem.tied
