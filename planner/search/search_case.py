"""One search case: its optimisation problem, the solver's answer, and the record that a plan keeps of the search.

A search case fixes how many steps each stage works ahead, whether state is offloaded, and whether sequences stay in
flight (`SearchCase`). Each case is a problem of its own; the plan is the best over all cases.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from meshwright.cost_models.protocol import CostModel
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.cost_queries import StageTransfer
from meshwright.planner.plan.pins import Ranks
from meshwright.planner.plan.plan import Plan, SearchWork, Solver
from meshwright.planner.plan.steps_ahead import SearchCase
from meshwright.planner.search.assemble import Origin, Pick, assemble
from meshwright.planner.search.choice_costs import TOO_SLOW
from meshwright.planner.search.formulate import Formulation
from meshwright.planner.search.frontiers import Frontier
from meshwright.planner.solver.lower_bounds import least_makespan
from meshwright.planner.solver.result import Answer, Effort, Limits, Result


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
        has_choices = all(task.modes for task in problem.tasks)
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
        return assemble(facts, model, transfers=self.edges, picks=picks, order=order, origin=origin, ahead=ahead)


def likeliest_index(formulated: Sequence[FormulatedCase], gap: float) -> int:
    """Return the index of the search case that is likeliest to hold the best plan.

    It is the first one whose lower bound exceeds the smallest bound by no more than the gap.
    """
    bounds = [case.lower_bound_seconds for case in formulated]
    return next(index for index, bound in enumerate(bounds) if bound * (1 - gap) <= min(bounds))


def _picks(formulation: Formulation, answer: Answer) -> dict[str, Pick]:
    picks = {}
    for stage, pairs in formulation.option_choices.items():
        pool, candidate = pairs[answer.picked[stage]]
        picks[stage] = Pick(Ranks(answer.first_ranks[stage], pool.num_ranks), candidate.choice)
    return picks


def _order(formulation: Formulation, answer: Answer) -> tuple[str, ...]:
    """Sort the tasks (stages and refits) by start; those that start together are in an order that respects the
    precedences."""
    position = {name: index for index, name in enumerate(formulation.problem.order)}
    return tuple(sorted(position, key=lambda name: (answer.starts[name], position[name])))


_DIGITS = 9
"""Decimal places of the recorded deterministic time."""


def solver_record(
    limits: Limits, *, is_whole: bool, statuses: Collection[str], bound_seconds: float, work: SearchWork
) -> Solver:
    """Return the record of a search; objective and gap are added by `with_gap` once the plan has been timed.

    `statuses` are those of the search cases that were searched; the search `is_whole` if these are all search cases.
    """
    from meshwright.planner.solver.cp_sat import NAME, VERSION

    # "beaten" means that no plan is faster than the known one by more than the tolerance. Only a tolerance of 0 makes
    # the known plan the best one.
    exact = {"optimal", "infeasible"} if limits.tolerance else {"optimal", "infeasible", "beaten"}
    return Solver(
        name=NAME,
        version=VERSION,
        seed=limits.seed,
        num_workers=limits.num_workers,
        max_deterministic_time=limits.max_deterministic_time,
        requested_gap=limits.tolerance,
        status="optimal" if is_whole and exact.issuperset(statuses) else "feasible",
        objective_seconds=0.0,
        bound_seconds=bound_seconds,
        gap=0.0,
        work=work,
    )


def count_work(costed: Sequence[Frontier], effort: Effort) -> SearchWork:
    """Count the work of costing these frontiers and of solving."""
    counts = [frontier.queries for frontier in costed]
    return SearchWork(
        num_time_costs=sum(count.num_time_costs for count in counts),
        num_memory_costs=sum(count.num_memory_costs for count in counts),
        num_generations=sum(count.num_generations for count in counts),
        num_too_slow=sum(frontier.rejected[TOO_SLOW] for frontier in costed),
        num_models=effort.num_models,
        deterministic_time=round(effort.deterministic_time, _DIGITS),
    )


def with_gap(plan: Plan) -> Plan:
    """Return the plan with its timed period as the objective, and with its gap to the lower bound.

    The timed period can exceed the solver's makespan, because rewards on hosts arrive later or ticks were coarse. The
    status then becomes feasible if the gap is wider than requested.
    """
    solver, period = plan.solver, plan.period_seconds
    bound = min(solver.bound_seconds, period)
    gap = (period - bound) / period
    timed = solver.model_copy(update={"objective_seconds": period, "bound_seconds": bound, "gap": gap})
    status = "feasible" if solver.status == "optimal" and not timed.has_requested_gap else solver.status
    return plan.model_copy(update={"solver": timed.model_copy(update={"status": status})})
