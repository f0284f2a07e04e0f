"""A first plan is found among a few choices, and is one of the plans that the whole search looks at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshwright.planner.compile import best_plan
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.cost_queries import stage_transfers
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.steps_ahead import SearchCase, search_cases, steps_ahead_patterns
from meshwright.planner.search.frontiers import Frontier, StageCosts
from meshwright.planner.search.pruning_bound import default_frontiers, first_plan
from meshwright.planner.search.search_case import SolvedCase
from meshwright.planner.solver.result import Effort, Limits
from meshwright.profiles.stages import GENERATE
from tests.planner.jobs import RandomModel, small_facts
from tests.seeds import seeds

LIMITS = Limits(gap=0.0)


def synchronous(facts: Facts) -> SearchCase:
    (ahead,) = steps_ahead_patterns(facts.graph, 0)
    (scope,) = search_cases(ahead, 0)
    return scope


def plan_of(costs: StageCosts, frontiers: Sequence[Frontier]) -> SolvedCase | None:
    edges = stage_transfers(costs.facts, costs.model)
    return first_plan(costs, synchronous(costs.facts), frontiers, edges=edges, limits=LIMITS, effort=Effort())


def defaults(costs: StageCosts) -> list[Frontier]:
    return default_frontiers(costs, synchronous(costs.facts), begun=lambda _index: None)


@seeds(2, all=4)
def test_a_first_plan_takes_less_work_and_is_no_faster_than_the_best(seed: int) -> None:
    facts = small_facts(ranks_per_node=4, batch_size=4, memory_bytes=2**28)
    model = RandomModel(seed, 2**27)
    costs = StageCosts(facts, model, ())
    first = plan_of(costs, defaults(costs))
    best = best_plan(facts, model, limits=LIMITS)
    assert first is not None
    assert isinstance(best, Plan)
    assert first.objective_seconds >= best.period_seconds * (1 - 1e-5)
    assert sum(one.queries.num_time_costs for one in costs.costed_frontiers) < best.solver.work.num_time_costs


@seeds(2, all=4)
def test_a_plan_with_all_choices_of_generation_is_no_faster_than_the_best(seed: int) -> None:
    facts = small_facts(ranks_per_node=4, batch_size=4, memory_bytes=2**28)
    model = RandomModel(seed, 2**27)
    costs = StageCosts(facts, model, ())
    every = costs.frontier(facts.graph.by_name[GENERATE], synchronous(facts), None)
    generation = replace(every, pools=costs.pools[GENERATE])
    better = plan_of(costs, [generation if one.stage.generates else one for one in defaults(costs)])
    best = best_plan(facts, model, limits=LIMITS)
    assert better is not None
    assert isinstance(best, Plan)
    assert better.objective_seconds >= best.period_seconds * (1 - 1e-5)


def test_there_is_none_where_a_stage_has_no_choice_that_fits() -> None:
    facts = small_facts(ranks_per_node=4, batch_size=4, memory_bytes=2**10)
    costs = StageCosts(facts, RandomModel(0, 2**27), ())
    assert plan_of(costs, defaults(costs)) is None
