"""The job that the simulator's speed is measured on is legal, and is simulated in its own period."""

from __future__ import annotations

import pytest

from benchmarks.pipeline.speed import facts_of_1024_ranks, plan_by_hand
from meshwright.planner.recost import illegal_under
from meshwright.planner.simulate import simulate


def test_the_plan_made_by_hand_is_legal_and_takes_its_period() -> None:
    facts = facts_of_1024_ranks()
    plan = plan_by_hand(facts)
    assert facts.cluster.num_ranks == 1024
    assert illegal_under(plan, facts) == ()
    assert simulate(plan, steps=2).steps.mean == pytest.approx(plan.period_seconds)
