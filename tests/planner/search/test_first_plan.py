"""A first plan is found among a few choices, and is one of the plans that the whole search looks at."""

from __future__ import annotations

from dataclasses import replace

from meshwright.planner.compile import best_plan
from meshwright.planner.plan.edges import handovers
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.steps_ahead import Scope, patterns, scopes
from meshwright.planner.search.first_plan import FirstPlans
from meshwright.planner.search.stage_costs import StageCosts
from meshwright.planner.solver.result import Effort, Limits
from meshwright.profiles.stages import GENERATE
from tests.planner.jobs import RandomModel, small_facts
from tests.seeds import seeds

LIMITS = Limits(gap=0.0)


def synchronous(facts: Facts) -> Scope:
    (ahead,) = patterns(facts.graph, 0)
    (scope,) = scopes(ahead, 0)
    return scope


def first_plans(facts: Facts, model: RandomModel) -> FirstPlans:
    return FirstPlans(
        costs=StageCosts(facts, model, ()),
        scope=synchronous(facts),
        edges=handovers(facts, model),
        limits=LIMITS,
        effort=Effort(),
        begun=lambda _index: None,
    )


@seeds(2, all=4)
def test_a_first_plan_takes_less_work_and_is_no_faster_than_the_best(seed: int) -> None:
    facts = small_facts(ranks_per_node=4, batch_size=4, memory_bytes=2**28)
    model = RandomModel(seed, 2**27)
    plans = first_plans(facts, model)
    first = plans.best()
    best = best_plan(facts, model, limits=LIMITS)
    assert first is not None
    assert isinstance(best, Plan)
    assert first.objective_seconds >= best.period_seconds * (1 - 1e-5)
    assert sum(one.asked.timed for one in plans.costs.asked) < best.solver.work.timed


@seeds(2, all=4)
def test_a_plan_with_all_choices_of_generation_costs_no_others_anew_and_is_no_faster_than_the_best(seed: int) -> None:
    facts = small_facts(ranks_per_node=4, batch_size=4, memory_bytes=2**28)
    model = RandomModel(seed, 2**27)
    plans = first_plans(facts, model)
    plans.best()
    num_costed = len(plans.costs.asked)
    generation = plans.costs.frontier(facts.graph.by_name[GENERATE], plans.scope, None)
    better = plans.best(replace(generation, pools=plans.costs.pools[GENERATE]))
    best = best_plan(facts, model, limits=LIMITS)
    assert better is not None
    assert isinstance(best, Plan)
    assert len(plans.costs.asked) == num_costed
    assert better.objective_seconds >= best.period_seconds * (1 - 1e-5)


def test_there_is_none_where_a_stage_has_no_choice_that_fits() -> None:
    facts = small_facts(ranks_per_node=4, batch_size=4, memory_bytes=2**10)
    model = RandomModel(0, 2**27)
    assert first_plans(facts, model).best() is None
