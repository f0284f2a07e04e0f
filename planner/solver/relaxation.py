"""The linear relaxation of a model: its unconditional linear rules over real numbers.

It gives a lower bound, and for each variable that is 0 how much the bound would rise if the variable were 1.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ortools.linear_solver import pywraplp
from ortools.sat.python import cp_model

_UNBOUNDED = 2**60
"""Domain bounds beyond this value represent infinity."""

BOUND_MARGIN = 1e-5
"""Relative margin on a bound, so that rounding in the linear program never excludes an option."""


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
        """Return the optimum if, of variables of which one is 1, only those in `group` may be.

        None if it exceeds `most`.
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
    for way in ways:
        solver.SetSolverSpecificParametersAsString(way)
        status = int(solver.Solve())
        if status in _CONCLUSIVE:
            break
    return status


def _range(domain: Sequence[int]) -> tuple[float, float]:
    """Return the ends of a domain as floats, with values beyond `_UNBOUNDED` as infinity."""
    low, *_, high = domain
    return (-math.inf if low < -_UNBOUNDED else low), (math.inf if high > _UNBOUNDED else high)
