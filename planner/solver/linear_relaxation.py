"""Linear relaxations of a problem, solved with GLOP, and the lower bounds that they give for each mode.

`Relaxation` drops the integrality and the conditional constraints of a model for fixed ranks. `SpreadRelaxation` lets
tasks mix their modes, and spreads work and memory over all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

from meshwright.planner.solver import cp_model
from meshwright.planner.solver.lower_bounds import windows
from meshwright.planner.solver.problem import Mode, Problem, Resource, Transfer

_UNBOUNDED = 2**60
"""Domain bounds beyond this value represent infinity."""

BOUND_MARGIN = 1e-5
"""Relative margin on a bound, so that rounding in the linear program never excludes a mode."""

_CONCLUSIVE = (pywraplp.Solver.OPTIMAL, pywraplp.Solver.INFEASIBLE)
"""GLOP's conclusive statuses."""

GLOP_PARAMETERS = ("", "use_preprocessing: false")
"""Parameters with which GLOP is tried in order; the second set is for numerical trouble."""

_WARM_START = ("use_preprocessing: false use_dual_simplex: true", *GLOP_PARAMETERS)
"""Parameters for a warm start from the last optimum, which is close if only bounds of variables have changed."""


@dataclass(frozen=True)
class RelaxationOptimum:
    """The optimum, and the value and reduced cost of each variable by its index."""

    optimum: float
    values: Sequence[float]
    reduced_costs: Sequence[float]

    @property
    def bound(self) -> int:
        """A lower bound on every integer answer."""
        return math.ceil(self.optimum * (1 - BOUND_MARGIN) - BOUND_MARGIN)

    def bound_with(self, variable: int) -> int:
        """Return a lower bound on every integer answer in which the variable is 1."""
        rest = max(0.0, self.reduced_costs[variable]) * (1 - self.values[variable])
        return math.ceil((self.optimum + rest) * (1 - BOUND_MARGIN) - BOUND_MARGIN)


class Relaxation:
    """The linear program of a model, minimising one of its variables."""

    def __init__(self, model: cp_model.CpModel, objective: cp_model.IntVar) -> None:
        self._solver = pywraplp.Solver.CreateSolver("GLOP")
        self._variables = [
            self._solver.NumVar(*_range(variable.domain), f"v{index}")
            for index, variable in enumerate(model.proto.variables)
        ]
        for constraint in model.proto.constraints:
            if constraint.has_exactly_one():
                picks = constraint.exactly_one.literals
                self._add(1, 1, picks, [1] * len(picks))
                # A variable at an upper bound of its own makes the reduced costs of the others less informative.
                self._set_upper_bound(picks, math.inf)
            elif constraint.has_linear() and not len(constraint.enforcement_literal):
                self._add(*_range(constraint.linear.domain), constraint.linear.vars, constraint.linear.coeffs)
        self._solver.Objective().SetCoefficient(self._variables[objective.index], 1)
        self._solver.Objective().SetMinimization()
        self._forbidden: set[int] = set()

    def solve(self, most: float = math.inf) -> RelaxationOptimum | None:
        """Return the optimum, or None if it exceeds `most`; if GLOP gives up, the bound is 0."""
        status = solve_with_glop(self._solver, _WARM_START)
        if status == pywraplp.Solver.INFEASIBLE:
            return None
        if status != pywraplp.Solver.OPTIMAL:
            return RelaxationOptimum(
                optimum=0.0, values=[0.0] * len(self._variables), reduced_costs=[0.0] * len(self._variables)
            )
        optimum = self._solver.Objective().Value()
        if RelaxationOptimum(optimum, (), ()).bound > most:  # reading all values takes as long as solving
            return None
        return RelaxationOptimum(
            optimum=optimum,
            values=[variable.solution_value() for variable in self._variables],
            reduced_costs=[variable.reduced_cost() for variable in self._variables],
        )

    def solve_with_one_of(
        self, group: Collection[int], others: Collection[int], most: float = math.inf
    ) -> RelaxationOptimum | None:
        """Return the optimum if the variables in `others` but not in `group` are 0; None if it exceeds `most`.

        `others` are the variables of a constraint that exactly one of them is 1, those in `group` included.
        """
        excluded = set(others) - set(group) - self._forbidden
        self._set_upper_bound(excluded, 0)
        relaxed = self.solve(most)
        self._set_upper_bound(excluded, math.inf)
        return relaxed

    def forbid(self, variable: int) -> None:
        """Fix the variable to 0 from now on."""
        self._forbidden.add(variable)
        self._set_upper_bound([variable], 0)

    def _set_upper_bound(self, variables: Iterable[int], most: float) -> None:
        for index in variables:
            self._variables[index].SetUb(most)

    def _add(self, low: float, high: float, variables: Sequence[int], coefficients: Sequence[int]) -> None:
        sums: dict[int, int] = {}
        for variable, coefficient in zip(variables, coefficients, strict=True):
            sums[variable] = sums.get(variable, 0) + coefficient
        constraint = self._solver.Constraint(low, high)
        for variable, coefficient in sums.items():
            constraint.SetCoefficient(self._variables[variable], coefficient)


def solve_with_glop(solver: pywraplp.Solver, ways: Sequence[str]) -> int:
    """Solve with the first parameters with which GLOP does not give up, and return its status."""
    status = int(pywraplp.Solver.NOT_SOLVED)
    for parameters in ways:
        solver.SetSolverSpecificParametersAsString(parameters)
        status = int(solver.Solve())
        if status in _CONCLUSIVE:
            break
    return status


def _range(domain: Sequence[int]) -> tuple[float, float]:
    """Return the ends of a domain as floats, with values beyond `_UNBOUNDED` as infinity."""
    low, *_, high = domain
    return (-math.inf if low < -_UNBOUNDED else low), (math.inf if high > _UNBOUNDED else high)


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


class SpreadRelaxation:
    """The linear program of a problem in which tasks mix their modes and work and memory spread over all ranks.

    It is solved again and again, each time for part of the modes.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._solver = pywraplp.Solver.CreateSolver("GLOP")
        self._infinity = self._solver.infinity()
        self._pick = {c.name: [self._solver.NumVar(0, 1, "") for _ in c.modes] for c in problem.tasks}
        self._remaining = {c.name: np.ones(len(c.modes), dtype=bool) for c in problem.tasks}
        self._makespan = self._solver.NumVar(0, self._infinity, "")
        self._start = {name: self._solver.NumVar(0, self._infinity, "") for name in problem.order}
        self._end = {name: self._solver.NumVar(0, self._infinity, "") for name in problem.order}
        self._task_of_run = problem.runs
        self._ticks = {c.name: [float(o.ticks) for o in c.modes] for c in problem.tasks}
        self._work = {c.name: [self._share(o) * o.ticks for o in c.modes] for c in problem.tasks}
        for picks in self._pick.values():
            self._add(1, 1, *((pick, 1.0) for pick in picks))
        self._set_order()
        self._set_work()
        self._set_memory()
        self._solver.Objective().SetCoefficient(self._makespan, 1)
        self._solver.Objective().SetMinimization()

    def bounds(self, kept: ModeMask) -> ModeBounds | None:
        """Return the bounds on answers with the modes that are kept, or None if there is no answer."""
        for name, picks in self._pick.items():
            for index in np.flatnonzero(self._remaining[name] != kept[name]).tolist():
                picks[index].SetUb(float(kept[name][index]))
            self._remaining[name] = np.asarray(kept[name])
        if not all(mask.any() for mask in self._remaining.values()) or (optimum := self._solved()) is None:
            return None
        each = {}
        for name, picks in self._pick.items():
            costs = np.array([pick.reduced_cost() for pick in picks]) if optimum else np.zeros(len(picks))
            mode_bounds = np.ceil((optimum + np.maximum(0.0, costs)) * (1 - BOUND_MARGIN) - BOUND_MARGIN)
            each[name] = np.where(self._remaining[name], mode_bounds, np.inf)
        return ModeBounds(max(0, int(np.ceil(optimum * (1 - BOUND_MARGIN) - BOUND_MARGIN))), each)

    def _solved(self) -> float | None:
        """Return the optimum, 0 if GLOP gives up for numerical trouble, or None if the program is infeasible."""
        status = solve_with_glop(self._solver, GLOP_PARAMETERS)
        if status == pywraplp.Solver.INFEASIBLE:
            return None
        return float(self._solver.Objective().Value()) if status == pywraplp.Solver.OPTIMAL else 0.0

    def _set_order(self) -> None:
        """Add that an activity lasts as long as the mix of its modes, and starts after the activities that it waits
        for."""
        for name in self._problem.order:
            self._add(
                0,
                self._infinity,
                (self._end[name], 1.0),
                (self._start[name], -1.0),
                *self._terms(name, self._ticks, -1),
            )
            self._add(0, self._infinity, (self._makespan, 1.0), (self._end[name], -1.0))
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
            self._add(lag, self._infinity, *ends, *(self._terms(after, early, 1) if streamed else ()))
            if streamed:
                self._add(0, self._infinity, (self._start[after], 1.0), (self._start[before], -1.0))
        for before, after, periods, lag, is_late in self._problem.carried:
            waits = (self._makespan, float(periods)), (self._start[after], 1.0), (self._end[before], -1.0)
            self._add(lag, self._infinity, *waits, *(self._terms(before, late, -1) if is_late else ()))

    def _set_transfer(self, transfer: Transfer) -> None:
        ends = (self._end[transfer.name], 1.0), (self._start[transfer.name], -1.0)
        for task, min_ticks in zip(
            (transfer.source, transfer.target), _min_transfer_ticks(self._problem, transfer), strict=True
        ):
            resources = (mode.resource for mode in self._problem.modes(task))
            terms = zip(self._pick[task], (-float(min_ticks[resource]) for resource in resources), strict=True)
            self._add(0, self._infinity, *ends, *terms)

    def _set_work(self) -> None:
        for window in windows(self._problem):
            closes = self._start[window.before] if window.before else self._makespan
            opens = [(self._end[window.after], -1.0)] if window.after else []
            inside = (term for name in window.between for term in self._terms(name, self._work, -1))
            self._add(0, self._infinity, (closes, 1.0), *opens, *inside)

    def _set_memory(self) -> None:
        """Add that no task needs more memory than a device has, on average over all ranks.

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
            self._add(-self._infinity, self._problem.device_units, *terms)

    def _share(self, mode: Mode) -> float:
        """Return the mode's share of all ranks."""
        return mode.resource.num_ranks / self._problem.num_ranks

    def _terms(
        self, activity: str, amounts: Mapping[str, list[float]], sign: int
    ) -> list[tuple[pywraplp.Variable, float]]:
        """Return the terms of an activity that runs a task, with the amount of each mode; a transfer has none."""
        if activity not in self._task_of_run:
            return []
        task = self._task_of_run[activity]
        return [(pick, sign * amount) for pick, amount in zip(self._pick[task], amounts[task], strict=True)]

    def _add(self, low: float, high: float, *terms: tuple[pywraplp.Variable, float]) -> None:
        """Add a constraint on a sum of terms; a variable that occurs twice counts twice."""
        sums: dict[int, float] = {}
        by_index = {}
        for variable, amount in terms:
            index = variable.index()
            by_index[index] = variable
            sums[index] = sums.get(index, 0.0) + amount
        constraint = self._solver.Constraint(low, high)
        for index, amount in sums.items():
            constraint.SetCoefficient(by_index[index], amount)


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
