"""A first plan is found among a few choices, and is one of the plans that the whole search looks at."""

from __future__ import annotations

import pytest

from meshwright.planner.compile import best_plan
from meshwright.planner.plan.edges import handovers
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.steps_ahead import Scope, patterns, scopes
from meshwright.planner.search.first_plan import first_plan
from meshwright.planner.search.stage_costs import StageCosts
from meshwright.planner.solver.result import Effort, Limits
from tests.planner.jobs import RandomModel, small_facts

LIMITS = Limits(gap=0.0)


def synchronous(facts: Facts) -> Scope:
    (ahead,) = patterns(facts.graph, 0)
    (scope,) = scopes(ahead, 0)
    return scope


@pytest.mark.parametrize("seed", range(4))
def test_a_first_plan_takes_less_work_and_is_no_faster_than_the_best(seed: int) -> None:
    facts = small_facts(ranks_per_node=4, batch_size=4, memory_bytes=2**28)
    model, begun = RandomModel(seed, 2**27), list[int]()
    costs = StageCosts(facts, model, ())
    scope = synchronous(facts)
    edges = handovers(facts, model)
    first = first_plan(costs, scope=scope, edges=edges, limits=LIMITS, effort=Effort(), begun=begun.append)
    best = best_plan(facts, model, limits=LIMITS)
    assert first is not None
    assert isinstance(best, Plan)
    assert first.objective_seconds >= best.period_seconds * (1 - 1e-5)
    assert sum(one.asked.timed for one in costs.asked) < best.solver.work.timed
    assert begun


def test_there_is_none_where_a_stage_has_no_choice_that_fits() -> None:
    facts = small_facts(ranks_per_node=4, batch_size=4, memory_bytes=2**10)
    model = RandomModel(0, 2**27)
    scope = synchronous(facts)
    found = first_plan(
        StageCosts(facts, model, ()),
        scope=scope,
        edges=handovers(facts, model),
        limits=LIMITS,
        effort=Effort(),
        begun=lambda _index: None,
    )
    assert found is None
