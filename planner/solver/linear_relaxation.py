"""Linear relaxations of a problem, solved with GLOP, and the lower bounds that they give for each mode.

`ProgramRelaxation` drops the integrality and the conditional constraints of an integer program. `SpreadRelaxation` lets
tasks mix their modes, and spreads work and memory over all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import linear_solver_pb2, pywraplp

from meshwright.planner.solver import cp_model
from meshwright.planner.solver.lower_bounds import windows
from meshwright.planner.solver.problem import Mode, Problem, Resource, Transfer

_UNBOUNDED = 2**60
"""Domain bounds beyond this value represent infinity."""

BOUND_MARGIN = 1e-5
"""Relative margin on a bound, so that rounding in the linear program never excludes a mode."""

_CONCLUSIVE = (pywraplp.Solver.OPTIMAL, pywraplp.Solver.INFEASIBLE)
"""GLOP's conclusive statuses."""

_GLOP_PARAMETERS = ("", "use_preprocessing: false")
"""Parameters with which GLOP is tried in order; the second set is for numerical trouble."""

_WARM_START = ("use_preprocessing: false use_dual_simplex: true", *_GLOP_PARAMETERS)
"""Parameters for a warm start from the last optimum, which is close if only bounds of variables have changed."""


ModeMask: TypeAlias = Mapping[str, NDArray[np.bool_]]
"""For each task, True for the modes that have not been excluded, [modes]."""


@dataclass(frozen=True)
class ModeBounds:
    """Lower bounds in ticks: `least` holds for every answer, `each` for the answers with a mode, [modes] by task.

    A mode that has been excluded has an infinite bound.
    """

    least: int
    each: Mapping[str, NDArray[np.float64]]

    def within(self, makespan: int) -> ModeMask:
        """Return the modes that may be part of an answer that ends by the tick."""
        return {name: bounds <= makespan for name, bounds in self.each.items()}


class LinearRelaxation(Protocol):
    """A linear program that bounds the answers of a problem with part of its modes."""

    def bounds(self, kept: ModeMask) -> ModeBounds | None:
        """Return the bounds on answers with the modes that are kept, or None if there is no answer."""
        ...


class _LinearProgram:
    """A linear program that minimises one variable, under construction."""

    def __init__(self) -> None:
        self._proto = linear_solver_pb2.MPModelProto()

    def variable(self, low: float, high: float, *, is_minimised: bool = False) -> int:
        """Add a variable and return its index."""
        self._proto.variable.add(lower_bound=low, upper_bound=high, objective_coefficient=float(is_minimised))
        return len(self._proto.variable) - 1

    def constrain(self, low: float, high: float, variables: Sequence[int], coefficients: Sequence[float]) -> None:
        """Add a constraint on a weighted sum; a variable that occurs twice counts twice."""
        if len(set(variables)) < len(variables):
            sums: dict[int, float] = {}
            for variable, coefficient in zip(variables, coefficients, strict=True):
                sums[variable] = sums.get(variable, 0) + coefficient
            variables, coefficients = list(sums), list(sums.values())
        constraint = self._proto.constraint.add(lower_bound=low, upper_bound=high)
        constraint.var_index.extend(variables)
        constraint.coefficient.extend(coefficients)

    def loaded(self) -> pywraplp.Solver:
        """Return a GLOP solver that has loaded the program."""
        solver = pywraplp.Solver.CreateSolver("GLOP")
        solver.LoadModelFromProto(self._proto)
        return solver


class _ModeRelaxation:
    """A linear program that is solved again and again, each time for part of the modes."""

    def __init__(
        self,
        solver: pywraplp.Solver,
        picks: Mapping[str, Sequence[int]],
        upper_bound: float,
        parameter_sets: Sequence[str],
    ) -> None:
        """Take a program in GLOP; the variable of a mode is at most `upper_bound`, and 0 if the mode is left out."""
        variables = solver.variables()
        self._solver, self._upper_bound, self._parameter_sets = solver, upper_bound, parameter_sets
        self._picks = {name: [variables[index] for index in indices] for name, indices in picks.items()}
        self._remaining = {name: np.ones(len(indices), dtype=bool) for name, indices in picks.items()}

    def bounds(self, kept: ModeMask) -> ModeBounds | None:
        """Return the bounds on answers with the modes that are kept, 0 if GLOP gives up, or None without an answer."""
        for name, picks in self._picks.items():
            for index in np.flatnonzero(self._remaining[name] != kept[name]).tolist():
                picks[index].SetUb(self._upper_bound if kept[name][index] else 0.0)
            self._remaining[name] = np.asarray(kept[name])
        if not all(mask.any() for mask in self._remaining.values()):
            return None
        status = _solve_with_glop(self._solver, self._parameter_sets)
        if status == pywraplp.Solver.INFEASIBLE:
            return None
        optimum = float(self._solver.Objective().Value()) if status == pywraplp.Solver.OPTIMAL else 0.0
        each = {}
        for name, mask in self._remaining.items():
            each[name] = np.full(len(mask), np.inf)
            indices = np.flatnonzero(mask).tolist()
            costs = [self._picks[name][index].reduced_cost() if optimum else 0.0 for index in indices]
            rounded = np.ceil((optimum + np.maximum(0.0, costs)) * (1 - BOUND_MARGIN) - BOUND_MARGIN)
            each[name][indices] = rounded
        return ModeBounds(max(0, math.ceil(optimum * (1 - BOUND_MARGIN) - BOUND_MARGIN)), each)


class ProgramRelaxation(_ModeRelaxation):
    """The linear program of an integer program, without integrality and conditional constraints."""

    def __init__(self, model: cp_model.CpModel, picks: Mapping[str, Sequence[int]], makespan: int) -> None:
        """Build the program; `picks` has the variable index of each mode by task, `makespan` that of the objective."""
        program = _LinearProgram()
        # A mode at an upper bound of its own makes the reduced costs of the others less informative.
        all_picks = {index for indices in picks.values() for index in indices}
        for index, variable in enumerate(model.proto.variables):
            low, high = _range(variable.domain)
            program.variable(low, math.inf if index in all_picks else high, is_minimised=index == makespan)
        for constraint in model.proto.constraints:
            if constraint.has_exactly_one():
                literals = list(constraint.exactly_one.literals)
                program.constrain(1, 1, literals, [1] * len(literals))
            elif constraint.has_linear() and not len(constraint.enforcement_literal):
                linear = constraint.linear
                program.constrain(*_range(linear.domain), list(linear.vars), list(linear.coeffs))
        super().__init__(program.loaded(), picks, math.inf, _WARM_START)


class SpreadRelaxation(_ModeRelaxation):
    """The linear program of a problem in which tasks mix their modes and work and memory spread over all ranks."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._program = _LinearProgram()
        self._pick = {c.name: [self._program.variable(0, 1) for _ in c.modes] for c in problem.tasks}
        self._makespan = self._program.variable(0, math.inf, is_minimised=True)
        self._start = {name: self._program.variable(0, math.inf) for name in problem.order}
        self._end = {name: self._program.variable(0, math.inf) for name in problem.order}
        self._task_of_run = problem.runs
        self._ticks = {c.name: [float(o.ticks) for o in c.modes] for c in problem.tasks}
        self._work = {c.name: [self._share(o) * o.ticks for o in c.modes] for c in problem.tasks}
        for picks in self._pick.values():
            self._add(1, 1, *((pick, 1.0) for pick in picks))
        self._set_order()
        self._set_work()
        self._set_memory()
        super().__init__(self._program.loaded(), self._pick, 1.0, _GLOP_PARAMETERS)

    def _set_order(self) -> None:
        """Add that an activity lasts as long as the mix of its modes, and starts after the activities that it waits
        for."""
        for name in self._problem.order:
            self._add(
                0,
                math.inf,
                (self._end[name], 1.0),
                (self._start[name], -1.0),
                *self._terms(name, self._ticks, -1),
            )
            self._add(0, math.inf, (self._makespan, 1.0), (self._end[name], -1.0))
        for activity in self._problem.activities:
            if isinstance(activity, Transfer) and activity.ticks:
                self._set_transfer(activity)
        early = {c.name: [float(o.early_ticks) for o in c.modes] for c in self._problem.tasks}
        late = {c.name: [float(o.late_ticks) for o in c.modes] for c in self._problem.tasks}
        for before, after, lag, streamed, is_late in self._problem.precedences:
            ends = (
                (self._start[after], 1.0),
                (self._end[before], -1.0),
                *(self._terms(before, late, -1) if is_late else ()),
            )
            self._add(lag, math.inf, *ends, *(self._terms(after, early, 1) if streamed else ()))
            if streamed:
                self._add(0, math.inf, (self._start[after], 1.0), (self._start[before], -1.0))
        for before, after, periods, lag, is_late in self._problem.carried:
            waits = (self._makespan, float(periods)), (self._start[after], 1.0), (self._end[before], -1.0)
            self._add(lag, math.inf, *waits, *(self._terms(before, late, -1) if is_late else ()))

    def _set_transfer(self, transfer: Transfer) -> None:
        ends = (self._end[transfer.name], 1.0), (self._start[transfer.name], -1.0)
        for task, min_ticks in zip(
            (transfer.source, transfer.target), _min_transfer_ticks(self._problem, transfer), strict=True
        ):
            resources = (mode.resource for mode in self._problem.modes(task))
            terms = zip(self._pick[task], (-float(min_ticks[resource]) for resource in resources), strict=True)
            self._add(0, math.inf, *ends, *terms)

    def _set_work(self) -> None:
        for window in windows(self._problem):
            closes = self._start[window.before] if window.before else self._makespan
            opens = [(self._end[window.after], -1.0)] if window.after else []
            inside = (term for name in window.between for term in self._terms(name, self._work, -1))
            self._add(0, math.inf, (closes, 1.0), *opens, *inside)

    def _set_memory(self) -> None:
        """Add that all copies and the transient memory of any one task fit in a device, on average over all ranks.

        A task that is not the first of its group may share everything that can be shared.
        """
        copies = {}
        for task in self._problem.tasks:
            shares = bool(self._problem.owners(task.name))
            copies[task.name] = [self._share(o) * (o.resident_units - o.shared_units * shares) for o in task.modes]
        for task in self._problem.tasks:
            with_transient = [
                resident + self._share(o) * o.transient_units
                for resident, o in zip(copies[task.name], task.modes, strict=True)
            ]
            units = {**copies, task.name: with_transient}
            terms = (pair for name, of_modes in units.items() for pair in zip(self._pick[name], of_modes, strict=True))
            self._add(-math.inf, self._problem.device_units, *terms)

    def _share(self, mode: Mode) -> float:
        """Return the mode's share of all ranks."""
        return mode.resource.num_ranks / self._problem.num_ranks

    def _terms(self, activity: str, amounts: Mapping[str, list[float]], sign: int) -> list[tuple[int, float]]:
        """Return the terms of an activity that runs a task, with the amount of each mode; a transfer has none."""
        if activity not in self._task_of_run:
            return []
        task = self._task_of_run[activity]
        return [(pick, sign * amount) for pick, amount in zip(self._pick[task], amounts[task], strict=True)]

    def _add(self, low: float, high: float, *terms: tuple[int, float]) -> None:
        """Add a constraint on a sum of terms; a variable that occurs twice counts twice."""
        variables, coefficients = zip(*terms, strict=True)
        self._program.constrain(low, high, variables, coefficients)


def _solve_with_glop(solver: pywraplp.Solver, parameter_sets: Sequence[str]) -> int:
    """Solve with the first parameters with which GLOP does not give up, and return its status."""
    status = int(pywraplp.Solver.NOT_SOLVED)
    for parameters in parameter_sets:
        solver.SetSolverSpecificParametersAsString(parameters)
        status = int(solver.Solve())
        if status in _CONCLUSIVE:
            break
    return status


def _range(domain: Sequence[int]) -> tuple[float, float]:
    """Return the ends of a domain as floats, with values beyond `_UNBOUNDED` as infinity."""
    low, *_, high = domain
    return (-math.inf if low < -_UNBOUNDED else low), (math.inf if high > _UNBOUNDED else high)


def _min_transfer_ticks(problem: Problem, transfer: Transfer) -> tuple[dict[Resource, int], dict[Resource, int]]:
    """Return the fewest ticks of a transfer from each resource of its source, and to each resource of its target.

    Pools that are disjoint and pools of which one contains the other are both considered.
    """
    sources, targets = (
        list(dict.fromkeys(mode.resource for mode in problem.modes(task)))
        for task in (transfer.source, transfer.target)
    )
    may_share = any({transfer.source, transfer.target} <= set(group) for group in problem.sharing_groups)
    ticks = np.empty((len(sources), len(targets)), dtype=np.int64)
    for row, source in enumerate(sources):
        for column, target in enumerate(targets):
            smaller, sum_of_ranks = min(source.num_ranks, target.num_ranks), source.num_ranks + target.num_ranks
            overlaps = (0, smaller) if sum_of_ranks <= problem.num_ranks else (smaller,)
            by_overlap = (transfer.ticks_between(source, target, overlap) for overlap in overlaps)
            ticks[row, column] = 0 if may_share and source == target else min(by_overlap)
    return (
        dict(zip(sources, ticks.min(axis=1).tolist(), strict=True)),
        dict(zip(targets, ticks.min(axis=0).tolist(), strict=True)),
    )
