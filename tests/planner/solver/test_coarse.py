"""A coarse problem bounds the one it was made of, and fewer modes answer the same."""

from __future__ import annotations

import functools
import itertools

import pytest

from benchmarks.search.brute_force import best_makespan
from meshwright.planner.solver.coarse_problem import (
    coarsened,
    short_tasks,
    similar_to_coarse,
    similar_to_picked,
    with_representatives_only,
    without_dominated,
)
from meshwright.planner.solver.problem import Mode, Precedence, Problem, Resource, Run, Task, Transfer
from meshwright.planner.solver.transfer_ticks import TransferTicks
from tests.planner.problems import everywhere, random_blocks
from tests.seeds import seeds


@functools.cache
def asked(seed: int) -> Problem:
    return random_blocks(seed, num_ranks=4, num_tasks=4, num_modes=3)


@functools.cache
def least(seed: int) -> float:
    """What is asked is tried by brute force once for all tests."""
    return best(asked(seed))


def best(problem: Problem) -> float:
    found = best_makespan(everywhere(problem)) if all(task.modes for task in problem.tasks) else None
    return float("inf") if found is None else found


@seeds(4, all=20)
def test_what_another_mode_can_stand_in_for_is_not_missed(seed: int) -> None:
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
def test_what_is_around_some_modes_has_their_size_and_where_it_matters_a_layout_like_theirs(apart: int) -> None:
    problem = asked(3)
    coarse = coarsened(problem, parts=4, ticks=1, merge_ticks=apart)
    picked = tuple(task.modes[-1] for task in coarse.problem.tasks)
    for task, mode in zip(similar_to_coarse(problem, picked, coarse).tasks, picked, strict=True):
        assert {other.resource.num_ranks for other in task.modes} == {mode.resource.num_ranks}
        stand_ins = {coarse.resource(task.name, other.resource) for other in task.modes}
        assert stand_ins == {mode.resource} or task.name not in problem.tied


def layouts_of(problem: Problem) -> list[set[str]]:
    return [{mode.resource.layout for mode in task.modes} for task in problem.tasks]


@pytest.mark.parametrize(("lasts", "left"), [(4, {"Q"}), (3, {"P", "Q"})])
def test_a_layout_that_no_other_task_can_share_stands_in_for_one_that_is_moved_alike(
    lasts: int, left: set[str]
) -> None:
    slow, fast = (Mode(resource=Resource(0, 1, layout), ticks=ticks) for layout, ticks in (("P", 5), ("Q", 2)))
    other = Task("b", (Mode(resource=Resource(0, 1, "R"), ticks=1),))
    move = Transfer(
        name="a to b",
        source="a",
        target="b",
        occupies="both",
        ticks=TransferTicks.from_mapping({("P", "R", 1): lasts, ("Q", "R", 1): 4}),
    )
    problem = Problem(
        num_ranks=2,
        device_units=9,
        tasks=(Task("a", (slow, fast)), other),
        activities=(Run(name="a", task="a"), Run(name="b", task="b"), move),
        sharing_groups=(("a", "b"),),
        anywhere=True,
    )
    assert layouts_of(without_dominated(problem))[0] == left
    also = (*other.modes, Mode(resource=Resource(0, 1, "P"), ticks=9))
    assert layouts_of(without_dominated(problem.with_tasks((problem.tasks[0], Task("b", also)))))[0] == {
        "P",
        "Q",
    }


@seeds(4, all=16)
def test_no_answer_is_shorter_than_the_best_with_stand_ins(seed: int) -> None:
    problem = random_blocks(seed, num_ranks=4, num_tasks=3, num_modes=3)
    best = best_makespan(everywhere(problem))
    for number in (1, 2, 3):
        for names in itertools.combinations([task.name for task in problem.tasks], number):
            bound = best_makespan(everywhere(with_representatives_only(problem, names)))
            assert best is None or (bound is not None and bound <= best), names


@seeds(2, all=4)
def test_a_task_has_one_stand_in_for_each_number_of_ranks_and_others_keep_their_modes(seed: int) -> None:
    problem = random_blocks(seed, num_ranks=8, num_tasks=4, num_modes=6)
    first, *others = (task.name for task in problem.tasks)
    found = with_representatives_only(problem, {first})
    sizes = [mode.resource.num_ranks for mode in found.modes(first)]
    assert sorted(sizes) == sorted({mode.resource.num_ranks for mode in problem.modes(first)})
    for name in others:
        if first not in problem.owners(name):
            assert found.modes(name) == problem.modes(name)


def two_tasks(*short: Mode) -> Problem:
    """A long task, and one that reads it while it goes on."""
    long = Mode(resource=Resource(0, 2, "P"), ticks=100, resident_units=3, shared_units=2)
    return Problem(
        num_ranks=4,
        device_units=20,
        tasks=(Task("long", (long,)), Task("short", short)),
        activities=(
            Run(name="long", task="long"),
            Run(name="short", task="short"),
            Transfer(
                name="move",
                source="long",
                target="short",
                occupies="both",
                ticks=TransferTicks.from_mapping({("P", "Q", 0): 9}),
            ),
        ),
        precedences=(Precedence("long", "short", streamed=True),),
        sharing_groups=(("long", "short"),),
        anywhere=True,
    )


def test_a_stand_in_has_the_least_of_every_amount_whichever_mode_has_it() -> None:
    quick = Mode(resource=Resource(0, 2, "Q"), ticks=6, resident_units=9, shared_units=4, transient_units=3)
    streaming = Mode(
        resource=Resource(0, 2, "R"), ticks=8, early_ticks=7, resident_units=7, shared_units=1, transient_units=5
    )
    problem = with_representatives_only(two_tasks(quick, streaming), {"short"})
    (found,) = problem.modes("short")
    assert (found.ticks, found.ticks - found.early_ticks) == (6, 1)
    assert (found.resident_units, found.shared_units, found.transient_units) == (5, 0, 3)
    assert not any(activity.ticks.longest for activity in problem.activities if isinstance(activity, Transfer))


def test_short_tasks_are_those_that_may_take_few_ticks_but_for_what_is_streamed_from() -> None:
    slow, quick = (Mode(resource=Resource(0, 1, "Q"), ticks=ticks) for ticks in (50, 5))
    problem = two_tasks(slow, quick)
    assert short_tasks(problem, 5) == {"short"}
    assert short_tasks(problem, 4) == frozenset()
    assert short_tasks(problem, 1000) == {"short"}


def test_what_is_like_some_modes_has_their_ranks_and_but_for_stand_ins_their_layout() -> None:
    tasks = tuple(
        Task(name, tuple(Mode(resource=Resource(0, size, layout), ticks=1) for size in (1, 2) for layout in "PQ"))
        for name in "ab"
    )
    activities = tuple(Run(name=name, task=name) for name in "ab")
    problem = Problem(num_ranks=4, device_units=1, tasks=tasks, activities=activities, anywhere=True)
    picked = {"a": Mode(resource=Resource(2, 2, "any of 2"), ticks=1), "b": Mode(resource=Resource(3, 1, "Q"), ticks=1)}
    found = [[mode.resource for mode in task.modes] for task in similar_to_picked(problem, picked, {"a"}).tasks]
    assert found == [[Resource(0, 2, "P"), Resource(0, 2, "Q")], [Resource(0, 1, "Q")]]
