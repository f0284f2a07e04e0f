"""Which pools, layouts and schedules are legal, and what a sentence says of one that is not."""

from __future__ import annotations

import itertools

import pytest

from meshwright.planner.plan.rules import (
    first_ranks,
    host_share,
    in_flight,
    layout_rules,
    offloads,
    pool_sizes,
    pool_violations,
    rows_per_replica,
    schedule_rules,
    schedules,
    slot_counts,
    workload_violations,
)
from meshwright.planner.plan.steps_ahead import SYNCHRONOUS, Scope
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Offload, Recompute, Schedule
from meshwright.profiles.stages import STAGE_BY_NAME, STAGES, Stage
from tests.planner.jobs import mixed_facts, mixture_facts, small_facts


def test_num_minibatches_must_divide_the_batch_for_training_only() -> None:
    facts = small_facts(batch_size=10, num_minibatches=3)
    assert layout_rules(facts, STAGE_BY_NAME["reward_score"], Layout()) == ()
    assert layout_rules(facts, STAGE_BY_NAME["actor_train"], Layout())[0] == (
        "num_minibatches=3 does not divide batch_size=10; use 2."
    )


def test_pools_are_aligned_powers_of_two_and_the_whole_cluster() -> None:
    cluster = small_facts(nodes=3, ranks_per_node=2).cluster
    assert pool_sizes(cluster) == (1, 2, 4, 6)
    assert first_ranks(cluster, 2) == (0, 2, 4)
    assert first_ranks(cluster, 4) == (0,)
    assert pool_violations(cluster, 0, 6) == ()
    for first, size in itertools.product(range(7), range(1, 8)):
        legal = size in pool_sizes(cluster) and first in first_ranks(cluster, size)
        assert (pool_violations(cluster, first, size) == ()) == legal


def test_a_pool_never_straddles_nodes_that_could_hold_it() -> None:
    assert first_ranks(small_facts(nodes=2, ranks_per_node=6).cluster, 4) == (0, 8)


def test_replicas_of_spread_experts_do_not_read_while_tokens_are_generated() -> None:
    facts, stage = mixture_facts(small_facts()), STAGE_BY_NAME["ref_logprob"]
    streaming = Schedule(chunk_tokens=128)
    assert schedule_rules(facts, stage, Layout(dp=2), streaming) == ()
    assert schedule_rules(facts, stage, Layout(dp=2, ep=2), streaming) == (
        "chunk_tokens=128 lets each replica read at its own pace, and the replicas of ep=2 pass their experts "
        "together; use chunk_tokens=0.",
    )


def test_a_pool_is_of_one_kind_of_node() -> None:
    """Two ranks of each of two kinds: no pool of all four, and none that begins in the middle."""
    cluster = mixed_facts().cluster
    assert pool_sizes(cluster) == (1, 2)
    assert first_ranks(cluster, 2) == (0, 2)
    assert first_ranks(cluster, 1) == (0, 1, 2, 3)


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 6, 16])
def test_slots_are_powers_of_two_and_all_rows_with_one_for_every_pipeline_stage(rows: int, pp: int) -> None:
    counts = slot_counts(rows, pp)
    assert counts[-1] == rows
    assert all(pp <= count <= rows for count in counts) or counts == (rows,)
    assert all(count == rows or count & (count - 1) == 0 for count in counts)


def test_a_replica_has_its_batches_and_its_part_of_the_overcommit_in_flight() -> None:
    assert in_flight(Schedule(batches_in_flight=3), 4, 2) == 12
    assert in_flight(Schedule(overcommit=6), 4, 2) == 4 + 3


def test_training_takes_a_minibatch_at_once_and_other_stages_the_batch() -> None:
    facts = small_facts(batch_size=16, num_minibatches=2)
    assert rows_per_replica(facts, STAGE_BY_NAME["actor_train"], Layout(dp=4)) == 2
    assert rows_per_replica(facts, STAGE_BY_NAME["ref_logprob"], Layout(dp=4)) == 4
    assert workload_violations(facts) == ()


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_what_waits_on_the_host_is_an_optimizer_or_a_copy_that_nobody_trains(stage: Stage) -> None:
    state = Offload.OPTIMIZER if stage.trains else Offload.WEIGHTS
    assert offloads(stage) == (
        (Offload.NONE,) if stage.role in ("actor", "critic") and not stage.trains else (Offload.NONE, state)
    )


def test_the_hosts_memory_is_shared_by_its_ranks_and_by_the_stages_that_can_offload() -> None:
    cluster = small_facts().cluster
    assert isinstance(cluster, Cluster)
    assert host_share(cluster) == cluster.host_memory_bytes / 4 / 4


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
@pytest.mark.parametrize("offload", [False, True])
def test_every_schedule_that_is_offered_breaks_no_rule(stage: Stage, offload: bool) -> None:
    facts = small_facts(batch_size=12, response=400).model_copy(update={"staleness": 2})
    scope = Scope(ahead=SYNCHRONOUS, offload=offload, runs_on=offload)
    for tp, pp, dp in itertools.product((1, 2), repeat=3):
        layout = Layout(tp=tp, pp=pp, dp=dp)
        if layout.num_ranks < 4:
            found = schedules(facts, stage, layout, scope)
            assert len(set(found)) == len(found)
            assert all(schedule_rules(facts, stage, layout, schedule) == () for schedule in found)


@pytest.mark.parametrize(
    ("stage", "layout", "says"),
    [
        ("actor_train", "tp2,pp1,dp3", "dp=3 does not divide the 16 sequences of a minibatch; use dp=2."),
        ("ref_logprob", "pp2,vpp2", "vpp=2 on a stage that does not train; use vpp=1."),
        ("actor_generate", "tp2,sp", "sp is on, and a single new token cannot be divided along the sequence"),
        ("actor_generate", "cp2", "cp=2 cuts sequences, and generation draws one token after the other; use cp=1."),
        ("ref_logprob", "cp2", "cp=2 leaves 96 of the 192 tokens of the longest sequence to a rank, fewer than 2048"),
    ],
)
def test_an_illegal_layout_names_the_value_the_rule_and_the_way_out(stage: str, layout: str, says: str) -> None:
    assert says in " ".join(layout_rules(small_facts(), STAGE_BY_NAME[stage], Layout.parse(layout)))


@pytest.mark.parametrize(
    ("stage", "schedule", "says"),
    [
        ("ref_logprob", Schedule(micro_batch_size=3), "micro_batch_size=3 does not divide the 16 sequences of a"),
        ("ref_logprob", Schedule(recompute=Recompute.FULL), "recompute=full on a stage that does not train; use none."),
        ("actor_logprob", Schedule(offload=Offload.WEIGHTS), "offload=weights is not for this stage; use none."),
        ("actor_train", Schedule(chunk_tokens=64), "chunk_tokens=64 is only for reward_score, ref_logprob, critic_"),
        ("ref_logprob", Schedule(generation_slots=2), "generation_slots=2 on a stage that does not generate; use 0."),
        ("actor_generate", Schedule(generation_slots=5), "generation_slots=5 is not a power of two between pp=1 and"),
        ("actor_generate", Schedule(overcommit=17), "overcommit=17 is not a multiple of dp=1 up to the batch of 16"),
    ],
)
def test_an_illegal_schedule_names_the_value_the_rule_and_the_way_out(
    stage: str, schedule: Schedule, says: str
) -> None:
    assert says in " ".join(schedule_rules(small_facts(), STAGE_BY_NAME[stage], Layout(), schedule))


def test_generation_has_no_micro_batches() -> None:
    facts, stage = small_facts(), STAGE_BY_NAME["actor_generate"]
    schedule = Schedule(micro_batch_size=2, generation_slots=16)
    assert schedule_rules(facts, stage, Layout(), schedule) == (
        "micro_batch_size=2 on a stage that generates, slot by slot; use 1.",
    )
