"""The next best choices: none is better than a proven plan, each fits, and pins stay in force."""

from __future__ import annotations

import pytest

from meshwright.planner.analysis.alternatives import StageAlternatives, alternatives
from meshwright.planner.compile import compile_plan
from meshwright.planner.plan.plan import Plan
from meshwright.planner.solver.result import Limits
from meshwright.profiles.algorithms import PPO_GRAPH
from tests.planner.jobs import ToyModel, small_facts

PIN = "reward_score.pool=0:1"


@pytest.fixture(scope="module")
def plan() -> Plan:
    facts = small_facts(ranks_per_node=2)
    found = compile_plan(facts, ToyModel(facts), pins=(PIN,), limits=Limits(gap=0.0))
    assert isinstance(found, Plan)
    return found


@pytest.fixture(scope="module")
def considered(plan: Plan) -> tuple[StageAlternatives, ...]:
    return alternatives(plan, ToyModel(plan.facts))


def test_every_stage_is_answered_in_order(considered: tuple[StageAlternatives, ...]) -> None:
    assert [one.stage for one in considered] == list(PPO_GRAPH.by_name)
    assert all(one.runners_up for one in considered)


def test_no_alternative_is_better_than_a_proven_plan(plan: Plan, considered: tuple[StageAlternatives, ...]) -> None:
    assert plan.solver.status == "optimal"
    for one in considered:
        deltas = [alternative.delta_seconds for alternative in one.runners_up]
        assert deltas == sorted(deltas)
        assert all(delta >= -plan.solver.gap * plan.period_seconds - 1e-12 for delta in deltas)


def test_an_alternative_is_another_choice(plan: Plan, considered: tuple[StageAlternatives, ...]) -> None:
    for one in considered:
        placement, pool = plan.placement(one.stage), plan.pool_of(one.stage)
        for other in one.runners_up:
            assert (other.layout, other.schedule, other.ranks.first_rank, other.ranks.num_ranks) != (
                placement.layout,
                placement.schedule,
                pool.first_rank,
                pool.num_ranks,
            )


def test_a_pinned_stage_has_alternatives_within_its_pin(considered: tuple[StageAlternatives, ...]) -> None:
    reward = next(one for one in considered if one.stage == "reward_score")
    assert {str(other.ranks) for other in reward.runners_up} == {"0:1"}
