"""What is hidden of rewards on hosts is what the step is not longer by."""

from __future__ import annotations

import pytest

from meshwright.planner.analysis.explain import explain
from meshwright.planner.analysis.optional_features import host_rewards
from meshwright.planner.plan.plan import Plan
from meshwright.planner.report.contents import Contents
from meshwright.planner.report.report import report
from meshwright.planner.simulation.simulate import simulate
from tests.planner.plan.test_host_workers import facts_with, load, planned


@pytest.fixture(scope="module")
def slow() -> Plan:
    """A synchronous plan whose judge takes about as long as all else."""
    return planned(facts_with(load("judge", 0.02, workers=64)), gap=0.05)


def test_a_plan_without_rewards_on_hosts_has_nothing_to_hide() -> None:
    assert host_rewards(planned(facts_with(), gap=0.05)) is None


def test_rewards_that_begin_as_responses_end_are_sooner_there_than_all_at_once(slow: Plan) -> None:
    found = host_rewards(slow)
    assert found is not None
    assert 0 < found.added_seconds <= found.tail_seconds < found.at_once_seconds
    assert found.hidden_share == pytest.approx(1 - found.added_seconds / found.at_once_seconds)


def test_more_is_hidden_where_generation_works_ahead(slow: Plan) -> None:
    plan = planned(facts_with(load("judge", 0.02, workers=64), staleness=1), gap=0.05)
    ahead, now = host_rewards(plan), host_rewards(slow)
    assert ahead is not None
    assert now is not None
    assert ahead.added_seconds < now.added_seconds


def test_explanation_and_report_say_so(slow: Plan) -> None:
    found = explain(slow)
    assert found.rewards == host_rewards(slow)
    assert "needs rewards for the output of actor_generate" in [wait.because for wait in found.critical_path]
    assert found.rewards is not None
    text = report(Contents(plan=slow, simulation=simulate(slow, steps=2, traced=True)))
    assert all(sentence in text for sentence in found.rewards.sentences)
