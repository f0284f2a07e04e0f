"""A scope whose stage has no choice has no plan, whatever its bound is asked for."""

from __future__ import annotations

import math
from dataclasses import replace

from meshwright.planner.plan.cost_queries import stage_transfers
from meshwright.planner.plan.steps_ahead import synchronous_case
from meshwright.planner.search.formulate import formulate
from meshwright.planner.search.frontiers import frontiers
from meshwright.planner.search.search_case import FormulatedCase, SolvedCase
from meshwright.planner.solver.result import Limits, Result
from meshwright.planner.solver.solve import solve
from meshwright.profiles.algorithms import PPO_GRAPH
from tests.planner.jobs import ToyModel, small_facts

FACTS = small_facts(ranks_per_node=2, batch_size=4)


def formulated() -> FormulatedCase:
    model = ToyModel(FACTS)
    edges = stage_transfers(FACTS, model)
    formulation = formulate(FACTS, model, frontiers(FACTS, model, ()), edges)
    return FormulatedCase(search_case=synchronous_case(PPO_GRAPH), edges=edges, formulation=formulation)


def test_arithmetic_alone_bounds_what_a_search_finds() -> None:
    one = formulated()
    result = solve(one.formulation.problem, Limits())
    found = SolvedCase(search_case=one.search_case, edges=one.edges, formulation=one.formulation, result=result)
    assert 0 < one.lower_bound_seconds <= found.bound_seconds == found.objective_seconds
    assert one.ticks(found.objective_seconds) == result.objective


def test_without_a_choice_there_is_no_plan() -> None:
    one = formulated()
    problem = one.formulation.problem
    none = problem.with_tasks((replace(problem.tasks[0], modes=()), *problem.tasks[1:]))
    empty = replace(one, formulation=replace(one.formulation, problem=none))
    result = Result(status="infeasible", answer=None, objective=None, bound=0)
    found = SolvedCase(search_case=one.search_case, edges=one.edges, formulation=one.formulation, result=result)
    assert empty.lower_bound_seconds == found.bound_seconds == math.inf
