"""Two plans side by side: a plan does not differ from itself, and what differs is told of each."""

from __future__ import annotations

from meshwright.planner.analysis.plan_comparison import compare_plans
from meshwright.planner.job.whatif_settings import with_setting
from tests.planner.drawn import model_of
from tests.planner.jobs import small_facts
from tests.planner.plans import random_plan


def test_a_plan_is_like_itself() -> None:
    plan = random_plan(0)
    found = compare_plans(plan, plan)
    assert found.difference.step_seconds == 0
    assert found.facts == ()
    assert all(row.one == row.other for row in found.stages)
    assert {row.stage for row in found.stages} == {placement.stage for placement in plan.placements}


def test_what_differs_is_told_of_both() -> None:
    facts = small_facts(memory_bytes=2**50)
    longer = with_setting(facts, {"workload.batch_size": 32})
    one, other = random_plan(0, facts, model_of(facts)), random_plan(1, longer, model_of(longer))
    found = compare_plans(one, other)
    assert found.difference.step_seconds == other.period_seconds - one.period_seconds
    assert [(fact.key, fact.one, fact.other) for fact in found.facts] == [("workload.batch_size", 16, 32)]
    for row in found.stages:
        assert row.one is not None
        assert row.other is not None
        assert (row.one.pool, row.other.pool) == (one.choice(row.stage, "pool"), other.choice(row.stage, "pool"))


def test_costs_of_other_tables_and_loose_proofs_are_told() -> None:
    plan = random_plan(0)
    measured = plan.model_copy(update={"digests": {**plan.digests, "profile": "0" * 64}})
    notes = compare_plans(plan, measured).notes
    assert any("different tables" in note for note in notes)
    assert any("not closer" in note for note in notes)
    proven = plan.model_copy(update={"solver": plan.solver.model_copy(update={"gap": 0.01})})
    assert compare_plans(proven, proven).notes == ()
