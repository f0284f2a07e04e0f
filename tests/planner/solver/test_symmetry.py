"""Blocks are swapped only where that leaves every task with the modes that it had."""

from __future__ import annotations

from dataclasses import replace

from meshwright.planner.solver.problem import Mode, Problem, Resource, Run, Task
from meshwright.planner.solver.rank_ranges import swaps
from tests.planner.problems import everywhere, random_blocks
from tests.seeds import seeds


def problem(*firsts: int, size: int = 1, num_ranks: int = 4) -> Problem:
    """A task with a mode at each of these ranks."""
    modes = tuple(Mode(resource=Resource(first, size, "P"), ticks=1) for first in firsts)
    tasks = (Task("a", modes),)
    return Problem(num_ranks=num_ranks, device_units=1, tasks=tasks, activities=(Run(name="a", task="a"),))


def found(problem: Problem) -> set[tuple[int, int]]:
    """The first rank and the size of the left block of each swap."""
    return {(swap.left.start, len(swap.left)) for swap in swaps(problem)}


def test_ranks_that_a_task_may_have_alike_are_swapped() -> None:
    assert found(problem(0, 1, 2, 3)) == {(0, 1), (2, 1), (0, 2)}
    assert found(problem(0, 1)) == {(0, 1), (2, 1)}
    assert found(problem(0)) == {(2, 1)}


def test_an_mode_across_two_blocks_keeps_them_where_they_are() -> None:
    assert found(problem(1, size=2)) == set()
    assert found(problem(0, size=4)) == {(0, 1), (2, 1), (0, 2)}


def test_ranks_that_fill_no_aligned_block_are_not_swapped() -> None:
    assert found(problem(0, 1, 2, num_ranks=3)) == {(0, 1)}


@seeds(2, all=8)
def test_a_swap_maps_the_modes_of_every_task_to_themselves(seed: int) -> None:
    spread = everywhere(random_blocks(seed, num_ranks=8, num_tasks=3, num_modes=4))
    assert len(swaps(spread)) == 4 + 2 + 1
    for left, right in swaps(spread):
        image = {**dict(zip(left, right, strict=True)), **dict(zip(right, left, strict=True))}
        for task in spread.tasks:
            ranks = [frozenset(mode.resource.ranks) for mode in task.modes]
            assert {frozenset(image.get(rank, rank) for rank in one) for one in ranks} == set(ranks)


def test_modes_that_differ_in_time_are_not_alike() -> None:
    asked = problem(0, 1)
    slow = replace(asked.tasks[0].modes[1], ticks=2)
    assert found(asked.with_tasks((Task("a", (asked.tasks[0].modes[0], slow)),))) == {(2, 1)}


def test_modes_that_may_start_at_other_times_before_their_streams_end_are_not_alike() -> None:
    asked = problem(0, 1).tasks[0].modes
    ticking = [replace(one, ticks=5, early_ticks=early) for one, early in zip(asked, (2, 3), strict=True)]
    assert found(problem(0, 1).with_tasks((Task("a", tuple(ticking)),))) == {(2, 1)}
