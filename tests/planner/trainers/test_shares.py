"""Numbers of a plan in the units of other trainers."""

from __future__ import annotations

import math
from dataclasses import replace

from meshwright.planner.job.whatif_settings import with_setting
from meshwright.planner.plan.plan import Plan
from meshwright.planner.trainers.export_settings import (
    engine_memory_share,
    mini_batch,
    pool_nodes,
    token_budget,
    token_budget_origin,
    uneven_stage_layers,
)
from meshwright.planner.trainers.megatron_rows import degree_rows
from meshwright.planner.trainers.table import read_field, write_table
from meshwright.planner.trainers.trainer import ExportInput
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Schedule
from tests.planner.drawn import model_of
from tests.planner.jobs import mixture_facts, small_facts
from tests.planner.plans import random_plan


def plan_on(nodes: int, ranks_per_node: int) -> Plan:
    facts = small_facts(nodes=nodes, ranks_per_node=ranks_per_node, memory_bytes=2**34, num_minibatches=4)
    return random_plan(0, facts, model_of(facts))


def test_machines_are_whole_nodes_or_a_part_of_one() -> None:
    for plan in (plan_on(1, 8), plan_on(4, 2)):
        for placement in plan.placements:
            nodes, per_node = pool_nodes(plan, placement.stage)
            assert nodes * per_node == plan.pool_of(placement.stage).num_ranks
            assert per_node <= plan.facts.cluster.ranks_per_node


def test_a_token_budget_holds_the_longest_sequence_and_the_rows() -> None:
    plan = plan_on(1, 4)
    placements = tuple(
        replacement.model_copy(update={"schedule": Schedule(micro_batch_size=4), "layout": replace(replacement.layout)})
        if replacement.stage == "ref_logprob"
        else replacement
        for replacement in plan.placements
    )
    four = plan.model_copy(update={"placements": placements})
    cp = four.placement("ref_logprob").layout.cp
    assert token_budget(four, "ref_logprob") == 4 * plan.facts.workload.max_tokens / cp
    assert mini_batch(four) == 4


def test_ranks_that_have_a_sequence_together_have_a_part_of_the_budget_each() -> None:
    plan = plan_on(1, 4)
    budgets = []
    for cp in (1, 2, 4):
        update = {"schedule": Schedule(micro_batch_size=1), "layout": Layout(cp=cp)}
        cut = tuple(p.model_copy(update=update) if p.stage == "ref_logprob" else p for p in plan.placements)
        budgets.append(token_budget(plan.model_copy(update={"placements": cut}), "ref_logprob"))
    assert budgets == [math.ceil(plan.facts.workload.max_tokens / cp) for cp in (1, 2, 4)]


def test_ranks_that_have_a_cap_together_have_a_part_of_it_each() -> None:
    plan = plan_on(1, 4)
    update = {"schedule": Schedule(micro_batch_size=0, micro_batch_tokens=1001), "layout": Layout(cp=2)}
    cut = tuple(p.model_copy(update=update) if p.stage == "ref_logprob" else p for p in plan.placements)
    assert token_budget(plan.model_copy(update={"placements": cut}), "ref_logprob") == 501


def test_degrees_of_experts_are_those_of_megatron() -> None:
    plan = plan_on(1, 4)
    facts = mixture_facts(plan.facts)
    for layout, sizes in ((Layout(tp=2, dp=2, ep=4, etp=1, sp=True), (4, 1)), (Layout(tp=2, dp=2, ep=2), (2, 2))):
        placements = tuple(one.model_copy(update={"layout": layout}) for one in plan.placements)
        mixture = plan.model_copy(update={"facts": facts, "placements": placements})
        rows = degree_rows("actor_train", "actor", read_field)
        found = {one.key: one.value for one in write_table(rows, ExportInput(plan=mixture))}
        assert (found["actor.expert_model_parallel_size"], found["actor.expert_tensor_parallel_size"]) == sizes


def test_an_engine_has_a_share_of_the_device_between_a_tenth_and_nearly_all() -> None:
    assert 0.1 <= engine_memory_share(plan_on(1, 4)) <= 0.95


def test_even_stages_have_no_ends_of_their_own() -> None:
    plan = plan_on(1, 4)
    assert all(uneven_stage_layers(plan, placement.stage) is None for placement in plan.placements)


def test_the_ends_of_uneven_stages_are_those_of_the_plan() -> None:
    plan = plan_on(1, 4)
    facts = with_setting(plan.facts, {"models.actor.num_layers": 7})
    train = plan.placement("actor_train").model_copy(update={"layout": Layout(pp=4)})
    others = (one for one in plan.placements if one.stage != "actor_train")
    deeper = plan.model_copy(update={"facts": facts, "placements": (*others, train)})
    assert uneven_stage_layers(deeper, "actor_train") == (2, 1)


def test_a_cap_of_tokens_is_the_budget() -> None:
    plan = plan_on(1, 4)
    stage = "ref_logprob"
    capped = plan.placement(stage).model_copy(update={"schedule": Schedule(micro_batch_size=0, micro_batch_tokens=200)})
    others = tuple(one for one in plan.placements if one.stage != stage)
    found = plan.model_copy(update={"placements": (*others, capped)})
    assert token_budget(found, stage) == 200
    assert token_budget_origin(found, stage) == "placements.ref_logprob.schedule.micro_batch_tokens"
    assert token_budget_origin(plan, stage) == "placements.ref_logprob.schedule.micro_batch_size"
