"""The explanation: the critical path accounts for the whole step, and idle time for the rest."""

from __future__ import annotations

import itertools

import pytest

from meshwright.planner.analysis.explain import explain
from meshwright.planner.compile import compile_plan
from meshwright.planner.plan.plan import Plan
from tests.planner.jobs import ToyModel, small_facts


@pytest.fixture(scope="module")
def plan() -> Plan:
    facts = small_facts(ranks_per_node=2)
    found = compile_plan(facts, ToyModel(facts), pins=("reward_score.pool=0:1",))
    assert isinstance(found, Plan)
    return found


def test_the_critical_path_leads_from_the_start_of_the_step_to_its_end(plan: Plan) -> None:
    path = explain(plan).critical_path
    assert path[0].because == "starts the period"
    assert path[-1].start_seconds + path[-1].seconds == pytest.approx(plan.period_seconds)
    for one, following in itertools.pairwise(path):
        assert one.start_seconds + one.seconds <= following.start_seconds + 1e-9
        assert one.task in following.because


def test_the_path_and_its_handovers_add_up_to_the_period(plan: Plan) -> None:
    path = explain(plan).critical_path
    lags = sum(edge.cost.total for edge in plan.edges)
    assert plan.period_seconds - lags <= sum(wait.seconds for wait in path) <= plan.period_seconds * (1 + 1e-9)


def test_a_rank_is_idle_when_nothing_runs_on_it(plan: Plan) -> None:
    uses = explain(plan).ranks
    for use in uses:
        busy = sum(item.cost.total for item in plan.placements if use.rank in plan.pool(item.pool).ranks) + sum(
            refit.cost.total
            for refit in plan.refits
            if use.rank in {*plan.pool_of(refit.source).ranks, *plan.pool_of(refit.target).ranks}
        )
        assert use.idle_share == pytest.approx(1 - busy / plan.period_seconds)
        assert 0 <= use.idle_share < 1
    assert [use.peak_bytes for use in uses] == list(plan.peak_bytes_per_rank)


def test_the_critical_path_is_shared_among_the_pools_of_its_stages(plan: Plan) -> None:
    found = explain(plan)
    stages = [wait for wait in found.critical_path if not wait.task.startswith("refit")]
    assert sum(use.critical_seconds for use in found.pools) == pytest.approx(sum(wait.seconds for wait in stages))
    assert [use.critical_seconds for use in found.pools] == sorted(
        (u.critical_seconds for u in found.pools), reverse=True
    )
    assert sorted(stage for use in found.pools for stage in use.stages) == sorted(p.stage for p in plan.placements)
    for use in found.pools:
        assert use.peak_bytes + use.free_bytes == found.device_bytes


def test_what_was_pinned_is_told(plan: Plan) -> None:
    assert explain(plan).pins == ("reward_score.pool=0:1",)
