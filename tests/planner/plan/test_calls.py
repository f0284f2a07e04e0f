"""A choice becomes a question about the role's model, with what the bound on staleness leaves."""

from __future__ import annotations

import pytest

from meshwright.planner.plan.cost_queries import Choice, query_for_choice, query_for_placement
from meshwright.planner.plan.steps_ahead import steps_ahead_patterns
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Schedule
from tests.planner.jobs import mixed_facts, small_facts
from tests.planner.plans import random_plan
from tests.seeds import seeds


@seeds(2, all=6)
def test_a_placement_asks_for_its_layout_and_schedule_with_its_roles_model(seed: int) -> None:
    plan = random_plan(seed)
    for placement in plan.placements:
        call = query_for_placement(plan, placement)
        assert (call.stage.name, call.layout, call.schedule) == (placement.stage, placement.layout, placement.schedule)
        assert call.model == plan.facts.models.spec(plan.stage(placement.stage).role)


def test_only_an_overcommitted_generation_is_told_how_long_it_may_defer() -> None:
    facts, stage = small_facts(), PPO_GRAPH.by_name["actor_generate"]
    plain, more = (Choice(Layout(), Schedule(generation_slots=4, overcommit=extra)) for extra in (0, 8))
    assert query_for_choice(facts, stage, plain, deferral=2).max_deferral == 0
    assert query_for_choice(facts, stage, more, deferral=2).max_deferral == 2


@pytest.mark.parametrize("ahead", steps_ahead_patterns(PPO_GRAPH, 2), ids=str)
def test_steps_that_a_generation_works_ahead_are_no_longer_left_for_deferral(ahead: dict[str, int]) -> None:
    deferring = (random_plan(seed, ahead=ahead, deferral=2) for seed in range(100))
    plan = next(p for p in deferring if p.placement("actor_generate").schedule.overcommit)
    assert query_for_placement(plan, plan.placement("actor_generate")).max_deferral == 2


def test_only_generation_computes_keys_and_values_anew() -> None:
    facts = small_facts().model_copy(update={"cache_after_refit": "recompute"})
    choice = Choice(Layout(), Schedule(generation_slots=4))
    found = {
        stage.name for stage in PPO_GRAPH.stages if query_for_choice(facts, stage, choice, deferral=0).recomputes_cache
    }
    assert found == {"actor_generate"}


@seeds(2, all=4)
def test_a_placement_asks_for_the_part_that_its_ranks_are_in(seed: int) -> None:
    plan = random_plan(seed, mixed_facts(memory_bytes=(2**50, 2**50)))
    for placement in plan.placements:
        pool = plan.pool(placement.pool)
        of_one_kind = 0 if pool.first_rank < 2 else 1
        assert query_for_placement(plan, placement).part == (2 if pool.num_ranks == 4 else of_one_kind)
