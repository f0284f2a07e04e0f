"""One scope of a search: its problem, and what the solver answered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.cost_models.question import CostModel
from meshwright.planner.plan.edges import Handover
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.pins import Ranks
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.steps_ahead import Scope
from meshwright.planner.search.assemble import Origin, Pick, assemble
from meshwright.planner.search.formulate import Formulation
from meshwright.planner.solver.bounds import least_makespan
from meshwright.planner.solver.result import Answer, Result


@dataclass(frozen=True, kw_only=True)
class Formulated:
    """One scope and its problem."""

    scope: Scope
    edges: tuple[Handover, ...]
    formulation: Formulation

    @property
    def least_seconds(self) -> float:
        """A bound by arithmetic alone, infinite when a stage has no choice."""
        problem = self.formulation.problem
        has_choices = all(call.options for call in problem.calls)
        return least_makespan(problem) * self.formulation.tick_seconds if has_choices else math.inf

    def ticks(self, seconds: float) -> int:
        return math.ceil(seconds / self.formulation.tick_seconds)


@dataclass(frozen=True, kw_only=True)
class Searched(Formulated):
    """One scope, its problem and what the search answered."""

    result: Result

    @property
    def objective_seconds(self) -> float:
        assert self.result.objective is not None
        return self.result.objective * self.formulation.tick_seconds

    @property
    def bound_seconds(self) -> float:
        """Infinite where there is no plan."""
        return self.result.bound * self.formulation.tick_seconds if self.result.status != "infeasible" else math.inf

    def assembled(self, facts: Facts, model: CostModel, origin: Origin) -> Plan:
        """The plan of the answer."""
        answer, ahead = self.result.answer, self.scope.ahead
        assert answer is not None
        picks, order = _picks(self.formulation, answer), _order(self.formulation, answer)
        return assemble(facts, model, handovers=self.edges, picks=picks, order=order, origin=origin, ahead=ahead)


def likeliest_of(formulated: Sequence[Formulated], gap: float) -> int:
    """The first of those whose bound none is below by more than the gap."""
    bounds = [one.least_seconds for one in formulated]
    return next(index for index, bound in enumerate(bounds) if bound * (1 - gap) <= min(bounds))


def _picks(formulation: Formulation, answer: Answer) -> dict[str, Pick]:
    picks = {}
    for stage, pairs in formulation.behind.items():
        pool, candidate = pairs[answer.picked[stage]]
        picks[stage] = Pick(Ranks(answer.first_ranks[stage], pool.num_ranks), candidate.choice)
    return picks


def _order(formulation: Formulation, answer: Answer) -> tuple[str, ...]:
    """The tasks by their start; those that start together in an order that respects what waits for what."""
    position = {name: index for index, name in enumerate(formulation.problem.order)}
    return tuple(sorted(position, key=lambda name: (answer.starts[name], position[name])))
