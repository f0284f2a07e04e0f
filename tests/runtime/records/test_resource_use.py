"""What a run used: memory beside the plan's, and the moves of offloaded state."""

from __future__ import annotations

import pytest

from meshwright.profiles.schedule import Offload, Schedule
from meshwright.profiles.trace import Span
from meshwright.runtime.records.resource_use import ResourceUse
from tests.planner.jobs import small_facts
from tests.runtime.plans_by_hand import Where, plan_by_hand

AWAY = Schedule(micro_batch_size=4, offload=Offload.OPTIMIZER)
PLAN = plan_by_hand(
    small_facts(ranks_per_node=2),
    {"other": Where("0:1"), "actor_train": Where("0:2", "dp2", AWAY), "critic_train": Where("1:1")},
)


def used(*spans: Span) -> ResourceUse:
    use = ResourceUse(PLAN)
    use.add(spans)
    return use


def ran(stage: str, rank: int, step: int, **facts: float) -> Span:
    return Span(
        step=step,
        instruction=stage,
        kind="stage",
        rank=rank,
        start_seconds=0.0,
        end_seconds=1.0,
        clock="measured",
        facts=facts,
    )


def test_memory_is_that_of_the_fullest_rank_and_turn() -> None:
    spans = [ran("actor_train", 0, 0, memory_bytes=5.0), ran("actor_train", 1, 1, memory_bytes=7.0), ran("x", 0, 0)]
    (use,) = used(*spans).memory()
    assert (use.stage, use.measured_bytes) == ("actor_train", 7.0)


def test_the_plan_for_a_stage_is_what_all_keep_and_what_it_needs() -> None:
    uses = used(*(ran(p.stage, 0, 0, memory_bytes=1.0) for p in PLAN.placements)).memory()
    assert max(use.planned_bytes for use in uses) == pytest.approx(max(PLAN.peak_bytes_per_rank), abs=1)
    least = PLAN.placement("reward_score").resident.total
    assert all(use.planned_bytes > least for use in uses)


def test_moves_are_those_of_the_slowest_rank_and_the_median_turn() -> None:
    spans = [
        ran("actor_train", 0, 0, reload_seconds=9.0, offload_seconds=9.0),
        ran("actor_train", 0, 1, reload_seconds=1.0, offload_seconds=1.0),
        ran("actor_train", 1, 1, reload_seconds=1.0, offload_seconds=2.0),
        ran("actor_train", 0, 2, reload_seconds=2.0, offload_seconds=2.0),
    ]
    (row,) = used(*spans).offloads()
    assert (row.name, row.measured_seconds) == ("actor_train offload", 4.0)
    terms = {term.name: term.amount for term in PLAN.placement("actor_train").cost.terms}
    assert row.predicted_seconds == pytest.approx(terms["reload"] + terms["offload"])


def test_the_slowest_rank_decides_whichever_is_told_last() -> None:
    spans = [
        ran("actor_train", 0, 1, reload_seconds=3.0, offload_seconds=2.0),
        ran("actor_train", 1, 1, reload_seconds=1.0, offload_seconds=1.0),
    ]
    for seen in (spans, spans[::-1]):
        (row,) = used(*seen).offloads()
        assert row.measured_seconds == 5.0
