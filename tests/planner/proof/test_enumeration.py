"""The checker enumerates for itself what a stage may choose: as much as the search has, and at the same price."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from meshwright.cost_models.blended import cost_model
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.steps_ahead import patterns, scopes
from meshwright.planner.proof.cases import Case
from meshwright.planner.proof.enumeration import AMOUNTS, Enumeration
from meshwright.planner.search.frontier import frontier, kinds_of
from meshwright.planner.search.space import choices
from meshwright.profiles.algorithms import PPO_GRAPH
from tests.planner.jobs import ToyModel, mixed_facts, mixture_facts, small_facts
from tests.planner.plans import long_facts

JOBS = {
    "small": small_facts(),
    "experts": mixture_facts(small_facts()),
    "long": long_facts(),
    "two kinds": mixed_facts(),
    "three nodes": small_facts(nodes=3, ranks_per_node=2, batch_size=12),
}


def enumeration(facts: Facts, most_seconds: float = math.inf) -> Enumeration:
    return Enumeration(facts, cost_model(facts.cluster, facts.workload, facts.precision), most_seconds)


@pytest.mark.parametrize("name", JOBS)
def test_as_many_choices_are_legal_as_the_search_finds(name: str) -> None:
    roomy = {"memory_bytes": 2**50}
    facts = JOBS[name].model_copy(update={"staleness": 1})
    device = facts.cluster.parts[0].device.model_copy(update=roomy)
    if len(facts.cluster.parts) == 1:
        facts = facts.model_copy(update={"cluster": facts.cluster.model_copy(update={"device": device})})
    every = enumeration(facts)
    for scope in (scope for ahead in patterns(PPO_GRAPH, 1) for scope in scopes(ahead, 1)):
        found = every.space(scope)
        for stage in PPO_GRAPH.stages:
            legal = sum(
                sum(1 for _ in choices(facts, stage, kind.num_ranks, (), part=kind.part, scope=scope))
                for kind in set(kinds_of(facts, stage, ()).values())
            )
            assert len(found.choices[stage.name].site) == legal, (scope, stage.name)


@pytest.mark.parametrize("name", JOBS)
def test_what_the_search_keeps_is_there_and_costs_as_much(name: str) -> None:
    facts = JOBS[name]
    every = enumeration(facts)
    scope = scopes(patterns(PPO_GRAPH, 0)[0], 0)[0]
    found = every.space(scope)
    for stage in PPO_GRAPH.stages:
        amounts = found.choices[stage.name].amounts
        for kind, kept in frontier(facts, every.model, stage, (), scope=scope).candidates.items():
            for candidate in kept:
                peak = amounts[[AMOUNTS.index(name) for name in ("own", "weights", "transient")]].sum(axis=0)
                same = (
                    np.isclose(peak, candidate.peak_bytes)
                    & (amounts[AMOUNTS.index("seconds")] == candidate.seconds)
                    & (amounts[AMOUNTS.index("ranks")] == kind.num_ranks)
                )
                assert same.any(), (stage.name, candidate.layout, candidate.schedule)


def test_a_refit_takes_nothing_where_the_copy_may_be_shared_and_no_more_than_any_pools_make_it() -> None:
    facts, scope = small_facts(), scopes(patterns(PPO_GRAPH, 0)[0], 0)[0]
    found = Enumeration(facts, ToyModel(facts), math.inf).space(scope)
    trained, read = (frozenset(found.choices[name].sites) for name in ("actor_train", "actor_generate"))
    assert found.refit_seconds("actor_generate", trained, read) == 0.0
    (shared, *_), (other, *_) = trained & read, read - trained or read
    assert found.refit_seconds("actor_generate", frozenset([shared]), frozenset([shared])) == 0.0
    between = found.refit_seconds("actor_generate", frozenset(trained - {other}), frozenset([other]))
    assert between in {0.0, facts.models.actor.num_params * 2 / 1e9}


@pytest.mark.parametrize("name", ["small", "long", "two kinds"])
def test_what_is_left_out_of_a_turn_makes_every_plan_longer(name: str) -> None:
    facts = JOBS[name]
    scope = scopes(patterns(PPO_GRAPH, 0)[0], 0)[0]
    every = enumeration(facts).space(scope)
    whole = Case.whole(every)
    most = 1.5 * whole.least_seconds()
    left = enumeration(facts, most).space(scope)
    for stage in PPO_GRAPH.names:
        kept = {tuple(amounts) for amounts in left.choices[stage].amounts.T}
        dropped = [n for n, amounts in enumerate(every.choices[stage].amounts.T) if tuple(amounts) not in kept]
        case = replace(whole, left={**whole.left, stage: every.choices[stage].some(np.array(dropped, dtype=np.int64))})
        assert case.is_empty or case.least_seconds() >= most * (1 - 1e-9), stage
    assert sum(len(c.site) for c in left.choices.values()) < sum(len(c.site) for c in every.choices.values())
