"""One search case of a search: its optimisation problem and the solver's answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.cost_models.question import CostModel
from meshwright.planner.plan.edges import StageTransfer
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.pins import Ranks
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.steps_ahead import SearchCase
from meshwright.planner.search.assemble import Origin, Pick, assemble
from meshwright.planner.search.formulate import Formulation
from meshwright.planner.solver.bounds import least_makespan
from meshwright.planner.solver.result import Answer, Result


@dataclass(frozen=True, kw_only=True)
class FormulatedCase:
    """One search case and its optimisation problem."""

    search_case: SearchCase
    edges: tuple[StageTransfer, ...]
    formulation: Formulation

    @property
    def lower_bound_seconds(self) -> float:
        """A lower bound on the period from arithmetic alone; infinite if some stage has no choice."""
        problem = self.formulation.problem
        has_choices = all(call.options for call in problem.calls)
        return least_makespan(problem) * self.formulation.tick_seconds if has_choices else math.inf

    def ticks(self, seconds: float) -> int:
        return math.ceil(seconds / self.formulation.tick_seconds)


@dataclass(frozen=True, kw_only=True)
class SolvedCase(FormulatedCase):
    """One search case, its optimisation problem and the solver's result."""

    result: Result

    @property
    def objective_seconds(self) -> float:
        assert self.result.objective is not None
        return self.result.objective * self.formulation.tick_seconds

    @property
    def bound_seconds(self) -> float:
        """The proven lower bound on the period; infinite if the search case has no plan."""
        return self.result.bound * self.formulation.tick_seconds if self.result.status != "infeasible" else math.inf

    def assemble_plan(self, facts: Facts, model: CostModel, origin: Origin) -> Plan:
        """Build the plan from the solver's answer."""
        answer, ahead = self.result.answer, self.search_case.ahead
        assert answer is not None
        picks, order = _picks(self.formulation, answer), _order(self.formulation, answer)
        return assemble(facts, model, handovers=self.edges, picks=picks, order=order, origin=origin, ahead=ahead)


def likeliest_index(formulated: Sequence[FormulatedCase], gap: float) -> int:
    """Return the index of the first search case whose lower bound exceeds the smallest one by no more than the gap."""
    bounds = [case.lower_bound_seconds for case in formulated]
    return next(index for index, bound in enumerate(bounds) if bound * (1 - gap) <= min(bounds))


def _picks(formulation: Formulation, answer: Answer) -> dict[str, Pick]:
    picks = {}
    for stage, pairs in formulation.option_choices.items():
        pool, candidate = pairs[answer.picked[stage]]
        picks[stage] = Pick(Ranks(answer.first_ranks[stage], pool.num_ranks), candidate.choice)
    return picks


def _order(formulation: Formulation, answer: Answer) -> tuple[str, ...]:
    """Sort the tasks by their start; tasks that start together are in an order that respects the precedences."""
    position = {name: index for index, name in enumerate(formulation.problem.order)}
    return tuple(sorted(position, key=lambda name: (answer.starts[name], position[name])))
