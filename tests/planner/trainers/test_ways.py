"""Ways of a trainer: parts cover the cluster, and a plan breaks what it says otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.planner.job.whatif_settings import with_setting
from meshwright.planner.plan.pins import Ranks
from meshwright.planner.plan.pool_rules import pool_violations
from meshwright.planner.trainers.deployment_modes import DeploymentMode, EqualChoice, no_overlap, pool_divisions
from meshwright.profiles.stages import GENERATE
from tests.planner.jobs import critic_free_facts, mixed_facts, small_facts
from tests.planner.plans import random_plan


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 4), (1, 8), (2, 4), (8, 8), (3, 8)])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_parts_are_pools_that_follow_each_other_and_have_all_ranks(
    nodes: int, ranks_per_node: int, number: int
) -> None:
    cluster = small_facts(nodes=nodes, ranks_per_node=ranks_per_node).cluster
    found = list(pool_divisions(cluster, number))
    assert len(set(found)) == len(found) > 0
    for pools in found:
        assert [rank for pool in pools for rank in pool.ranks] == list(range(cluster.num_ranks))
        assert not any(pool_violations(cluster, pool.first_rank, pool.num_ranks) for pool in pools)


def test_a_way_is_broken_by_pins_by_what_is_not_alike_and_by_working_ahead() -> None:
    plan = random_plan(0)
    pool = plan.choice("actor_train", "pool")
    assert isinstance(pool, Ranks)
    kept = DeploymentMode(
        name="kept", pins=(f"actor_train.pool={pool}",), equal_choices=(EqualChoice("actor_train", "actor_train"),)
    )
    assert list(kept.inexpressible(plan)) == []
    broken = DeploymentMode(
        name="broken",
        pins=(f"actor_train.pool!={pool}", "actor_generate.batches_in_flight=2"),
        equal_choices=(EqualChoice("critic_value", "critic_train", "pool"),),
        steps_ahead=1,
    )
    found = list(broken.inexpressible(plan))
    assert f"actor_train has pool={pool}, and the trainer requires anything but {pool}" in found
    assert "actor_generate has batches_in_flight=1, and the trainer requires 2" in found
    assert "actor_generate works 0 steps ahead, and the trainer requires 1" in found
    value, leader = (plan.choice(stage, "pool") for stage in ("critic_value", "critic_train"))
    assert value != leader
    assert f"critic_value has pool={value}, and the trainer requires that of critic_train, {leader}" in found


def test_no_trainer_deals_rows_by_speed() -> None:
    plan = random_plan(2, mixed_facts(memory_bytes=(2**50, 2**50)))
    dealt = [placement.stage for placement in plan.placements if placement.schedule.rows]
    assert dealt
    found = DeploymentMode(name="any", pins=()).inexpressible(plan)
    assert list(found) == [
        f"{name} splits rows by speed, and the trainer gives every replica equally many" for name in dealt
    ]


def test_without_overlap_nothing_streams_and_no_sequence_runs_on() -> None:
    pins = no_overlap()
    assert "actor_generate.overcommit=0" in pins
    assert "ref_logprob.chunk_tokens=0" in pins
    assert not any(pin.startswith("actor_train.") for pin in pins)


def test_of_a_job_without_a_critic_a_way_fixes_what_is_left() -> None:
    facts = critic_free_facts(has_ref=False)
    way = DeploymentMode(
        name="any",
        pins=("critic_train.vpp=1", "ref_logprob.offload=none", "actor_train.vpp=1"),
        equal_choices=(EqualChoice("critic_value", "critic_train"), EqualChoice("actor_logprob", "actor_train")),
    ).for_job(facts)
    assert way.pins == ("actor_train.vpp=1",)
    assert way.equal_choices == (EqualChoice("actor_logprob", "actor_train"),)
    assert way.ahead(facts.graph).keys() == facts.graph.by_name.keys()


def test_a_way_leaves_out_pipelines_of_which_no_key_says_how_many_layers_their_stages_hold() -> None:
    """Seven layers on 4 stages are 2, 2, 2 and 1; on 5 of the 5 ranks 1, 1, 2, 2 and 1, which nothing says."""
    facts = with_setting(small_facts(nodes=5, ranks_per_node=1), {"models.actor.num_layers": 7})
    pool = "0:5"
    way = DeploymentMode(
        name="any", pins=tuple(f"{stage}.pool={pool}" for stage in (GENERATE, "actor_train", "reward_score"))
    )
    assert way.for_job(facts).pins == (*way.pins, "actor_train.pp!=5")
    fixed_pp = replace(way, pins=(*way.pins, "actor_train.pp=1"))
    assert fixed_pp.for_job(facts).pins == fixed_pp.pins
