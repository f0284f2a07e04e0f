"""The least of a refit, wherever the pools lie."""

from __future__ import annotations

import math
from dataclasses import replace

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.protocol import RefitQuery
from meshwright.planner.plan.steps_ahead import search_cases, steps_ahead_patterns
from meshwright.planner.proof.space import Enumeration, Refits, Site
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.layout import Layout
from tests.planner.jobs import ToyModel, small_facts


def test_a_refit_takes_nothing_where_the_copy_may_be_shared_and_no_more_than_any_pools_make_it() -> None:
    facts, scope = small_facts(), search_cases(steps_ahead_patterns(PPO_GRAPH, 0)[0], 0)[0]
    found = Enumeration(facts, ToyModel(facts), math.inf).space(scope)
    trained, read = (frozenset(found.choices[name].sites) for name in ("actor_train", "actor_generate"))
    assert found.refit_seconds("actor_generate", trained, read) == 0.0
    (shared, *_), (other, *_) = trained & read, read - trained or read
    assert found.refit_seconds("actor_generate", frozenset([shared]), frozenset([shared])) == 0.0
    between = found.refit_seconds("actor_generate", frozenset(trained - {other}), frozenset([other]))
    assert between in {0.0, facts.models.actor.num_params * 2 / 1e9}


def test_a_refit_that_must_copy_takes_the_least_of_pools_that_are_apart_and_of_one_within_the_other() -> None:
    """Ranks that have their part already copy it sooner than others send it."""
    facts, site = small_facts(), Site(0, Layout())
    model, stage = AnalyticModel(facts.cluster, facts.workload, facts.precision), PPO_GRAPH.by_name["actor_generate"]
    move = RefitQuery(model=facts.models.actor, source=site.layout, target=site.layout, overlap=0, generates=True)
    apart, nested = (model.refit_seconds(replace(move, overlap=overlap)).total for overlap in (0, 1))
    assert nested < apart
    assert Refits(facts, model)._least(stage, site, site) == nested
