"""The summary of a plan: its parts of the memory add up, no other layout is better, and money is GPU-hours."""

from __future__ import annotations

import pytest

from meshwright.planner.analysis.plan_summary import memory_parts, next_layouts, run_cost, summarise
from meshwright.planner.compile import compile_plan
from meshwright.planner.plan.plan import Plan
from meshwright.planner.solver.result import Limits
from meshwright.profiles.algorithms import PPO_GRAPH
from tests.planner.jobs import ToyModel, small_facts


@pytest.fixture(scope="module")
def plan() -> Plan:
    facts = small_facts(ranks_per_node=2)
    found = compile_plan(facts, ToyModel(facts), pins=("reward_score.tp=1",), limits=Limits(gap=0.0))
    assert isinstance(found, Plan)
    return found


def test_the_parts_of_the_memory_of_a_rank_add_up_to_its_peak(plan: Plan) -> None:
    for rank, peak in enumerate(plan.peak_bytes_per_rank):
        parts = memory_parts(plan, rank)
        assert sum(part.num_bytes for part in parts) == pytest.approx(peak, abs=1)
        assert [part.num_bytes for part in parts] == sorted((part.num_bytes for part in parts), reverse=True)
        assert len({part.stage for part in parts if not part.stays}) <= 1


def test_the_next_layout_of_a_stage_is_another_one_and_no_better_in_a_proven_plan(plan: Plan) -> None:
    model = ToyModel(plan.facts)
    rows = list(next_layouts(plan, model))
    assert [row.stage for row in rows] == list(PPO_GRAPH.by_name)
    for row in rows:
        assert row.layout == plan.placement(row.stage).layout
        assert row.instead != row.layout
        assert row.reason
        if row.step_seconds is not None:
            assert row.step_seconds >= -1e-9 * plan.period_seconds


def test_a_pin_on_a_degree_holds_for_the_next_layout_too(plan: Plan) -> None:
    reward = next(row for row in next_layouts(plan, ToyModel(plan.facts)) if row.stage == "reward_score")
    assert reward.instead is None or reward.instead.tp == 1


def test_a_pinned_layout_has_no_next_one() -> None:
    facts = small_facts(ranks_per_node=1)
    found = compile_plan(facts, ToyModel(facts), pins=("actor_train.layout=dp1",), limits=Limits(gap=0.5))
    assert isinstance(found, Plan)
    row = next(row for row in next_layouts(found, ToyModel(facts)) if row.stage == "actor_train")
    assert (row.instead, row.reason) == (None, "this layout is pinned")


def test_money_is_that_of_the_gpu_hours_of_the_steps(plan: Plan) -> None:
    cost = run_cost(plan, price=2.0, num_steps=10)
    assert cost.gpu_hours == pytest.approx(plan.period_seconds * 10 / 3600 * plan.facts.cluster.num_ranks)
    assert cost.money == pytest.approx(2 * cost.gpu_hours)
    assert run_cost(plan).money is None
    assert "at 2 a GPU-hour" in cost.sentence
    assert "1,000 steps" in run_cost(plan).sentence
    assert "at" not in run_cost(plan).sentence.split()


def test_the_summary_is_of_the_fullest_rank(plan: Plan) -> None:
    summary = summarise(plan, ToyModel(plan.facts), price=2.0, num_steps=10)
    assert plan.peak_bytes_per_rank[summary.rank] == max(plan.peak_bytes_per_rank)
    assert summary.memory == memory_parts(plan, summary.rank)
    assert summary.cost == run_cost(plan, 2.0, 10)
