"""A problem's own arithmetic: who waits for what, how long a task lasts, what a rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from meshwright.planner.solver.problem import (
    CallOptions,
    CallRun,
    Option,
    Place,
    Precedence,
    Problem,
    Transfer,
    earliest_ends,
)
from tests.planner.problems import everywhere, random_blocks, random_problem
from tests.seeds import seeds

ONE, OTHER, BOTH = Place(0, 1, "P"), Place(1, 1, "P"), Place(0, 2, "P")


def option(place: Place, ticks: int = 1, **fields: int) -> Option:
    return Option(place=place, ticks=ticks, **fields)


def two_calls(**fields: object) -> Problem:
    """A call on one rank or on both, and another that may share its copy and is moved to."""
    move = Transfer(name="move", source="a", target="b", occupies="both", ticks={("P", "P", 0): 7, ("P", "P", 1): 3})
    calls = (
        CallOptions("a", (option(ONE, 4), option(BOTH, 2))),
        CallOptions("b", (option(ONE, 5), option(OTHER, 5, early_ticks=2))),
    )
    tasks = (move, CallRun(name="a", call="a"), CallRun(name="b", call="b"))
    given = {"num_ranks": 2, "device_units": 9, "calls": calls, "tasks": tasks, "sharing_groups": (("a", "b"),)}
    return Problem(**{**given, **fields})


def picked(problem: Problem, a: int, b: int) -> Mapping[str, Option]:
    return {"a": problem.options("a")[a], "b": problem.options("b")[b]}


def test_a_problem_refuses_what_it_cannot_mean() -> None:
    run = CallRun(name="a", call="a")

    def of(options: tuple[Option, ...], **fields: object) -> Problem:
        given = {"num_ranks": 1, "device_units": 1, "calls": (CallOptions("a", options),), "tasks": (run,)}
        return Problem(**{**given, **fields})

    with pytest.raises(ValueError, match="not within the 1 ranks"):
        of((option(BOTH),))
    with pytest.raises(ValueError, match="form a cycle"):
        of(
            (option(ONE),),
            tasks=(run, CallRun(name="b", call="a")),
            precedences=(Precedence("a", "b"), Precedence("b", "a")),
        )
    with pytest.raises(ValueError, match="1 ticks starts 2 early"):
        of((option(ONE, early_ticks=2),))
    with pytest.raises(ValueError, match="has first rank 0 in the problem"):
        of((option(Place(1, 1, "P")),), num_ranks=2, anywhere=True)
    with pytest.raises(ValueError, match="3 ranks are neither a multiple of 2 nor all 5"):
        of((option(Place(0, 3, "P")),), num_ranks=5, anywhere=True, range_step=2)
    with pytest.raises(ValueError, match=r"2 ranks do not divide the next larger rank range of \[2, 3\]"):
        of((option(Place(0, 2, "P")), option(Place(0, 3, "P"))), num_ranks=4, anywhere=True)
    with pytest.raises(ValueError, match="use a longer tick"):
        of((option(ONE, 2**31),))
    with pytest.raises(ValueError, match=r"there is no call named \['b'\]"):
        of((option(ONE),), sharing_groups=(("a", "b"),))
    with pytest.raises(ValueError, match="2 of 1 units cannot be shared"):
        of((option(ONE, resident_units=1, shared_units=2),))


def test_runs_of_one_call_and_equal_moves_last_alike() -> None:
    def move(name: str, ticks: int) -> Transfer:
        return Transfer(name=name, source="a", target="b", occupies="both", ticks={("P", "Q", 0): ticks})

    calls = tuple(CallOptions(name, (Option(place=Place(0, 1, "P"), ticks=1),)) for name in "ab")
    tasks = (
        CallRun(name="a0", call="a"),
        CallRun(name="b0", call="b"),
        CallRun(name="a1", call="a"),
        move("m", 4),
        move("n", 4),
    )
    problem = Problem(num_ranks=1, device_units=1, calls=calls, tasks=(*tasks, move("o", 5)))
    assert problem.lasts_like == {"a0": "a0", "b0": "b0", "a1": "a0", "m": "m", "n": "m", "o": "o"}


def test_atoms_are_ranks_that_every_option_covers_alike() -> None:
    calls = (CallOptions("a", (option(Place(0, 4, "P")), option(Place(4, 2, "P")))),)
    problem = Problem(num_ranks=8, device_units=1, calls=calls, tasks=(CallRun(name="a", call="a"),))
    assert problem.atoms == (range(4), range(4, 6), range(6, 8))


def test_a_transfer_lasts_by_what_its_places_have_in_common_and_not_where_its_target_shares_a_copy() -> None:
    problem = two_calls()
    move = problem.tasks[0]
    assert [problem.duration(move, picked(problem, a, b)) for a, b in ((0, 1), (1, 0), (0, 0))] == [7, 3, 0]


def test_a_shared_copy_is_held_once_and_only_the_largest_transient_counts() -> None:
    """Copies of 4 blocks; b keeps one more, and needs 3 while it runs, a needs 2."""
    a = option(ONE, resident_units=4, shared_units=4, transient_units=2)
    b = option(ONE, resident_units=5, shared_units=4, transient_units=3)
    apart = replace(b, place=OTHER)
    problem = two_calls(calls=(CallOptions("a", (a,)), CallOptions("b", (b, apart))))
    assert problem.memory({"a": a, "b": b}) == (4 + 1 + 3, 0)
    assert problem.memory({"a": a, "b": apart}) == (4 + 2, 5 + 3)


def test_ranks_take_tasks_in_order_and_each_as_early_as_it_can() -> None:
    """The move of 3 occupies both ranks, then a and b run side by side, b a tick after the move."""
    problem = two_calls(precedences=(Precedence("move", "b", 1),))
    calls = picked(problem, 0, 1)
    assert earliest_ends(problem, calls, ("move", "a", "b")) == {"move": 7, "a": 11, "b": 13}
    assert earliest_ends(problem, calls, ("a", "move", "b")) == {"a": 4, "move": 11, "b": 17}


@pytest.mark.parametrize(("streamed", "early", "starts"), [(False, 9, 12), (True, 3, 9), (True, 20, 4)])
def test_what_is_streamed_to_starts_early_but_not_before_its_producer(streamed: bool, early: int, starts: int) -> None:
    assert Precedence("a", "b", 2, streamed).earliest(4, 10, early) == starts


@seeds(2, all=8)
def test_the_horizon_has_room_for_every_order_of_every_choice(seed: int) -> None:
    problem = random_problem(seed, num_ranks=4, num_calls=4, num_options=2)
    slowest = {call.name: max(call.options, key=lambda o: o.ticks) for call in problem.calls}
    assert max(earliest_ends(problem, slowest, problem.order).values()) <= problem.horizon


def test_tied_calls_are_those_whose_layout_matters_to_others() -> None:
    assert two_calls().tied == {"a", "b"}
    assert two_calls(sharing_groups=(), tasks=two_calls().tasks[1:]).tied == frozenset()
    assert [two_calls().owners(name) for name in "ab"] == [(), ("a",)]


@seeds(2, all=4)
def test_a_block_starts_at_every_multiple_of_its_size(seed: int) -> None:
    problem = random_blocks(seed, num_ranks=8, num_calls=2, num_options=3)
    for call, spread in zip(problem.calls, everywhere(problem).calls, strict=True):
        sizes = [one.place.num_ranks for one in call.options]
        assert len(spread.options) == sum(8 // size for size in sizes)
        assert all(one.place.first_rank % one.place.num_ranks == 0 for one in spread.options)
