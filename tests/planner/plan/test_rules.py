"""Which pools, layouts and schedules are legal, and what a sentence says of one that is not."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.planner.job.job import read_job, resolve
from meshwright.planner.plan.cost_queries import Choice, query_for_choice
from meshwright.planner.plan.layout_and_schedule_rules import (
    host_bytes_for_stage,
    in_flight,
    layout_rules,
    offloads,
    rows_per_replica,
    schedule_rules,
    schedules,
    slot_counts,
    workload_violations,
)
from meshwright.planner.plan.micro_batch_rules import ExtraChoices
from meshwright.planner.plan.steps_ahead import SearchCase, synchronous
from meshwright.planner.search.legal_choices import legal_choices
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Offload, Recompute, Schedule
from meshwright.profiles.stages import Stage
from tests.planner.jobs import mixture_facts, quantised_facts, small_facts

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_num_minibatches_must_divide_the_batch_for_training_only() -> None:
    facts = small_facts(batch_size=10, num_minibatches=3)
    assert layout_rules(facts, PPO_GRAPH.by_name["reward_score"], Layout()) == ()
    assert layout_rules(facts, PPO_GRAPH.by_name["actor_train"], Layout())[0] == (
        "num_minibatches=3 does not divide batch_size=10; use 2."
    )


def test_replicas_of_spread_experts_do_not_read_while_tokens_are_generated() -> None:
    facts, stage = mixture_facts(small_facts()), PPO_GRAPH.by_name["ref_logprob"]
    streaming = Schedule(chunk_tokens=128)
    assert schedule_rules(facts, stage, Layout(dp=2), streaming) == ()
    assert schedule_rules(facts, stage, Layout(dp=2, ep=2), streaming) == (
        "chunk_tokens=128 lets each replica read at its own pace, and the replicas of ep=2 exchange tokens in "
        "every layer; use chunk_tokens=0.",
    )


def test_replicas_of_whole_experts_each_may_read_at_their_own_pace_and_train_on_uneven_rows() -> None:
    facts, graph = mixture_facts(small_facts(batch_size=10, num_minibatches=2)), PPO_GRAPH.by_name
    streaming = Schedule(chunk_tokens=128)
    assert schedule_rules(facts, graph["ref_logprob"], Layout(tp=2, dp=1, ep=2, etp=1), streaming) == ()
    assert schedule_rules(facts, graph["ref_logprob"], Layout(tp=2, dp=2, ep=4, etp=1), streaming)
    assert layout_rules(facts, graph["actor_train"], Layout(tp=2, dp=2, ep=2, etp=1, sp=True)) == ()
    assert layout_rules(facts, graph["actor_train"], Layout(tp=2, dp=2, ep=4, etp=1, sp=True)) == (
        "ep=4 needs equally many sequences on every replica, and dp=2 does not divide the 5 of a minibatch; use ep=2.",
    )


def test_cut_experts_that_are_not_offered_are_slower_and_larger_than_whole_ones() -> None:
    """Of two jobs with fine-grained experts, and what is drawn from all choices."""
    rng, seen = random.Random(5), 0
    for name, size in (("grpo-30b-a3b-32xh100", 16), ("agents-397b-256", 64)):
        directory = EXAMPLES / name
        facts = resolve(read_job(directory / "job.yaml"), directory)
        model = AnalyticModel(facts.cluster, facts.workload, facts.precision)
        for stage in (stage for stage in facts.graph.stages if stage.name in ("actor_generate", "actor_train")):
            offered = {choice.layout for choice in legal_choices(facts, stage, size, ())}
            every = list(legal_choices(facts, stage, size, (), extra_choices=ExtraChoices(all_layouts=True)))
            cut = [one for one in every if one.layout not in offered and one.layout.fold_size == 1]
            for one in rng.sample(cut, 20):
                experts = {"ep": one.layout.ep * one.layout.tp, "etp": 1}
                whole = Choice(replace(one.layout, **experts), one.schedule)
                mine, other = (query_for_choice(facts, stage, choice, deferral=0, part=0) for choice in (one, whole))
                assert model.seconds(other).total <= model.seconds(mine).total * 1.001
                assert model.memory(other).peak_bytes <= model.memory(mine).peak_bytes
                seen += 1
    assert seen == 80


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
    assert rows_per_replica(facts, PPO_GRAPH.by_name["actor_train"], Layout(dp=4)) == 2
    assert rows_per_replica(facts, PPO_GRAPH.by_name["ref_logprob"], Layout(dp=4)) == 4
    assert workload_violations(facts) == ()


def test_of_replicas_that_do_not_divide_the_batch_the_fullest_counts() -> None:
    facts = small_facts(batch_size=16, num_minibatches=2)
    assert layout_rules(facts, PPO_GRAPH.by_name["ref_logprob"], Layout(dp=3)) == ()
    assert rows_per_replica(facts, PPO_GRAPH.by_name["ref_logprob"], Layout(dp=3)) == 6
    assert rows_per_replica(facts, PPO_GRAPH.by_name["actor_train"], Layout(dp=3)) == 3


def test_an_overcommit_is_of_equal_parts_where_rows_are_uneven() -> None:
    facts = small_facts(batch_size=64).model_copy(update={"staleness": 2})
    scope = SearchCase(ahead=synchronous(PPO_GRAPH), keeps_in_flight=True)
    for dp, extras in ((4, [8, 16, 32, 64]), (16, [16, 32, 64]), (6, [6, 12, 30, 60]), (24, [24, 48])):
        found = schedules(facts, PPO_GRAPH.by_name["actor_generate"], Layout(dp=dp), scope)
        assert sorted({schedule.overcommit for schedule in found} - {0}) == extras


@pytest.mark.parametrize("stage", PPO_GRAPH.stages, ids=lambda stage: stage.name)
def test_what_waits_on_the_host_is_an_optimizer_or_a_copy_that_nobody_trains(stage: Stage) -> None:
    state = Offload.OPTIMIZER if stage.trains else Offload.WEIGHTS
    assert offloads(stage) == (
        (Offload.NONE,) if stage.role in ("actor", "critic") and not stage.trains else (Offload.NONE, state)
    )


def test_the_hosts_memory_is_shared_by_its_ranks_and_by_the_stages_that_can_offload() -> None:
    cluster = small_facts().cluster
    assert isinstance(cluster, Cluster)
    assert host_bytes_for_stage(cluster, PPO_GRAPH) == cluster.host_memory_bytes / 4 / 4


@pytest.mark.parametrize("stage", PPO_GRAPH.stages, ids=lambda stage: stage.name)
@pytest.mark.parametrize("offload", [False, True])
def test_every_schedule_that_is_offered_breaks_no_rule(stage: Stage, offload: bool) -> None:
    facts = small_facts(batch_size=12, response=400).model_copy(update={"staleness": 2})
    scope = SearchCase(ahead=synchronous(PPO_GRAPH), offload=offload, keeps_in_flight=offload)
    for tp, pp, dp in itertools.product((1, 2), (1, 2), (1, 2, 5, 7)):
        layout = Layout(tp=tp, pp=pp, dp=dp)
        if layout.num_ranks != 4:
            found = schedules(facts, stage, layout, scope)
            assert len(set(found)) == len(found)
            assert all(schedule_rules(facts, stage, layout, schedule) == () for schedule in found)


@pytest.mark.parametrize(
    ("stage", "layout", "says"),
    [
        ("actor_train", "tp2,pp1,dp17", "dp=17 is more than the 16 sequences of a minibatch; use dp=16 at most."),
        ("ref_logprob", "dp17", "dp=17 is more than the 16 sequences of a batch; use dp=16 at most."),
        (
            "actor_train",
            "pp2,dp3,vpp2",
            "vpp=2 needs equally many sequences on every replica, and dp=3 does not divide the 16 of a minibatch; use",
        ),
        ("ref_logprob", "pp2,vpp2", "vpp=2 is only for a stage that trains; use vpp=1."),
        ("actor_generate", "tp2,sp", "sp is on, and a single new token cannot be divided along the sequence"),
        ("actor_generate", "cp2", "cp=2 shards sequences, and generation samples one token at a time; use cp=1."),
        ("ref_logprob", "cp2", "cp=2 leaves 96 of the 192 tokens of the longest sequence to a rank, fewer than 2048"),
    ],
)
def test_an_illegal_layout_names_the_value_the_rule_and_the_way_out(stage: str, layout: str, says: str) -> None:
    assert says in " ".join(layout_rules(small_facts(), PPO_GRAPH.by_name[stage], Layout.parse(layout)))


def test_a_gpu_that_multiplies_8_bit_floats_has_no_narrow_parts_of_linears() -> None:
    """A head of each rank has queries of 8 numbers."""
    facts = quantised_facts(small_facts(num_heads=8, ranks_per_node=8))
    for layout, legal in (("tp4", True), ("tp8", False)):
        sentences = layout_rules(facts, facts.graph.by_name["actor_generate"], Layout.parse(layout))
        assert (sentences == ()) is legal
        assert (
            legal
            or "a side of 24, and a GPU multiplies 8-bit floats only where sides are multiples of 16" in sentences[0]
        )
        assert layout_rules(facts, facts.graph.by_name["actor_logprob"], Layout.parse(layout)) == ()


@pytest.mark.parametrize(
    ("stage", "schedule", "says"),
    [
        ("ref_logprob", Schedule(micro_batch_size=3), "micro_batch_size=3 does not divide the 16 sequences of a"),
        (
            "ref_logprob",
            Schedule(recompute=Recompute.FULL),
            "recompute=full is only for a stage that trains; use none.",
        ),
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
    assert says in " ".join(schedule_rules(small_facts(), PPO_GRAPH.by_name[stage], Layout(), schedule))


def test_a_size_for_uneven_rows_is_told_the_sizes_that_there_are() -> None:
    says = "micro_batch_size=5 is not one of 1, 2, 3, 6, which split the 6 sequences of a replica; use 6."
    assert schedule_rules(
        small_facts(), PPO_GRAPH.by_name["ref_logprob"], Layout(dp=3), Schedule(micro_batch_size=5)
    ) == (says,)


def test_replicas_that_share_experts_train_on_as_many_sequences_each() -> None:
    facts, layout = mixture_facts(small_facts(batch_size=18)), Layout(dp=4, ep=2)
    assert layout_rules(facts, PPO_GRAPH.by_name["ref_logprob"], layout) == ()
    assert layout_rules(facts, PPO_GRAPH.by_name["actor_generate"], layout) == ()
    assert layout_rules(facts, PPO_GRAPH.by_name["actor_train"], layout) == (
        "ep=2 needs equally many sequences on every replica, and dp=4 does not divide the 18 of a minibatch; use ep=1.",
    )


def test_generation_has_no_micro_batches() -> None:
    facts, stage = small_facts(), PPO_GRAPH.by_name["actor_generate"]
    schedule = Schedule(micro_batch_size=2, generation_slots=16)
    assert schedule_rules(facts, stage, Layout(), schedule) == (
        "micro_batch_size=2 on a stage that generates slot by slot; use 1.",
    )
