"""Deterministic runs of CP-SAT on a model, and makespans counted in coarse steps."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import NamedTuple

import ortools

from meshwright.planner.solver import cp_model
from meshwright.planner.solver.problem import MAX_SUM
from meshwright.planner.solver.result import Effort, Limits, Progress

_MIN_SECONDS = 0.01
"""Time limit of a search whose deadline has passed; CP-SAT refuses a limit below 0."""

_POLL_SECONDS = 0.05
"""Interval of polling for a requested stop."""

NAME = "CP-SAT"
VERSION = str(ortools.__version__)


@dataclass(frozen=True)
class Solved:
    """The outcome of CP-SAT; the values are read from `solver` if an answer was found."""

    solver: cp_model.CpSolver
    status: cp_model.CpSolverStatus

    @property
    def is_found(self) -> bool:
        return self.status in (cp_model.OPTIMAL, cp_model.FEASIBLE)

    @property
    def is_proven(self) -> bool:
        """True if the answer is proven optimal, or it is proven that no answer exists."""
        return self.status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)


def run_cp_sat(
    model: cp_model.CpModel, limits: Limits, progress: Progress | None = None, effort: Effort | None = None
) -> Solved:
    """Solve a model deterministically: fixed seed, interleaved workers, a limit in deterministic time.

    The work is added to `effort`.
    """
    _check_range(model)
    solver = cp_model.CpSolver()
    solver.parameters.random_seed = limits.seed
    solver.parameters.num_workers = limits.num_workers
    solver.parameters.interleave_search = limits.num_workers > 1
    solver.parameters.max_deterministic_time = limits.max_deterministic_time
    if limits.seconds_left < math.inf:
        solver.parameters.max_time_in_seconds = max(limits.seconds_left, _MIN_SECONDS)
    solver.parameters.max_presolve_iterations = 1
    # Linear programs and probing cost more than they prune once modes that cannot meet the target are gone: 6.1 s
    # with them, 1.4 s without (16 ranks).
    solver.parameters.linearization_level = 0
    solver.parameters.cp_model_probing_level = 0
    status = _solve_in_thread(solver, model, limits, _Listener(progress) if progress else None)
    if effort:
        effort.add(float(solver.deterministic_time))
    assert status != cp_model.MODEL_INVALID, model.validate()
    return Solved(solver, status)


def _solve_in_thread(
    solver: cp_model.CpSolver, model: cp_model.CpModel, limits: Limits, listener: _Listener | None
) -> cp_model.CpSolverStatus:
    """Solve in a second thread; this one keeps receiving signals, and an exception that they raise ends the search."""
    solver.parameters.catch_sigint_signal = False
    with ThreadPoolExecutor(max_workers=1) as second:
        solving = second.submit(solver.solve, model, listener)
        try:
            while limits.stop is not None and not wait([solving], timeout=_POLL_SECONDS).done:
                if limits.stop.is_set():
                    solver.stop_search()
            return solving.result()
        except BaseException:
            while not wait([solving], timeout=_POLL_SECONDS).done:
                solver.stop_search()
            raise


def _check_range(model: cp_model.CpModel) -> None:
    """Check that the Boolean coefficients of every constraint add up to no more than CP-SAT handles exactly.

    Raises ValueError otherwise.
    """
    for constraint in model.proto.constraints:
        if not constraint.has_linear():  # reading `.linear` would turn another kind into an empty linear constraint
            continue
        linear = constraint.linear
        if sum(map(abs, linear.coeffs)) <= MAX_SUM:
            continue
        terms = zip(linear.vars, linear.coeffs, strict=True)
        total = sum(abs(c) for v, c in terms if list(model.proto.variables[v].domain) == [0, 1])
        if total > MAX_SUM:
            raise ValueError(f"coefficients of a constraint sum to {total}, above {MAX_SUM}; use longer ticks.")


class _Listener(cp_model.CpSolverSolutionCallback):
    """Reports each better answer to `progress`."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def on_solution_callback(self) -> None:
        self._progress(round(self.objective_value), round(self.best_objective_bound))


class Steps(NamedTuple):
    """The makespans from `bound` to `target`, in steps of `step` ticks."""

    bound: int
    target: int
    step: int

    @classmethod
    def between(cls, bound: int, target: int, number: int) -> Steps:
        """Divide the range into about `number` steps."""
        return cls(bound, target, max(1, -(-(target - bound) // number)))

    def minimise(self, model: cp_model.CpModel, makespan: cp_model.IntVar) -> None:
        """Add the objective: the number of steps from the bound up to the makespan, which is at most the target."""
        steps = model.new_int_var(0, -(-(self.target - self.bound) // self.step), "steps")
        model.add(makespan <= self.bound + self.step * steps)
        model.add(makespan <= self.target)
        model.minimize(steps)

    def proven(self, solved: Solved) -> int:
        """Return the lower bound on the makespan that a search has proven."""
        if not solved.is_found and solved.is_proven:
            return self.target + 1
        steps = round(solved.solver.best_objective_bound)
        return self.bound + self.step * (steps - 1) + 1 if steps > 0 else self.bound
