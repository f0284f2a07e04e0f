"""The linear relaxation of a model: its linear rules without conditions, over real numbers.

It gives a bound, and for each variable that is 0 how much worse the bound would be if it were 1.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ortools.linear_solver import pywraplp
from ortools.sat.python import cp_model

_UNBOUNDED = 2**60
"""Bounds of a domain beyond it stand for none."""

SAFETY = 1e-5
"""Relative to a bound: an option is only dropped when rounding in the linear program cannot be the reason."""


_ANSWERS = (pywraplp.Solver.OPTIMAL, pywraplp.Solver.INFEASIBLE)
"""What GLOP says when it knows."""

AFRESH = ("", "use_preprocessing: false")
"""How GLOP is asked, and how again where it gives up for numerical trouble."""

_FROM_LAST = ("use_preprocessing: false use_dual_simplex: true", *AFRESH)
"""The same, from the last optimum on, which is near where only bounds of variables have changed."""


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
                picks = constraint.exactly_one.literals
                self._add(1, 1, picks, [1] * len(picks))
                self._set_most(picks, math.inf)  # one of them that is at a bound of its own says less of the others
            elif constraint.has_linear() and not len(constraint.enforcement_literal):
                self._add(*_range(constraint.linear.domain), constraint.linear.vars, constraint.linear.coeffs)
        self._solver.Objective().SetCoefficient(self._variables[objective.index], 1)
        self._solver.Objective().SetMinimization()
        self._forbidden: set[int] = set()

    def solve(self, most: float = math.inf) -> Relaxed | None:
        """The optimum, or None when there is no answer within `most`; where GLOP gives up nothing is known."""
        status = solved(self._solver, _FROM_LAST)
        if status == pywraplp.Solver.INFEASIBLE:
            return None
        if status != pywraplp.Solver.OPTIMAL:
            return Relaxed(optimum=0.0, values=[0.0] * len(self._variables), reduced_costs=[0.0] * len(self._variables))
        optimum = self._solver.Objective().Value()
        if Relaxed(optimum, (), ()).bound > most:  # all that follows takes as long as solving
            return None
        return Relaxed(
            optimum=optimum,
            values=[variable.solution_value() for variable in self._variables],
            reduced_costs=[variable.reduced_cost() for variable in self._variables],
        )

    def solve_with_one_of(
        self, group: Collection[int], others: Collection[int], most: float = math.inf
    ) -> Relaxed | None:
        """The optimum when of these others, one of which is 1, only those of a group may be; None when there is no
        answer within `most`."""
        without = set(others) - set(group) - self._forbidden
        self._set_most(without, 0)
        relaxed = self.solve(most)
        self._set_most(without, math.inf)
        return relaxed

    def forbid(self, variable: int) -> None:
        """The variable is 0 from now on."""
        self._forbidden.add(variable)
        self._set_most([variable], 0)

    def _set_most(self, variables: Iterable[int], most: float) -> None:
        for index in variables:
            self._variables[index].SetUb(most)

    def _add(self, low: float, high: float, variables: Sequence[int], coefficients: Sequence[int]) -> None:
        sums: dict[int, int] = {}
        for variable, coefficient in zip(variables, coefficients, strict=True):
            sums[variable] = sums.get(variable, 0) + coefficient
        constraint = self._solver.Constraint(low, high)
        for variable, coefficient in sums.items():
            constraint.SetCoefficient(self._variables[variable], coefficient)


def solved(solver: pywraplp.Solver, ways: Sequence[str]) -> int:
    """How solving ends in the first of these ways in which GLOP does not give up."""
    status = int(pywraplp.Solver.NOT_SOLVED)
    for way in ways:
        solver.SetSolverSpecificParametersAsString(way)
        status = int(solver.Solve())
        if status in _ANSWERS:
            break
    return status


def _range(domain: Sequence[int]) -> tuple[float, float]:
    """The ends of a domain; what stands for infinity there is infinity here."""
    low, *_, high = domain
    return (-math.inf if low < -_UNBOUNDED else low), (math.inf if high > _UNBOUNDED else high)
