"""The least of a refit, wherever the pools lie."""

from __future__ import annotations

import math

from meshwright.planner.plan.steps_ahead import patterns, scopes
from meshwright.planner.proof.enumeration import Enumeration
from meshwright.profiles.algorithms import PPO_GRAPH
from tests.planner.jobs import ToyModel, small_facts


def test_a_refit_takes_nothing_where_the_copy_may_be_shared_and_no_more_than_any_pools_make_it() -> None:
    facts, scope = small_facts(), scopes(patterns(PPO_GRAPH, 0)[0], 0)[0]
    found = Enumeration(facts, ToyModel(facts), math.inf).space(scope)
    trained, read = (frozenset(found.choices[name].sites) for name in ("actor_train", "actor_generate"))
    assert found.refit_seconds("actor_generate", trained, read) == 0.0
    (shared, *_), (other, *_) = trained & read, read - trained or read
    assert found.refit_seconds("actor_generate", frozenset([shared]), frozenset([shared])) == 0.0
    between = found.refit_seconds("actor_generate", frozenset(trained - {other}), frozenset([other]))
    assert between in {0.0, facts.models.actor.num_params * 2 / 1e9}
