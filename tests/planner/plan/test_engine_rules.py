"""Replicas and schedules of vLLM on CPUs, where `run` starts it; elsewhere it follows the rules of all engines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.planner.job.job import Facts
from meshwright.planner.plan.engine_rules import MAX_PROCESSES
from meshwright.planner.plan.layout_and_schedule_rules import layout_rules, schedule_rules
from meshwright.planner.plan.steps_ahead import search_cases, steps_ahead_patterns
from meshwright.planner.search.legal_choices import legal_choices
from meshwright.profiles.environment.turns import ToolTurns
from meshwright.profiles.experts import Experts
from meshwright.profiles.frameworks import VLLM
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Schedule, WhileWaiting
from meshwright.profiles.stages import GENERATE
from tests.planner.jobs import quantised_facts, small_facts

TURNS = ToolTurns.model_validate({"number": {"max": 2, "fixed": 2}, "result": {"max": 4, "fixed": 2}, "max_tokens": 24})


def vllm_facts(*, turns: bool = False, ranks_per_node: int = 2, **changes: Any) -> Facts:
    facts = small_facts(ranks_per_node=ranks_per_node, num_heads=16)
    workload = facts.workload.model_copy(update={"turns": TURNS if turns else None})
    return facts.model_copy(update={"engine": VLLM, "workload": workload, **changes})


def offered(facts: Facts) -> set[tuple[Layout, Schedule]]:
    """Every choice that a search has for generation."""
    stage = facts.graph.by_name[GENERATE]
    return {
        (choice.layout, choice.schedule)
        for ahead in steps_ahead_patterns(facts.graph, facts.staleness)
        for case in search_cases(ahead, facts.staleness)
        for size in range(1, facts.cluster.num_ranks + 1)
        for choice in legal_choices(facts, stage, size, (), search_case=case)
    }


def test_a_search_has_layouts_whose_processes_have_all_layers() -> None:
    found = {layout for layout, _ in offered(vllm_facts())}
    assert found == {Layout(), Layout(dp=2), Layout(tp=2)}


def test_a_search_has_layouts_whose_processes_have_a_shard_of_every_expert() -> None:
    facts = vllm_facts()
    mixed = replace(facts.models.actor, experts=Experts(num_experts=4, experts_per_token=2, ffn_size=96))
    facts = facts.model_copy(update={"models": facts.models.model_copy(update={"actor": mixed})})
    ours = facts.model_copy(update={"engine": "meshwright-eager"})
    assert {layout for layout, _ in offered(facts)} == {Layout(), Layout(dp=2), Layout(tp=2)}
    assert any(layout.ep > 1 for layout, _ in offered(ours))


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        (Layout(pp=2), "pp=2 shards layers, and each process of vllm has all of them on a CPU; use pp=1."),
        (
            Layout(dp=2, ep=2),
            "ep=2 distributes experts, and each process of vllm has a shard of every expert; use ep=1.",
        ),
        (Layout(tp=16), f"tp=16 is more than the {MAX_PROCESSES} processes of a vllm on CPUs; use tp=8."),
    ],
)
def test_other_layouts_are_refused(layout: Layout, sentence: str) -> None:
    facts = vllm_facts(ranks_per_node=16)
    assert sentence in layout_rules(facts, facts.graph.by_name[GENERATE], layout)
    assert sentence not in layout_rules(facts, facts.graph.by_name["actor_train"], layout)
    ours = facts.model_copy(update={"engine": "meshwright-eager"})
    assert sentence not in layout_rules(ours, facts.graph.by_name[GENERATE], layout)


@pytest.mark.parametrize(
    ("changes", "schedule", "sentence"),
    [
        (
            {"staleness": 2},
            {"batches_in_flight": 2},
            "batches_in_flight=2 with engine vllm, which recomputes what sequences in flight have cached; give "
            "cache_after_refit: recompute, or use 1.",
        ),
        (
            {"staleness": 2},
            {"overcommit": 4},
            "overcommit=4 with engine vllm, which recomputes what sequences in flight have cached; give "
            "cache_after_refit: recompute, or use 0.",
        ),
        (
            {"turns": True},
            {"while_waiting": WhileWaiting.KEEP},
            "while_waiting=keep with engine vllm, where a sequence that waits gives up its slot; use leave.",
        ),
    ],
)
def test_schedules_that_it_does_not_follow_are_refused_and_not_offered(
    changes: dict[str, Any], schedule: dict[str, Any], sentence: str
) -> None:
    facts = vllm_facts(**changes)
    [field] = schedule
    refused = Schedule(generation_slots=4, **schedule)
    assert sentence in schedule_rules(facts, facts.graph.by_name[GENERATE], Layout(dp=2), refused)
    assert schedule[field] not in {getattr(one, field) for _, one in offered(facts)}
    ours = facts.model_copy(update={"engine": "meshwright-eager"})
    assert schedule[field] in {getattr(one, field) for _, one in offered(ours)}


def test_sequences_may_stay_in_flight_where_their_cache_is_computed_again() -> None:
    found = offered(vllm_facts(staleness=2, cache_after_refit="recompute"))
    assert {schedule.batches_in_flight for _, schedule in found} == {1, 2}
    assert {schedule.overcommit for _, schedule in found} > {0}


def test_rollouts_between_two_turns_have_nothing_cached_that_an_engine_would_drop() -> None:
    facts = vllm_facts(turns=True, staleness=2)
    assert {schedule.batches_in_flight for _, schedule in offered(facts)} == {1, 2}


def test_stages_may_read_responses_in_chunks() -> None:
    facts = vllm_facts()
    for name in facts.graph.streaming:
        stage = facts.graph.by_name[name]
        assert not schedule_rules(facts, stage, Layout(), Schedule(micro_batch_size=1, chunk_tokens=128))


def test_on_gpus_it_generates_for_other_trainers_with_any_layout() -> None:
    facts = quantised_facts().model_copy(update={"engine": VLLM})
    stage = facts.graph.by_name[GENERATE]
    assert facts.cluster.kind == "cuda"
    assert any(choice.layout.pp > 1 for choice in legal_choices(facts, stage, 2, ()))
