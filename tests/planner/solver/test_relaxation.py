"""The relaxation is below every answer, also below those with a mode that it did not take."""

from __future__ import annotations

import pytest

from benchmarks.search.brute_force import best_makespan
from meshwright.planner.solver import cp_model
from meshwright.planner.solver.cp_sat import fixed_ranks_makespan_model
from meshwright.planner.solver.linear_relaxation import Relaxation
from meshwright.planner.solver.problem import Problem, Task
from tests.planner.problems import without_swaps
from tests.seeds import seeds


def with_mode(problem: Problem, task: int, index: int) -> Problem:
    tasks = list(problem.tasks)
    tasks[task] = Task(tasks[task].name, (tasks[task].modes[index],))
    return problem.with_tasks(tuple(tasks))


@seeds(4, all=16)
def test_no_answer_is_below_the_bound_nor_below_that_with_an_mode(seed: int) -> None:
    problem = without_swaps(seed)
    model, x = fixed_ranks_makespan_model(problem)
    relaxation = Relaxation(model, x.times.makespan)
    relaxed, best = relaxation.solve(), best_makespan(problem)
    if best is None:
        return
    assert relaxed is not None
    assert relaxed.bound <= best
    for number, task in enumerate(problem.tasks):
        every = [x.pick[task.name, index].index for index in range(len(task.modes))]
        for index in range(len(task.modes)):
            with_it = best_makespan(with_mode(problem, number, index))
            variable = x.pick[task.name, index].index
            assert with_it is None or relaxed.bound_with(variable) <= with_it
            there = relaxation.solve_with_one_of([variable], every)
            assert with_it is None or (there is not None and there.bound <= with_it)
    assert relaxation.solve(relaxed.bound - 1) is None
    again = relaxation.solve(relaxed.bound)
    assert again is not None
    assert again.optimum == pytest.approx(relaxed.optimum)


def test_what_is_forbidden_is_in_no_answer() -> None:
    model = cp_model.CpModel()
    x, y, cost = model.new_bool_var("x"), model.new_bool_var("y"), model.new_int_var(0, 9, "cost")
    model.add_exactly_one([x, y])
    model.add(cost >= 2 * x + 5 * y)
    relaxation = Relaxation(model, cost)
    first = relaxation.solve()
    assert first is not None
    assert (first.bound, first.values[x.index], first.bound_with(y.index)) == (2, pytest.approx(1), 5)
    relaxation.forbid(x.index)
    left = relaxation.solve()
    assert left is not None
    assert left.bound == 5
    relaxation.forbid(y.index)
    assert relaxation.solve() is None
