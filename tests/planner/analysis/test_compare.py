"""Predicted beside measured: which of many times of a stage is told."""

from __future__ import annotations

import pytest

from meshwright.planner.analysis.trace_analysis import compare, step_ends, step_seconds
from meshwright.planner.compile import compile_plan
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.steps_ahead import StepsAhead, steps_ahead_patterns
from meshwright.planner.simulation.simulate import simulate
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.trace import Span
from tests.planner.jobs import ToyModel, small_facts
from tests.planner.plans import random_plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    facts = small_facts(ranks_per_node=2)
    found = compile_plan(facts, ToyModel(facts), pins=("actor_generate.layout=dp2", "actor_train.pool=0:1"))
    assert isinstance(found, Plan)
    return found


def span(step: int, name: str, rank: int, seconds: float, kind: str = "stage") -> Span:
    return Span(
        step=step,
        instruction=name,
        kind=kind,
        rank=rank,
        start_seconds=10.0 * step,
        end_seconds=10.0 * step + seconds,
        clock="measured",
    )


def test_a_stage_is_measured_by_its_slowest_replica_and_the_median_step_after_the_first(plan: Plan) -> None:
    spans = [span(0, "actor_generate", 0, 9.0)]
    for step, seconds in ((1, 2.0), (2, 4.0), (3, 3.0)):
        spans += [span(step, "actor_generate", 0, seconds), span(step, "actor_generate", 1, seconds / 2)]
    rows = {row.name: row for row in compare(plan, spans, {0: 20.0, 1: 5.0, 2: 7.0, 3: 6.0})}
    assert rows["actor_generate"].measured_seconds == 3.0
    assert rows["actor_generate"].predicted_seconds == plan.placement("actor_generate").cost.total
    assert rows["step"].measured_seconds == 6.0
    assert rows["step"].predicted_seconds == plan.period_seconds


def test_refits_of_a_step_are_added_up_without_waiting_for_the_rank_that_comes_last(plan: Plan) -> None:
    spans = [span(1, name, rank, 1.0 + rank, "refit") for name in ("refit a", "refit b") for rank in (0, 1)]
    rows = {row.name: row for row in compare(plan, spans, {0: 1.0, 1: 1.0})}
    assert rows["refit"].measured_seconds == 2.0


def test_the_error_of_a_comparison_is_relative_to_what_was_measured(plan: Plan) -> None:
    row = compare(plan, [span(0, "actor_train", 0, 2.0)], {0: plan.period_seconds / 1.5})[-1]
    assert row.error == pytest.approx(0.5)


def test_a_step_lasts_from_the_end_of_the_one_before_without_what_comes_between() -> None:
    spans = [span(0, "evaluate", 0, 5.0, "evaluate"), *(span(n, "actor_train", n % 2, 3.0) for n in (1, 2, 4))]
    assert step_ends(PPO_GRAPH, spans) == {1: 13.0, 2: 23.0, 4: 43.0}
    assert step_seconds(PPO_GRAPH, spans) == {1: 3.0, 2: 10.0, 4: 20.0}
    saved = Span(**{**vars(span(2, "checkpoint", 0, 4.0, "checkpoint")), "start_seconds": 15.0, "end_seconds": 19.0})
    assert step_seconds(PPO_GRAPH, [*spans, saved, saved]) == {1: 3.0, 2: 6.0, 4: 20.0}


def test_the_training_of_a_step_ends_with_its_last_rank_whichever_is_told_last() -> None:
    spans = [span(1, "actor_train", 0, 3.0), span(1, "critic_train", 1, 5.0), span(1, "actor_train", 1, 2.0)]
    assert step_ends(PPO_GRAPH, spans) == step_ends(PPO_GRAPH, spans[::-1]) == {1: 15.0}


def test_a_simulated_plan_is_compared_with_its_own_period() -> None:
    plan = random_plan(2)
    spans = simulate(plan, steps=4, traced=True).spans
    for row in compare(plan, spans, step_seconds(PPO_GRAPH, spans)):
        assert row.measured_seconds == pytest.approx(row.predicted_seconds, rel=1e-9)


@pytest.mark.parametrize("ahead", steps_ahead_patterns(PPO_GRAPH, 2), ids=str)
def test_stages_that_work_ahead_of_the_first_turn_and_beyond_the_last_count_no_step_as_empty(ahead: StepsAhead) -> None:
    plan = random_plan(2, ahead=ahead)
    spans = simulate(plan, steps=6, traced=True).spans
    assert len(step_ends(PPO_GRAPH, spans)) == 6
    rows = {row.name: row for row in compare(plan, spans, step_seconds(PPO_GRAPH, spans))}
    for placement in plan.placements:
        assert rows[placement.stage].measured_seconds == pytest.approx(placement.cost.total, rel=1e-9)
