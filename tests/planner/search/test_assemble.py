"""A plan is assembled of what was picked: every copy apart is refit, and weights that a pool apart takes go first."""

from __future__ import annotations

import pytest

from meshwright.planner.plan.steps_ahead import steps_ahead_patterns
from meshwright.planner.search.assemble import copies_to_refit, weight_move
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.schedule import Schedule
from tests.planner.jobs import small_facts
from tests.planner.plans import random_plan
from tests.runtime.plans_by_hand import Where, plan_by_hand
from tests.seeds import seeds

CRITIC_FIRST = [*(stage.name for stage in PPO_GRAPH.stages if not stage.trains), "critic_train", "actor_train"]


@pytest.mark.parametrize(("generates_on", "first"), [("0:1", "actor_train"), ("0:2", "critic_train")])
def test_weights_that_a_pool_apart_takes_are_trained_first(generates_on: str, first: str) -> None:
    facts = small_facts(memory_bytes=2**50).model_copy(update={"staleness": 1})
    layout = "tp1" if generates_on == "0:1" else "dp2"
    generation = Where(generates_on, layout, Schedule(generation_slots=4))
    plan = plan_by_hand(
        facts,
        {"actor_generate": generation, "other": Where("1:1")},
        steps_ahead_patterns(PPO_GRAPH, 1)[1],
        CRITIC_FIRST,
    )
    starts = {name: plan.placement(name).start_seconds for name in ("actor_train", "critic_train")}
    assert min(starts, key=starts.__getitem__) == first
    assert max(starts.values()) == plan.placement(first).end_seconds


@seeds(4, all=20)
def test_every_copy_of_a_trained_role_that_lies_apart_is_refit_from_the_training(seed: int) -> None:
    plan = random_plan(seed)
    targets = copies_to_refit(plan)
    assert {refit.target for refit in plan.refits} == set(targets)
    for name in targets:
        trained = PPO_GRAPH.trainer_of(name)
        assert plan.copy_of(name) == name != trained
        move = weight_move(plan, trained, name)
        assert (move.source, move.target) == (plan.placement(trained).layout, plan.placement(name).layout)
        assert move.overlap == len(set(plan.pool_of(trained).ranks) & set(plan.pool_of(name).ranks))
