"""The relaxation is below every answer, also below those with a mode that it did not take."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.search.brute_force import best_makespan
from meshwright.planner.solver import cp_model
from meshwright.planner.solver.fixed_ranks_model import FixedRanksModel
from meshwright.planner.solver.linear_relaxation import ModeMask, ProgramRelaxation
from meshwright.planner.solver.problem import Problem, Task
from tests.planner.problems import without_swaps
from tests.seeds import seeds


def with_mode(problem: Problem, task: int, index: int) -> Problem:
    tasks = list(problem.tasks)
    tasks[task] = Task(tasks[task].name, (tasks[task].modes[index],))
    return problem.with_tasks(tuple(tasks))


def every(problem: Problem) -> ModeMask:
    return {task.name: np.ones(len(task.modes), dtype=bool) for task in problem.tasks}


@seeds(4, all=16)
def test_no_answer_is_below_the_bound_nor_below_that_with_a_mode(seed: int) -> None:
    problem = without_swaps(seed)
    relaxation = FixedRanksModel().relaxation(problem)
    bounds, best = relaxation.bounds(every(problem)), best_makespan(problem)
    if best is None:
        return
    assert bounds is not None
    assert bounds.least <= best
    for number, task in enumerate(problem.tasks):
        for index in range(len(task.modes)):
            with_it = best_makespan(with_mode(problem, number, index))
            assert with_it is None or bounds.each[task.name][index] <= with_it
            there = relaxation.bounds({**every(problem), task.name: np.arange(len(task.modes)) == index})
            assert with_it is None or (there is not None and there.least <= with_it)
    again = relaxation.bounds(every(problem))
    assert again is not None
    assert again.least == bounds.least


def test_what_is_left_out_is_in_no_answer() -> None:
    model = cp_model.CpModel()
    x, y, cost = model.new_bool_var("x"), model.new_bool_var("y"), model.new_int_var(0, 9, "cost")
    model.add_exactly_one([x, y])
    model.add(cost >= 2 * x + 5 * y)
    relaxation = ProgramRelaxation(model, {"a": [x.index, y.index]}, cost.index)
    both = relaxation.bounds({"a": np.array([True, True])})
    assert both is not None
    assert (both.least, both.each["a"].tolist()) == (2, [2, 5])
    second = relaxation.bounds({"a": np.array([False, True])})
    assert second is not None
    assert (second.least, second.each["a"].tolist()) == (5, [pytest.approx(np.inf), 5])
    assert relaxation.bounds({"a": np.array([False, False])}) is None
