"""The makespan is the end of the last task, and a device has what the fullest rank needs."""

from __future__ import annotations

from ortools.sat.python import cp_model

from meshwright.planner.solver.objective import minimise_device, minimise_makespan
from meshwright.planner.solver.problem import CallOptions, CallRun, Option, Place, Problem
from meshwright.planner.solver.variables import add_task_variables


def least(model: cp_model.CpModel) -> float:
    solver = cp_model.CpSolver()
    assert solver.solve(model) == cp_model.OPTIMAL
    return float(solver.objective_value)


def test_the_least_makespan_is_what_the_rules_leave() -> None:
    calls = (CallOptions("a", (Option(place=Place(0, 1, "P"), ticks=3),)),)
    problem = Problem(num_ranks=1, device_blocks=1, calls=calls, tasks=(CallRun(name="a", call="a"),))
    model = cp_model.CpModel()
    times = add_task_variables(model, problem, 20)
    model.add(times.makespan >= times.start["a"] + times.ticks["a"])
    model.add(times.start["a"] >= 4)
    minimise_makespan(model, times)
    assert least(model) == 7


def test_the_least_device_is_what_the_rules_leave() -> None:
    model = cp_model.CpModel()
    device = model.new_int_var(0, 100, "device")
    model.add(2 * device >= 11)
    minimise_device(model, device)
    assert least(model) == 6
