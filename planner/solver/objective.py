"""What the model minimises."""

from __future__ import annotations

from ortools.sat.python import cp_model

from meshwright.planner.solver.problem import Problem
from meshwright.planner.solver.variables import Variables


def minimise_makespan(model: cp_model.CpModel, x: Variables) -> None:
    """The end of the last task."""
    model.minimize(x.makespan)


def minimise_work(model: cp_model.CpModel, problem: Problem, x: Variables, makespan: int) -> None:
    """Among the answers that end by `makespan`, the ticks that ranks are busy: nothing is slow for no reason."""
    model.add(x.makespan <= makespan)
    model.minimize(
        sum(
            option.ticks * option.place.num_ranks * x.pick[call.name, index]
            for call in problem.calls
            for index, option in enumerate(call.options)
        )
        + sum(x.ticks[name] for name in x.happens)
    )
