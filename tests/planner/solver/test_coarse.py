"""A coarse problem bounds the one it was made of, and fewer options answer the same."""

from __future__ import annotations

import functools
import itertools

import pytest

from benchmarks.search.brute_force import best_makespan
from meshwright.planner.solver.coarse_problem import (
    coarsened,
    short_calls,
    similar_to_coarse,
    similar_to_picked,
    with_representatives_only,
    without_dominated,
)
from meshwright.planner.solver.problem import CallOptions, CallRun, Option, Place, Precedence, Problem, Transfer
from tests.planner.problems import everywhere, random_blocks
from tests.seeds import seeds


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


@seeds(4, all=20)
def test_what_another_option_can_stand_in_for_is_not_missed(seed: int) -> None:
    assert best(without_dominated(asked(seed))) == least(seed)


@seeds(4, all=20)
def test_no_answer_is_shorter_than_the_best_of_the_coarse_problem(seed: int) -> None:
    problem = asked(seed)
    for parts, ticks, apart in ((1, 1, 0), (4, 3, 0), (4, 3, 1), (4, 1, 2), (1, 1, 5)):
        assert best(coarsened(problem, parts=parts, ticks=ticks, merge_ticks=apart).problem) <= least(seed)


@seeds(4, all=20)
def test_a_coarse_problem_of_whole_blocks_and_single_ticks_has_the_same_best(seed: int) -> None:
    problem = asked(seed)
    assert best(coarsened(problem, parts=problem.device_units, ticks=1).problem) == least(seed)


@pytest.mark.parametrize("apart", [0, 3])
def test_what_is_around_some_options_has_their_size_and_where_it_matters_a_layout_like_theirs(apart: int) -> None:
    problem = asked(3)
    coarse = coarsened(problem, parts=4, ticks=1, merge_ticks=apart)
    picked = tuple(call.options[-1] for call in coarse.problem.calls)
    for call, option in zip(similar_to_coarse(problem, picked, coarse).calls, picked, strict=True):
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
        device_units=9,
        calls=(CallOptions("a", (slow, fast)), other),
        tasks=(CallRun(name="a", call="a"), CallRun(name="b", call="b"), move),
        sharing_groups=(("a", "b"),),
        anywhere=True,
    )
    assert layouts_of(without_dominated(problem))[0] == left
    also = (*other.options, Option(place=Place(0, 1, "P"), ticks=9))
    assert layouts_of(without_dominated(problem.with_calls((problem.calls[0], CallOptions("b", also)))))[0] == {
        "P",
        "Q",
    }


@seeds(4, all=16)
def test_no_answer_is_shorter_than_the_best_with_stand_ins(seed: int) -> None:
    problem = random_blocks(seed, num_ranks=4, num_calls=3, num_options=3)
    best = best_makespan(everywhere(problem))
    for number in (1, 2, 3):
        for names in itertools.combinations([call.name for call in problem.calls], number):
            bound = best_makespan(everywhere(with_representatives_only(problem, names)))
            assert best is None or (bound is not None and bound <= best), names


@seeds(2, all=4)
def test_a_call_has_one_stand_in_for_each_number_of_ranks_and_others_keep_their_options(seed: int) -> None:
    problem = random_blocks(seed, num_ranks=8, num_calls=4, num_options=6)
    first, *others = (call.name for call in problem.calls)
    found = with_representatives_only(problem, {first})
    sizes = [option.place.num_ranks for option in found.options(first)]
    assert sorted(sizes) == sorted({option.place.num_ranks for option in problem.options(first)})
    for name in others:
        if first not in problem.owners(name):
            assert found.options(name) == problem.options(name)


def two_calls(*short: Option) -> Problem:
    """A long call, and one that reads it while it goes on."""
    long = Option(place=Place(0, 2, "P"), ticks=100, resident_units=3, shared_units=2)
    return Problem(
        num_ranks=4,
        device_units=20,
        calls=(CallOptions("long", (long,)), CallOptions("short", short)),
        tasks=(
            CallRun(name="long", call="long"),
            CallRun(name="short", call="short"),
            Transfer(name="move", source="long", target="short", occupies="both", ticks={("P", "Q", 0): 9}),
        ),
        precedences=(Precedence("long", "short", streamed=True),),
        sharing_groups=(("long", "short"),),
        anywhere=True,
    )


def test_a_stand_in_has_the_least_of_every_amount_whichever_option_has_it() -> None:
    quick = Option(place=Place(0, 2, "Q"), ticks=6, resident_units=9, shared_units=4, transient_units=3)
    streaming = Option(
        place=Place(0, 2, "R"), ticks=8, early_ticks=7, resident_units=7, shared_units=1, transient_units=5
    )
    problem = with_representatives_only(two_calls(quick, streaming), {"short"})
    (found,) = problem.options("short")
    assert (found.ticks, found.ticks - found.early_ticks) == (6, 1)
    assert (found.resident_units, found.shared_units, found.transient_units) == (5, 0, 3)
    assert not any(task.ticks for task in problem.tasks if isinstance(task, Transfer))


def test_short_calls_are_those_that_may_take_few_ticks_but_for_what_is_streamed_from() -> None:
    slow, quick = (Option(place=Place(0, 1, "Q"), ticks=ticks) for ticks in (50, 5))
    problem = two_calls(slow, quick)
    assert short_calls(problem, 5) == {"short"}
    assert short_calls(problem, 4) == frozenset()
    assert short_calls(problem, 1000) == {"short"}


def test_what_is_like_some_options_has_their_ranks_and_but_for_stand_ins_their_layout() -> None:
    calls = tuple(
        CallOptions(name, tuple(Option(place=Place(0, size, layout), ticks=1) for size in (1, 2) for layout in "PQ"))
        for name in "ab"
    )
    tasks = tuple(CallRun(name=name, call=name) for name in "ab")
    problem = Problem(num_ranks=4, device_units=1, calls=calls, tasks=tasks, anywhere=True)
    picked = {"a": Option(place=Place(2, 2, "any of 2"), ticks=1), "b": Option(place=Place(3, 1, "Q"), ticks=1)}
    found = [[option.place for option in call.options] for call in similar_to_picked(problem, picked, {"a"}).calls]
    assert found == [[Place(0, 2, "P"), Place(0, 2, "Q")], [Place(0, 1, "Q")]]
