"""The search as an integer program.

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
    minimise the makespan, or the blocks that a device needs
Constraints
    choice   sum_o x[c, o] = 1;  y and z follow x;  s[c, p] <= y[c, p] and s[c, p] <= sum of y over earlier owners
    time     ticks of a run = sum_o d x[c, o];  ticks of a transfer from p >= sum_q d(p, q) (y[q] - s[q]) if y[p]
             start[t'] >= end[t] + lag over the precedences, less the option's early ticks where t streams to t', and
             then start[t'] >= start[t];  on every atom the tasks that occupy it do not overlap
             k makespan >= end[t] + lag - start[t'] over what is carried to the turn that is k later; where t hands over
             late, its option's late ticks are part of the lag
    memory   for every atom a and call c over it: sum r x - sum w s + m of c <= device
Redundant, for the proof
    between two tasks (or the ends) every atom has time for all its work that must lie there; interchangeable halves
    of aligned blocks are filled from the left.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import ortools
from ortools.sat.python import cp_model

from meshwright.planner.solver.constraints import add_choice_constraints, add_memory_constraints, add_time_constraints
from meshwright.planner.solver.problem import MAX_SUM, Problem
from meshwright.planner.solver.result import Effort, Limits, Progress
from meshwright.planner.solver.variables import Variables, add_variables

_LEAST_SECONDS = 0.01
"""Of a search whose deadline has passed: CP-SAT refuses a limit below 0."""

_SECONDS_BETWEEN_LOOKS = 0.05
"""Whether a search that may be asked to stop has been."""

NAME = "CP-SAT"
VERSION = str(ortools.__version__)


@dataclass(frozen=True)
class Solved:
    """What CP-SAT answered; the values are read from `solver` when an answer was found."""

    solver: cp_model.CpSolver
    status: cp_model.CpSolverStatus

    @property
    def is_found(self) -> bool:
        return self.status in (cp_model.OPTIMAL, cp_model.FEASIBLE)

    @property
    def is_proven(self) -> bool:
        """Whether there is nothing better than what was found, or nothing at all."""
        return self.status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)


def makespan_model(problem: Problem) -> tuple[cp_model.CpModel, Variables]:
    """All rules, and the makespan to minimise."""
    model = cp_model.CpModel()
    x = add_variables(model, problem)
    add_choice_constraints(model, problem, x)
    add_time_constraints(model, problem, x)
    add_memory_constraints(model, problem, x, problem.device_blocks)
    model.minimize(x.times.makespan)
    return model, x


def memory_model(problem: Problem) -> tuple[cp_model.CpModel, Variables, cp_model.IntVar]:
    """The rules about what is picked, and the blocks of a device to minimise."""
    model = cp_model.CpModel()
    x = add_variables(model, problem)
    device = model.new_int_var(0, MAX_SUM, "device")
    add_choice_constraints(model, problem, x)
    add_memory_constraints(model, problem, x, device)
    model.minimize(device)
    return model, x, device


def run(
    model: cp_model.CpModel, limits: Limits, progress: Progress | None = None, effort: Effort | None = None
) -> Solved:
    """Solves a model deterministically: fixed seed, workers that take turns, a limit in deterministic time.

    What it takes is added to `effort`.
    """
    _check_range(model)
    solver = cp_model.CpSolver()
    solver.parameters.random_seed = limits.seed
    solver.parameters.num_workers = limits.num_workers
    solver.parameters.interleave_search = limits.num_workers > 1
    solver.parameters.max_deterministic_time = limits.max_deterministic_time
    if limits.seconds_left < math.inf:
        solver.parameters.max_time_in_seconds = max(limits.seconds_left, _LEAST_SECONDS)
    solver.parameters.max_presolve_iterations = 1
    solver.parameters.linearization_level = 0  # its linear programs and probing cost more than they prune once the
    solver.parameters.cp_model_probing_level = 0  # hopeless options are gone: 6.1 s with, 1.4 s without (16 ranks)
    status = _solve_beside(solver, model, limits, _Listener(progress) if progress else None)
    if effort:
        effort.add(float(solver.deterministic_time))
    assert status != cp_model.MODEL_INVALID, model.validate()
    return Solved(solver, status)


def _solve_beside(
    solver: cp_model.CpSolver, model: cp_model.CpModel, limits: Limits, listener: _Listener | None
) -> cp_model.CpSolverStatus:
    """Solves in a second thread: this one goes on taking signals, and what they raise ends the search."""
    solver.parameters.catch_sigint_signal = False
    with ThreadPoolExecutor(max_workers=1) as second:
        solving = second.submit(solver.solve, model, listener)
        try:
            while limits.stop is not None and not wait([solving], timeout=_SECONDS_BETWEEN_LOOKS).done:
                if limits.stop.is_set():
                    solver.stop_search()
            return solving.result()
        except BaseException:
            while not wait([solving], timeout=_SECONDS_BETWEEN_LOOKS).done:
                solver.stop_search()
            raise


def _check_range(model: cp_model.CpModel) -> None:
    """Raises ValueError when the Boolean coefficients of a rule sum past what CP-SAT handles exactly."""
    for constraint in model.proto.constraints:
        if not constraint.has_linear():  # reading `.linear` of another kind would turn it into an empty linear one
            continue
        linear = constraint.linear
        if sum(map(abs, linear.coeffs)) <= MAX_SUM:
            continue
        of = zip(linear.vars, linear.coeffs, strict=True)
        total = sum(abs(c) for v, c in of if list(model.proto.variables[v].domain) == [0, 1])
        if total > MAX_SUM:
            raise ValueError(f"coefficients of a rule sum to {total}, above {MAX_SUM}; use longer ticks.")


class _Listener(cp_model.CpSolverSolutionCallback):  # type: ignore[misc]
    """Tells `progress` of each better answer."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def on_solution_callback(self) -> None:
        self._progress(round(self.objective_value), round(self.best_objective_bound))
