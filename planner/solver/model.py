"""The search as an integer program, and its solution by CP-SAT.

Sets
    c  calls, each with options o; an option has a place p (ranks, layout), ticks d, memory r (resident), w (of it the
       part that sharing saves) and m (transient)
    t  tasks: runs of calls, and transfers between the places of two calls
    a  atoms: groups of ranks that every option covers wholly or not at all
Variables
    x[c, o], y[c, p], z[c, a]   call c uses option o, is at place p, covers atom a
    s[c, p]                     call c uses an earlier call's copy at p
    h[t]                        transfer t takes time
    start, ticks, end [t], makespan
Objective
    minimise the makespan
Constraints
    choice   sum_o x[c, o] = 1;  y and z follow x;  s[c, p] <= y[c, p] and s[c, p] <= sum of y over earlier owners
    time     ticks of a run = sum_o d x[c, o];  ticks of a transfer from p >= sum_q d(p, q) (y[q] - s[q]) if y[p]
             start[t'] >= end[t] + lag over the precedences;  on every atom the tasks that occupy it do not overlap
    memory   for every atom a and call c over it: sum r x - sum w s + m of c <= device
Redundant, for the proof
    between two tasks (or the ends) every atom has time for all its work that must lie there; interchangeable halves
    of aligned blocks are filled from the left.

The search is deterministic: fixed seed, interleaved workers, a limit in deterministic time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import ortools
from ortools.sat.python import cp_model

from meshwright.planner.solver.constraints import (
    add_choice_constraints,
    add_memory_constraints,
    add_time_constraints,
)
from meshwright.planner.solver.problem import MAX_SUM, Option, Problem
from meshwright.planner.solver.variables import Variables, add_variables

NAME = "CP-SAT"
VERSION = str(ortools.__version__)

Progress = Callable[[int, int], None]
"""Called with the objective and the bound of each better answer."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the search may use. The same limits give the same answer on every machine.

    More workers than one take turns to stay deterministic, which is slower on every problem tried so far.
    """

    seed: int = 0
    num_workers: int = 1
    max_deterministic_time: float = 60.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An option per call and the tick at which each task starts."""

    picked: Mapping[str, int]
    starts: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Result:
    """`out_of_limit` means that the limit passed before any answer was found; `objective` is then None."""

    status: Literal["optimal", "feasible", "infeasible", "out_of_limit"]
    answer: Answer | None
    objective: int | None
    bound: int


def solve(problem: Problem, limits: Limits, progress: Progress | None = None) -> Result:
    """The best answer within the limits, with the bound that was proven."""
    if any(not call.options for call in problem.calls):
        return Result(status="infeasible", answer=None, objective=None, bound=0)
    model = cp_model.CpModel()
    x = add_variables(model, problem)
    add_choice_constraints(model, problem, x)
    add_time_constraints(model, problem, x)
    add_memory_constraints(model, problem, x, problem.device_blocks)
    model.minimize(x.makespan)
    solver, status = _run(model, limits, progress)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        found: Literal["infeasible", "out_of_limit"] = "infeasible" if status == cp_model.INFEASIBLE else "out_of_limit"
        return Result(status=found, answer=None, objective=None, bound=0)
    return Result(
        status="optimal" if status == cp_model.OPTIMAL else "feasible",
        answer=_answer(solver, problem, x),
        objective=solver.value(x.makespan),
        bound=round(solver.best_objective_bound),
    )


def least_memory(problem: Problem, limits: Limits) -> int | None:
    """The least blocks a device can have so that some choice of options fits, whatever its duration.

    None when a call has no option. The limits may cut the search short; the answer is then still one that fits.
    """
    if any(not call.options for call in problem.calls):
        return None
    model = cp_model.CpModel()
    x = add_variables(model, problem)
    device = model.new_int_var(0, MAX_SUM, "device")
    add_choice_constraints(model, problem, x)
    add_memory_constraints(model, problem, x, device)
    model.minimize(device)
    solver, status = _run(model, limits, None)
    return solver.value(device) if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None


def picked_options(problem: Problem, answer: Answer) -> dict[str, Option]:
    """The options that an answer picked."""
    return {call.name: call.options[answer.picked[call.name]] for call in problem.calls}


def _run(
    model: cp_model.CpModel, limits: Limits, progress: Progress | None
) -> tuple[cp_model.CpSolver, cp_model.CpSolverStatus]:
    _check_range(model)
    solver = cp_model.CpSolver()
    solver.parameters.random_seed = limits.seed
    solver.parameters.num_workers = limits.num_workers
    solver.parameters.interleave_search = limits.num_workers > 1
    solver.parameters.max_deterministic_time = limits.max_deterministic_time
    status = solver.solve(model, _Listener(progress) if progress else None)
    assert status != cp_model.MODEL_INVALID, model.validate()
    return solver, status


def _check_range(model: cp_model.CpModel) -> None:
    """Raises ValueError when the Boolean coefficients of a rule sum past what CP-SAT handles exactly."""
    for constraint in model.proto.constraints:
        if not constraint.has_linear():  # reading `.linear` of another kind would turn it into an empty linear one
            continue
        boolean = 0
        for variable, coefficient in zip(constraint.linear.vars, constraint.linear.coeffs, strict=True):
            boolean += abs(coefficient) if list(model.proto.variables[variable].domain) == [0, 1] else 0
        if boolean > MAX_SUM:
            raise ValueError(f"coefficients of a rule sum to {boolean}, above {MAX_SUM}; use longer ticks.")


def _answer(solver: cp_model.CpSolver, problem: Problem, x: Variables) -> Answer:
    return Answer(
        picked={
            call.name: next(i for i in range(len(call.options)) if solver.value(x.pick[call.name, i]))
            for call in problem.calls
        },
        starts={task.name: solver.value(x.start[task.name]) for task in problem.tasks},
    )


class _Listener(cp_model.CpSolverSolutionCallback):  # type: ignore[misc]
    """Tells `progress` of each better answer."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def on_solution_callback(self) -> None:
        self._progress(round(self.objective_value), round(self.best_objective_bound))
