"""The linear relaxation of a model: its linear rules without conditions, over real numbers.

It gives a bound, and for each variable that is 0 how much worse the bound would be if it were 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ortools.linear_solver import pywraplp
from ortools.sat.python import cp_model

_UNBOUNDED = 2**60
"""Bounds of a domain beyond it stand for none."""

SAFETY = 1e-5
"""Relative to a bound: an option is only dropped when rounding in the linear program cannot be the reason."""


_ANSWERS = (pywraplp.Solver.OPTIMAL, pywraplp.Solver.INFEASIBLE)
"""What GLOP says when it knows."""

_OTHERWISE = "use_preprocessing: false"
"""How it is asked again."""


@dataclass(frozen=True)
class Relaxed:
    """The optimum, and by index of variable its value and its reduced cost."""

    optimum: float
    values: Sequence[float]
    reduced_costs: Sequence[float]

    @property
    def bound(self) -> int:
        """No whole answer is below this."""
        return math.ceil(self.optimum * (1 - SAFETY) - SAFETY)

    def bound_with(self, variable: int) -> int:
        """No whole answer in which the variable is 1 is below this."""
        rest = max(0.0, self.reduced_costs[variable]) * (1 - self.values[variable])
        return math.ceil((self.optimum + rest) * (1 - SAFETY) - SAFETY)


class Relaxation:
    """A linear program made of a model, minimising one of its variables."""

    def __init__(self, model: cp_model.CpModel, objective: cp_model.IntVar) -> None:
        self._solver = pywraplp.Solver.CreateSolver("GLOP")
        self._variables = [
            self._solver.NumVar(*_range(variable.domain), f"v{index}")
            for index, variable in enumerate(model.proto.variables)
        ]
        for constraint in model.proto.constraints:
            if constraint.has_exactly_one():
                self._add(1, 1, constraint.exactly_one.literals, [1] * len(constraint.exactly_one.literals))
            elif constraint.has_linear() and not len(constraint.enforcement_literal):
                self._add(*_range(constraint.linear.domain), constraint.linear.vars, constraint.linear.coeffs)
        self._solver.Objective().SetCoefficient(self._variables[objective.index], 1)
        self._solver.Objective().SetMinimization()

    def solve(self) -> Relaxed | None:
        """The optimum, or None when there is no answer; where GLOP gives up nothing is known."""
        status = solved(self._solver)
        if status == pywraplp.Solver.INFEASIBLE:
            return None
        if status != pywraplp.Solver.OPTIMAL:
            return Relaxed(optimum=0.0, values=[0.0] * len(self._variables), reduced_costs=[0.0] * len(self._variables))
        return Relaxed(
            optimum=self._solver.Objective().Value(),
            values=[variable.solution_value() for variable in self._variables],
            reduced_costs=[variable.reduced_cost() for variable in self._variables],
        )

    def solve_with_one_of(self, group: Sequence[int]) -> Relaxed | None:
        """The optimum when one variable of a group is 1, or None when there is no answer."""
        constraint = self._solver.Constraint(1, 1)
        for index in group:
            constraint.SetCoefficient(self._variables[index], 1)
        relaxed = self.solve()
        constraint.SetBounds(-self._solver.infinity(), self._solver.infinity())
        return relaxed

    def forbid(self, variable: int) -> None:
        """The variable is 0 from now on."""
        self._variables[variable].SetUb(0)

    def _add(self, low: float, high: float, variables: Sequence[int], coefficients: Sequence[int]) -> None:
        sums: dict[int, int] = {}
        for variable, coefficient in zip(variables, coefficients, strict=True):
            sums[variable] = sums.get(variable, 0) + coefficient
        constraint = self._solver.Constraint(low, high)
        for variable, coefficient in sums.items():
            constraint.SetCoefficient(self._variables[variable], coefficient)


def solved(solver: pywraplp.Solver) -> int:
    """How solving ends: GLOP sometimes gives up for numerical trouble, and is asked again otherwise."""
    status = int(solver.Solve())
    if status not in _ANSWERS:
        solver.SetSolverSpecificParametersAsString(_OTHERWISE)
        status = int(solver.Solve())
        solver.SetSolverSpecificParametersAsString("")
    return status


def _range(domain: Sequence[int]) -> tuple[float, float]:
    """The ends of a domain; what stands for infinity there is infinity here."""
    low, *_, high = domain
    return (-math.inf if low < -_UNBOUNDED else low), (math.inf if high > _UNBOUNDED else high)
