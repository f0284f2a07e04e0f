"""A coarse problem bounds the one it was made of, and fewer options answer the same."""

from __future__ import annotations

import functools

import pytest

from benchmarks.search.brute_force import best_makespan
from meshwright.planner.solver.coarse import around, coarsened, possible
from meshwright.planner.solver.problem import CallOptions, CallRun, Option, Place, Problem, Transfer
from tests.planner.problems import everywhere, random_blocks

SEEDS = range(20)


@functools.cache
def asked(seed: int) -> Problem:
    return random_blocks(seed, num_ranks=4, num_calls=4, num_options=3)


@functools.cache
def least(seed: int) -> float:
    """What is asked is tried by brute force once for all tests."""
    return best(asked(seed))


def best(problem: Problem) -> float:
    found = best_makespan(everywhere(problem)) if all(call.options for call in problem.calls) else None
    return float("inf") if found is None else found


@pytest.mark.parametrize("seed", SEEDS)
def test_what_another_option_can_stand_in_for_is_not_missed(seed: int) -> None:
    assert best(possible(asked(seed))) == least(seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_answer_is_shorter_than_the_best_of_the_coarse_problem(seed: int) -> None:
    problem = asked(seed)
    for parts, ticks, apart in ((1, 1, 0), (4, 3, 0), (4, 3, 1), (4, 1, 2), (1, 1, 5)):
        assert best(coarsened(problem, parts=parts, ticks=ticks, apart=apart).problem) <= least(seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_coarse_problem_of_whole_blocks_and_single_ticks_has_the_same_best(seed: int) -> None:
    problem = asked(seed)
    assert best(coarsened(problem, parts=problem.device_blocks, ticks=1).problem) == least(seed)


@pytest.mark.parametrize("apart", [0, 3])
def test_what_is_around_some_options_has_their_size_and_where_it_matters_a_layout_like_theirs(apart: int) -> None:
    problem = asked(3)
    coarse = coarsened(problem, parts=4, ticks=1, apart=apart)
    picked = tuple(call.options[-1] for call in coarse.problem.calls)
    for call, option in zip(around(problem, picked, coarse).calls, picked, strict=True):
        assert {other.place.num_ranks for other in call.options} == {option.place.num_ranks}
        stand_ins = {coarse.place(call.name, other.place) for other in call.options}
        assert stand_ins == {option.place} or call.name not in problem.tied


def layouts_of(problem: Problem) -> list[set[str]]:
    return [{option.place.layout for option in call.options} for call in problem.calls]


@pytest.mark.parametrize(("lasts", "left"), [(4, {"Q"}), (3, {"P", "Q"})])
def test_a_layout_that_no_other_call_can_share_stands_in_for_one_that_is_moved_alike(
    lasts: int, left: set[str]
) -> None:
    slow, fast = (Option(place=Place(0, 1, layout), ticks=ticks) for layout, ticks in (("P", 5), ("Q", 2)))
    other = CallOptions("b", (Option(place=Place(0, 1, "R"), ticks=1),))
    move = Transfer(
        name="a to b", source="a", target="b", occupies="both", ticks={("P", "R", 1): lasts, ("Q", "R", 1): 4}
    )
    problem = Problem(
        num_ranks=2,
        device_blocks=9,
        calls=(CallOptions("a", (slow, fast)), other),
        tasks=(CallRun(name="a", call="a"), CallRun(name="b", call="b"), move),
        copies=(("a", "b"),),
        anywhere=True,
    )
    assert layouts_of(possible(problem))[0] == left
    also = (*other.options, Option(place=Place(0, 1, "P"), ticks=9))
    assert layouts_of(possible(problem.with_calls((problem.calls[0], CallOptions("b", also)))))[0] == {"P", "Q"}
