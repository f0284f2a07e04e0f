"""Models of CP-SAT: variables, constraints, an objective, and the solver that reads its answer.

This is the part of `ortools.sat.python.cp_model` that this folder uses, with the same names, on the same compiled
classes. It stands alone because that module imports pandas, which takes longer to import than a small search takes, for
series of variables that no model here has.
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock
from typing import Any, TypeAlias

from ortools.sat.python import cp_model_helper as compiled
from ortools.util.python import sorted_interval_list

CpSolverStatus: TypeAlias = compiled.CpSolverStatus
Domain: TypeAlias = sorted_interval_list.Domain
IntVar: TypeAlias = compiled.IntVar
IntervalVar: TypeAlias = compiled.IntervalVar
LinearExpr: TypeAlias = compiled.LinearExpr
LinearExprT: TypeAlias = compiled.LinearExpr | int
Literal: TypeAlias = compiled.Literal

OPTIMAL = CpSolverStatus.OPTIMAL
FEASIBLE = CpSolverStatus.FEASIBLE
INFEASIBLE = CpSolverStatus.INFEASIBLE
MODEL_INVALID = CpSolverStatus.MODEL_INVALID


class CpModel(compiled.CpBaseModel):  # type: ignore[misc]
    """Variables and constraints in the order in which they were added, and at most one objective."""

    def __init__(self) -> None:
        super().__init__(None)

    @property
    def proto(self) -> compiled.CpModelProto:
        """The model as CP-SAT reads it."""
        return self.model_proto

    def new_int_var(self, lowest: int, highest: int, name: str) -> IntVar:
        """Add a variable with the values from `lowest` to `highest`."""
        return self.new_int_var_from_domain(Domain(lowest, highest), name)

    def new_int_var_from_domain(self, domain: Domain, name: str) -> IntVar:
        """Add a variable with the values in `domain`."""
        return IntVar(self.model_proto).with_name(name).with_domain(domain)

    def new_bool_var(self, name: str) -> IntVar:
        """Add a variable that is 0 or 1."""
        return self.new_int_var(0, 1, name)

    def new_interval_var(self, start: LinearExprT, size: LinearExprT, end: LinearExprT, name: str) -> IntervalVar:
        """Add an interval, with the constraint that it ends `size` after its start."""
        return self._new_interval_var(name, start, size, end, [])

    def new_optional_interval_var(
        self, start: LinearExprT, size: LinearExprT, end: LinearExprT, is_present: Literal, name: str
    ) -> IntervalVar:
        """Add an interval that constrains nothing where `is_present` is false."""
        return self._new_interval_var(name, start, size, end, [is_present])

    def add(self, comparison: compiled.BoundedLinearExpression | bool) -> compiled.Constraint:
        """Add a comparison of linear expressions; if both are numbers, it is true or false already."""
        if isinstance(comparison, compiled.BoundedLinearExpression):
            return self._add_bounded_linear_expression(comparison)
        return self.add_bool_or(*([True] if comparison else []))

    def add_exactly_one(self, literals: Iterable[Literal]) -> compiled.Constraint:
        """Add the constraint that one literal is true."""
        return self._add_bool_argument_constraint(compiled.BoolArgumentConstraint.exactly_one, *literals)

    def add_bool_or(self, *literals: Literal | bool) -> compiled.Constraint:
        """Add the constraint that a literal is true."""
        return self._add_bool_argument_constraint(compiled.BoolArgumentConstraint.bool_or, *literals)

    def add_bool_and(self, *literals: Literal) -> compiled.Constraint:
        """Add the constraint that every literal is true."""
        return self._add_bool_argument_constraint(compiled.BoolArgumentConstraint.bool_and, *literals)

    def add_implication(self, premise: Literal, conclusion: Literal) -> compiled.Constraint:
        """Add the constraint that `conclusion` is true where `premise` is."""
        return self.add_bool_and(conclusion).only_enforce_if(premise)

    def add_no_overlap(self, intervals: Iterable[IntervalVar]) -> compiled.Constraint:
        """Add the constraint that no two intervals that are present overlap."""
        return self._add_no_overlap(intervals)

    def add_cumulative(
        self, intervals: Iterable[IntervalVar], demands: Iterable[LinearExprT], capacity: LinearExprT
    ) -> compiled.Constraint:
        """Add the constraint that the demands of the intervals at any one time add up to at most the capacity."""
        return self._add_cumulative(intervals, demands, capacity)

    def minimize(self, variable: IntVar) -> None:
        """Minimise a variable, instead of what was minimised until now."""
        self.model_proto.clear_objective()
        objective = self.model_proto.objective
        objective.vars.append(variable.index)
        objective.coeffs.append(1)
        objective.scaling_factor = 1.0

    def validate(self) -> str:
        """Return why CP-SAT refuses the model; an empty text if it does not."""
        return str(compiled.CpSatHelper.validate_model(self.model_proto))


class CpSolver:
    """One run of CP-SAT with its parameters, and then its answer."""

    def __init__(self) -> None:
        self.parameters = compiled.SatParameters()
        self._response: Any = None
        self._running: compiled.SolveWrapper | None = None
        self._lock = Lock()

    def solve(self, model: CpModel, on_solution: CpSolverSolutionCallback | None = None) -> CpSolverStatus:
        """Solve the model; `on_solution` is called with each better answer."""
        running = compiled.SolveWrapper()
        running.set_parameters(self.parameters)
        if on_solution is not None:
            running.add_solution_callback(on_solution)
        with self._lock:
            self._running = running
        self._response = running.solve(model.proto)
        with self._lock:
            self._running = None
        if on_solution is not None:
            running.clear_solution_callback(on_solution)
        return self._response.status

    def stop_search(self) -> None:
        """Ask the run, if there is one, to end with what it has found; callable from another thread."""
        with self._lock:
            if self._running is not None:
                self._running.stop_search()

    def value(self, expression: LinearExprT) -> int:
        """Return the value of an expression in the answer."""
        return int(compiled.ResponseHelper.value(self._response, expression))

    @property
    def objective_value(self) -> float:
        """The objective of the answer."""
        return float(self._response.objective_value)

    @property
    def best_objective_bound(self) -> float:
        """A proven lower bound on the objective."""
        return float(self._response.best_objective_bound)

    @property
    def deterministic_time(self) -> float:
        """The work done, in deterministic seconds."""
        return float(self._response.deterministic_time)


class CpSolverSolutionCallback(compiled.SolutionCallback):  # type: ignore[misc]
    """Receives each better answer while the solver runs: a subclass defines `on_solution_callback`."""

    def OnSolutionCallback(self) -> None:  # noqa: N802 - CP-SAT calls it by this name
        """Call `on_solution_callback`."""
        self.on_solution_callback()

    def on_solution_callback(self) -> None:
        """Called with each better answer."""
        raise NotImplementedError

    @property
    def objective_value(self) -> float:
        """The objective of the answer."""
        return float(self.ObjectiveValue())

    @property
    def best_objective_bound(self) -> float:
        """A proven lower bound on the objective so far."""
        return float(self.BestObjectiveBound())
