"""What the model minimises."""

from __future__ import annotations

from ortools.sat.python import cp_model

from meshwright.planner.solver.variables import TaskVariables


def minimise_makespan(model: cp_model.CpModel, times: TaskVariables) -> None:
    """The end of the last task."""
    model.minimize(times.makespan)


def minimise_device(model: cp_model.CpModel, device: cp_model.IntVar) -> None:
    """The blocks that the fullest rank needs."""
    model.minimize(device)
