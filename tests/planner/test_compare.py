"""Predicted beside measured: which of many times of a stage is told."""

from __future__ import annotations

import pytest

from meshwright.planner.compare import compare
from meshwright.planner.compile import compile_plan
from meshwright.planner.plan import Plan
from meshwright.profiles.trace import Span
from tests.planner.jobs import ToyModel, small_facts


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


def test_a_stage_is_measured_by_its_slowest_rank_and_the_median_step_after_the_first(plan: Plan) -> None:
    spans = [span(0, "actor_generate", 0, 9.0)]
    for step, seconds in ((1, 2.0), (2, 4.0), (3, 3.0)):
        spans += [span(step, "actor_generate", 0, seconds), span(step, "actor_generate", 1, seconds / 2)]
    rows = {row.name: row for row in compare(plan, spans, {0: 20.0, 1: 5.0, 2: 7.0, 3: 6.0})}
    assert rows["actor_generate"].measured_seconds == 3.0
    assert rows["actor_generate"].predicted_seconds == plan.placement("actor_generate").cost.total
    assert rows["step"].measured_seconds == 6.0
    assert rows["step"].predicted_seconds == plan.period_seconds


def test_refits_of_a_step_are_added_up_on_the_slowest_rank(plan: Plan) -> None:
    spans = [span(1, name, rank, 1.0 + rank, "refit") for name in ("refit a", "refit b") for rank in (0, 1)]
    rows = {row.name: row for row in compare(plan, spans, {0: 1.0, 1: 1.0})}
    assert rows["refit"].measured_seconds == 4.0


def test_the_error_of_a_comparison_is_relative_to_what_was_measured(plan: Plan) -> None:
    row = compare(plan, [span(0, "actor_train", 0, 2.0)], {0: plan.period_seconds / 1.5})[-1]
    assert row.error == pytest.approx(0.5)
