"""Blocks are swapped only where that leaves every call with the options that it had."""

from __future__ import annotations

from dataclasses import replace

from meshwright.planner.solver.problem import CallOptions, CallRun, Option, Place, Problem
from meshwright.planner.solver.rank_ranges import swaps
from tests.planner.problems import everywhere, random_blocks
from tests.seeds import seeds


def problem(*firsts: int, size: int = 1, num_ranks: int = 4) -> Problem:
    """A call with an option at each of these ranks."""
    options = tuple(Option(place=Place(first, size, "P"), ticks=1) for first in firsts)
    calls = (CallOptions("a", options),)
    return Problem(num_ranks=num_ranks, device_units=1, calls=calls, tasks=(CallRun(name="a", call="a"),))


def found(problem: Problem) -> set[tuple[int, int]]:
    """The first rank and the size of the left block of each swap."""
    return {(swap.left.start, len(swap.left)) for swap in swaps(problem)}


def test_ranks_that_a_call_may_have_alike_are_swapped() -> None:
    assert found(problem(0, 1, 2, 3)) == {(0, 1), (2, 1), (0, 2)}
    assert found(problem(0, 1)) == {(0, 1), (2, 1)}
    assert found(problem(0)) == {(2, 1)}


def test_an_option_across_two_blocks_keeps_them_where_they_are() -> None:
    assert found(problem(1, size=2)) == set()
    assert found(problem(0, size=4)) == {(0, 1), (2, 1), (0, 2)}


def test_ranks_that_fill_no_aligned_block_are_not_swapped() -> None:
    assert found(problem(0, 1, 2, num_ranks=3)) == {(0, 1)}


@seeds(2, all=8)
def test_a_swap_maps_the_options_of_every_call_to_themselves(seed: int) -> None:
    spread = everywhere(random_blocks(seed, num_ranks=8, num_calls=3, num_options=4))
    assert len(swaps(spread)) == 4 + 2 + 1
    for left, right in swaps(spread):
        image = {**dict(zip(left, right, strict=True)), **dict(zip(right, left, strict=True))}
        for call in spread.calls:
            ranks = [frozenset(option.place.ranks) for option in call.options]
            assert {frozenset(image.get(rank, rank) for rank in one) for one in ranks} == set(ranks)


def test_options_that_differ_in_time_are_not_alike() -> None:
    asked = problem(0, 1)
    slow = replace(asked.calls[0].options[1], ticks=2)
    assert found(asked.with_calls((CallOptions("a", (asked.calls[0].options[0], slow)),))) == {(2, 1)}


def test_options_that_may_start_at_other_times_before_their_streams_end_are_not_alike() -> None:
    asked = problem(0, 1).calls[0].options
    ticking = [replace(one, ticks=5, early_ticks=early) for one, early in zip(asked, (2, 3), strict=True)]
    assert found(problem(0, 1).with_calls((CallOptions("a", tuple(ticking)),))) == {(2, 1)}
