"""The rules admit a choice exactly when it fits, and its schedules exactly when no rank does two things at once."""

from __future__ import annotations

import random
from dataclasses import replace

from benchmarks.search.brute_force import best_makespan
from meshwright.planner.solver import cp_model
from meshwright.planner.solver.fixed_ranks_model import (
    Variables,
    add_choice_constraints,
    add_memory_constraints,
    add_time_constraints,
    add_variables,
)
from meshwright.planner.solver.model import add_activity_variables, add_order_constraints
from meshwright.planner.solver.problem import Problem
from tests.planner.problems import only, without_swaps
from tests.seeds import seeds


def fixed(problem: Problem, seed: int) -> tuple[cp_model.CpModel, Variables, tuple[int, ...]]:
    """A model with a choice that is drawn."""
    model = cp_model.CpModel()
    x = add_variables(model, problem, problem.horizon)
    picks = tuple(random.Random(seed).randrange(len(task.modes)) for task in problem.tasks)
    for task, index in zip(problem.tasks, picks, strict=True):
        model.add(x.pick[task.name, index] == 1)
    return model, x, picks


def solved(model: cp_model.CpModel) -> cp_model.CpSolver | None:
    solver = cp_model.CpSolver()
    return solver if solver.solve(model) == cp_model.OPTIMAL else None


@seeds(4, all=16)
def test_the_least_device_for_a_choice_is_what_its_fullest_rank_holds(seed: int) -> None:
    problem = without_swaps(seed)
    model, x, picks = fixed(problem, seed)
    device = model.new_int_var(0, 10**6, "device")
    add_choice_constraints(model, problem, x)
    add_memory_constraints(model, problem, x, device)
    model.minimize(device)
    solver = solved(model)
    assert solver is not None
    modes = {task.name: task.modes[index] for task, index in zip(problem.tasks, picks, strict=True)}
    assert solver.value(device) == max(problem.memory(modes))


@seeds(4, all=16)
def test_the_shortest_schedule_of_a_choice_is_that_of_all_orders(seed: int) -> None:
    problem = without_swaps(seed)
    model, x, picks = fixed(problem, seed)
    add_choice_constraints(model, problem, x)
    add_time_constraints(model, problem, x)
    model.minimize(x.times.makespan)
    solver = solved(model)
    assert solver is not None
    roomy = replace(only(problem, picks), device_units=10**6)
    assert solver.objective_value == best_makespan(roomy)


@seeds(4, all=16)
def test_a_task_cannot_have_two_modes(seed: int) -> None:
    problem = without_swaps(seed)
    model, x, picks = fixed(problem, seed)
    add_choice_constraints(model, problem, x)
    task = problem.tasks[0]
    model.add(x.pick[task.name, (picks[0] + 1) % len(task.modes)] == 1)
    assert solved(model) is None or len(task.modes) == 1


def test_the_order_alone_does_not_know_who_is_where() -> None:
    problem = without_swaps(0)
    model = cp_model.CpModel()
    x = add_variables(model, problem, problem.horizon)
    times = add_activity_variables(model, problem, problem.horizon)
    add_order_constraints(model, problem, x.pick, times)
    model.minimize(times.makespan)
    solver = solved(model)
    assert solver is not None
    for before, after, lag, streamed, _ in problem.precedences:
        if not streamed:
            assert solver.value(times.start[after]) >= solver.value(times.end[before]) + lag
