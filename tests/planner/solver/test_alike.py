"""Layouts that are nearly alike are one, which has the least of what they take."""

from __future__ import annotations

import pytest

from benchmarks.search.brute_force import best_makespan
from meshwright.planner.solver.coarse_problem import merge_layouts
from meshwright.planner.solver.problem import Mode, Problem, Resource, Run, Task, Transfer
from meshwright.planner.solver.transfer_ticks import TransferTicks
from tests.planner.problems import everywhere, random_blocks
from tests.seeds import seeds


def layouts_of(problem: Problem) -> list[set[str]]:
    return [{mode.resource.layout for mode in task.modes} for task in problem.tasks]


def test_layouts_are_one_when_their_transfers_last_about_as_long_and_their_copies_are_about_as_large() -> None:
    def mode(layout: str, copy: int) -> Mode:
        return Mode(resource=Resource(0, 1, layout), ticks=1, resident_units=copy + 1, shared_units=copy)

    move = Transfer(
        name="a to b",
        source="a",
        target="b",
        occupies="both",
        ticks=TransferTicks.from_mapping({("P", "P", 0): 12, ("P", "Q", 0): 15, ("Q", "P", 0): 14, ("Q", "Q", 0): 19}),
    )
    tasks = tuple(Task(name, (mode("P", 4), mode("Q", 6))) for name in "ab")
    runs = (Run(name="a", task="a"), Run(name="b", task="b"))
    problem = Problem(
        num_ranks=2, device_units=20, tasks=tasks, activities=(*runs, move), sharing_groups=(("a", "b"),), anywhere=True
    )
    merged = merge_layouts(problem, ticks=10, units=4).problem
    assert layouts_of(merged) == [{"P"}, {"P"}]
    assert [(o.resident_units, o.shared_units) for o in merged.tasks[0].modes] == [(5, 4), (5, 4)]
    (merged_move,) = (activity for activity in merged.activities if isinstance(activity, Transfer))
    assert merged_move.ticks == TransferTicks.from_mapping({("P", "P", 0): 12})
    for ticks, blocks in ((10, 5), (5, 4)):
        assert layouts_of(merge_layouts(problem, ticks=ticks, units=blocks).problem) == [{"P", "Q"}, {"P", "Q"}]


@seeds(2, all=8)
@pytest.mark.parametrize(("ticks", "blocks"), [(1, 1), (2, 4), (100, 100)])
def test_every_answer_has_one_that_is_no_longer(seed: int, ticks: int, blocks: int) -> None:
    problem = random_blocks(seed, num_ranks=4, num_tasks=3, num_modes=3)
    best, fewer = (
        best_makespan(everywhere(p)) for p in (problem, merge_layouts(problem, ticks=ticks, units=blocks).problem)
    )
    assert best is None or (fewer is not None and fewer <= best)


@seeds(2, all=6)
def test_every_layout_has_one_that_stands_for_it_and_for_itself(seed: int) -> None:
    problem = random_blocks(seed, num_ranks=4, num_tasks=4, num_modes=3)
    found = merge_layouts(problem, ticks=100, units=100)
    for task, fewer in zip(problem.tasks, found.problem.tasks, strict=True):
        assert {found.resource(task.name, o.resource) for o in task.modes} == {o.resource for o in fewer.modes}
        assert all(found.resource(task.name, o.resource) == o.resource for o in fewer.modes)
