"""Assembling: of trainings that could go in either order, the one whose weights another pool takes goes first."""

from __future__ import annotations

import pytest

from meshwright.planner.plan.steps_ahead import patterns
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import STAGES
from tests.planner.jobs import small_facts
from tests.runtime.plans_by_hand import Where, plan_by_hand

CRITIC_FIRST = [*(stage.name for stage in STAGES if not stage.trains), "critic_train", "actor_train"]


@pytest.mark.parametrize(("generates_on", "first"), [("0:1", "actor_train"), ("0:2", "critic_train")])
def test_weights_that_a_pool_apart_takes_are_trained_first(generates_on: str, first: str) -> None:
    facts = small_facts(memory_bytes=2**50).model_copy(update={"staleness": 1})
    layout = "tp1" if generates_on == "0:1" else "dp2"
    generation = Where(generates_on, layout, Schedule(generation_slots=4))
    plan = plan_by_hand(facts, {"actor_generate": generation, "other": Where("1:1")}, patterns(1)[1], CRITIC_FIRST)
    starts = {name: plan.placement(name).start_seconds for name in ("actor_train", "critic_train")}
    assert min(starts, key=starts.__getitem__) == first
    assert max(starts.values()) == plan.placement(first).end_seconds
