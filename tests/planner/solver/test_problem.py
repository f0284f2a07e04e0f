"""A problem's own arithmetic: who waits for what, how long an activity lasts, what a rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from meshwright.planner.solver.problem import (
    Mode,
    Precedence,
    Problem,
    Resource,
    Run,
    Task,
    Transfer,
    earliest_ends,
)
from meshwright.planner.solver.transfer_ticks import TransferTicks
from tests.planner.problems import everywhere, random_blocks, random_problem
from tests.seeds import seeds

ONE, OTHER, BOTH = Resource(0, 1, "P"), Resource(1, 1, "P"), Resource(0, 2, "P")


def mode(resource: Resource, ticks: int = 1, **fields: int) -> Mode:
    return Mode(resource=resource, ticks=ticks, **fields)


def two_tasks(**fields: object) -> Problem:
    """A task on one rank or on both, and another that may share its copy and is moved to."""
    move = Transfer(
        name="move",
        source="a",
        target="b",
        occupies="both",
        ticks=TransferTicks.from_mapping({("P", "P", 0): 7, ("P", "P", 1): 3}),
    )
    tasks = (
        Task("a", (mode(ONE, 4), mode(BOTH, 2))),
        Task("b", (mode(ONE, 5), mode(OTHER, 5, early_ticks=2))),
    )
    activities = (move, Run(name="a", task="a"), Run(name="b", task="b"))
    given = {
        "num_ranks": 2,
        "device_units": 9,
        "tasks": tasks,
        "activities": activities,
        "sharing_groups": (("a", "b"),),
    }
    return Problem(**{**given, **fields})


def picked(problem: Problem, a: int, b: int) -> Mapping[str, Mode]:
    return {"a": problem.modes("a")[a], "b": problem.modes("b")[b]}


def test_a_problem_refuses_what_it_cannot_mean() -> None:
    run = Run(name="a", task="a")

    def of(modes: tuple[Mode, ...], **fields: object) -> Problem:
        given = {"num_ranks": 1, "device_units": 1, "tasks": (Task("a", modes),), "activities": (run,)}
        return Problem(**{**given, **fields})

    with pytest.raises(ValueError, match="not within the 1 ranks"):
        of((mode(BOTH),))
    with pytest.raises(ValueError, match="form a cycle"):
        of(
            (mode(ONE),),
            activities=(run, Run(name="b", task="a")),
            precedences=(Precedence("a", "b"), Precedence("b", "a")),
        )
    with pytest.raises(ValueError, match="1 ticks starts 2 early"):
        of((mode(ONE, early_ticks=2),))
    with pytest.raises(ValueError, match="has first rank 0 in the problem"):
        of((mode(Resource(1, 1, "P")),), num_ranks=2, anywhere=True)
    with pytest.raises(ValueError, match="3 ranks are neither a multiple of 2 nor all 5"):
        of((mode(Resource(0, 3, "P")),), num_ranks=5, anywhere=True, range_step=2)
    with pytest.raises(ValueError, match=r"2 ranks do not divide the next larger rank range of \[2, 3\]"):
        of((mode(Resource(0, 2, "P")), mode(Resource(0, 3, "P"))), num_ranks=4, anywhere=True)
    with pytest.raises(ValueError, match="use a longer tick"):
        of((mode(ONE, 2**31),))
    with pytest.raises(ValueError, match=r"there is no task named \['b'\]"):
        of((mode(ONE),), sharing_groups=(("a", "b"),))
    with pytest.raises(ValueError, match="2 of 1 units cannot be shared"):
        of((mode(ONE, resident_units=1, shared_units=2),))


def test_runs_of_one_task_and_equal_moves_last_alike() -> None:
    def move(name: str, ticks: int) -> Transfer:
        return Transfer(
            name=name, source="a", target="b", occupies="both", ticks=TransferTicks.from_mapping({("P", "Q", 0): ticks})
        )

    tasks = tuple(Task(name, (Mode(resource=Resource(0, 1, "P"), ticks=1),)) for name in "ab")
    activities = (
        Run(name="a0", task="a"),
        Run(name="b0", task="b"),
        Run(name="a1", task="a"),
        move("m", 4),
        move("n", 4),
    )
    problem = Problem(num_ranks=1, device_units=1, tasks=tasks, activities=(*activities, move("o", 5)))
    assert problem.lasts_like == {"a0": "a0", "b0": "b0", "a1": "a0", "m": "m", "n": "m", "o": "o"}


def test_atoms_are_ranks_that_every_mode_covers_alike() -> None:
    tasks = (Task("a", (mode(Resource(0, 4, "P")), mode(Resource(4, 2, "P")))),)
    problem = Problem(num_ranks=8, device_units=1, tasks=tasks, activities=(Run(name="a", task="a"),))
    assert problem.atoms == (range(4), range(4, 6), range(6, 8))


def test_a_transfer_lasts_by_what_its_resources_have_in_common_and_not_where_its_target_shares_a_copy() -> None:
    problem = two_tasks()
    move = problem.activities[0]
    assert [problem.duration(move, picked(problem, a, b)) for a, b in ((0, 1), (1, 0), (0, 0))] == [7, 3, 0]


def test_a_shared_copy_is_held_once_and_only_the_largest_transient_counts() -> None:
    """Copies of 4 blocks; b keeps one more, and needs 3 while it runs, a needs 2."""
    a = mode(ONE, resident_units=4, shared_units=4, transient_units=2)
    b = mode(ONE, resident_units=5, shared_units=4, transient_units=3)
    apart = replace(b, resource=OTHER)
    problem = two_tasks(tasks=(Task("a", (a,)), Task("b", (b, apart))))
    assert problem.memory({"a": a, "b": b}) == (4 + 1 + 3, 0)
    assert problem.memory({"a": a, "b": apart}) == (4 + 2, 5 + 3)


def test_ranks_take_activities_in_order_and_each_as_early_as_it_can() -> None:
    """The move of 3 occupies both ranks, then a and b run side by side, b a tick after the move."""
    problem = two_tasks(precedences=(Precedence("move", "b", 1),))
    tasks = picked(problem, 0, 1)
    assert earliest_ends(problem, tasks, ("move", "a", "b")) == {"move": 7, "a": 11, "b": 13}
    assert earliest_ends(problem, tasks, ("a", "move", "b")) == {"a": 4, "move": 11, "b": 17}


@pytest.mark.parametrize(("streamed", "early", "starts"), [(False, 9, 12), (True, 3, 9), (True, 20, 4)])
def test_what_is_streamed_to_starts_early_but_not_before_its_producer(streamed: bool, early: int, starts: int) -> None:
    assert Precedence("a", "b", 2, streamed).earliest(4, 10, early) == starts


@seeds(2, all=8)
def test_the_horizon_has_room_for_every_order_of_every_choice(seed: int) -> None:
    problem = random_problem(seed, num_ranks=4, num_tasks=4, num_modes=2)
    slowest = {task.name: max(task.modes, key=lambda o: o.ticks) for task in problem.tasks}
    assert max(earliest_ends(problem, slowest, problem.order).values()) <= problem.horizon


def test_tied_tasks_are_those_whose_layout_matters_to_others() -> None:
    assert two_tasks().tied == {"a", "b"}
    assert two_tasks(sharing_groups=(), activities=two_tasks().activities[1:]).tied == frozenset()
    assert [two_tasks().owners(name) for name in "ab"] == [(), ("a",)]


@seeds(2, all=4)
def test_a_block_starts_at_every_multiple_of_its_size(seed: int) -> None:
    problem = random_blocks(seed, num_ranks=8, num_tasks=2, num_modes=3)
    for task, spread in zip(problem.tasks, everywhere(problem).tasks, strict=True):
        sizes = [one.resource.num_ranks for one in task.modes]
        assert len(spread.modes) == sum(8 // size for size in sizes)
        assert all(one.resource.first_rank % one.resource.num_ranks == 0 for one in spread.modes)
