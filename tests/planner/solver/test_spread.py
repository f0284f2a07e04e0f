"""With work and memory spread over all ranks, every answer still has its resource in the relaxation."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from benchmarks.search.brute_force import best_makespan
from meshwright.planner.solver.linear_relaxation import ModeMask, SpreadRelaxation
from meshwright.planner.solver.problem import Mode, Problem, Resource, Run, Task
from tests.planner.problems import everywhere, only, random_blocks
from tests.seeds import seeds


def every(problem: Problem) -> ModeMask:
    return {task.name: np.ones(len(task.modes), dtype=bool) for task in problem.tasks}


@seeds(4, all=30)
def test_no_answer_ends_before_the_bound_of_any_of_its_modes(seed: int) -> None:
    problem = random_blocks(seed, num_ranks=4, num_tasks=3, num_modes=3)
    bounds = SpreadRelaxation(problem).bounds(every(problem))
    for picks in product(*(range(len(task.modes)) for task in problem.tasks)):
        best = best_makespan(everywhere(only(problem, picks)))
        if best is not None:
            assert bounds is not None
            assert bounds.least <= best
            assert all(bounds.each[c.name][i] <= best for c, i in zip(problem.tasks, picks, strict=True))


@seeds(3, all=10)
def test_modes_that_were_left_out_come_back(seed: int) -> None:
    problem = random_blocks(seed, num_ranks=4, num_tasks=3, num_modes=4)
    again, once = SpreadRelaxation(problem), SpreadRelaxation(problem).bounds(every(problem))
    again.bounds({task.name: np.arange(len(task.modes)) == 0 for task in problem.tasks})
    found = again.bounds(every(problem))
    assert (found is None) == (once is None)
    if found and once:
        assert found.least == once.least


def test_memory_that_is_left_decides_how_fast_a_task_may_be() -> None:
    """Of 10 blocks a takes 8 on both ranks; b takes 2 ticks with 6 blocks, or 9 with none: a mix of a third and two
    thirds would fit."""
    a = Task("a", (Mode(resource=Resource(0, 2, "P"), ticks=5, resident_units=8),))
    fast = Mode(resource=Resource(0, 2, "P"), ticks=2, resident_units=6)
    slow = Mode(resource=Resource(0, 2, "P"), ticks=9)
    problem = Problem(
        num_ranks=2,
        device_units=10,
        tasks=(a, Task("b", (fast, slow))),
        activities=tuple(Run(name=name, task=name) for name in "ab"),
    )
    bounds = SpreadRelaxation(problem).bounds(every(problem))
    assert bounds is not None
    assert bounds.least == pytest.approx(5 + 2 / 3 * 9 + 1 / 3 * 2, abs=1)
    assert SpreadRelaxation(problem).bounds({"a": np.array([True]), "b": np.array([False, False])}) is None
