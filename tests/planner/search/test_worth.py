"""What is not costed because it is too slow could not have been part of a better plan."""

from __future__ import annotations

from unittest import mock

import pytest

from meshwright.cost_models.protocol import CostModel
from meshwright.planner import compile as search
from meshwright.planner.compile import best_plan
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.cost_queries import stage_transfers
from meshwright.planner.plan.plan import Plan
from meshwright.planner.search.choice_costs import TimeLimit
from meshwright.planner.search.frontiers import TOO_SLOW, PoolKind, StageCosts, frontier
from meshwright.planner.search.pruning_bound import PruningBound, default_frontiers
from meshwright.planner.search.search_control import ProgressReporter
from meshwright.planner.solver.result import Limits
from meshwright.profiles.algorithms import PPO_GRAPH
from tests.planner.jobs import RandomModel, ToyModel, small_facts
from tests.seeds import cases

pytestmark = pytest.mark.usefixtures("any_ranks")

FACTS = small_facts(ranks_per_node=4, batch_size=4, memory_bytes=2**28)
LIMITS = Limits(max_deterministic_time=20.0, gap=0.0)


@pytest.fixture
def any_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_MIN_RANKS_FOR_FIRST_PLAN", 1)


def test_few_ranks_are_searched_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_MIN_RANKS_FOR_FIRST_PLAN", 5)
    assert not synchronous_search().needs_first_plan


def synchronous_search() -> search._Search:
    model = ToyModel(FACTS)
    (ahead,) = search.steps_ahead_patterns(PPO_GRAPH, 0)
    cases = search.search_cases(ahead, 0)
    return search._Search(
        facts=FACTS,
        edges=stage_transfers(FACTS, model),
        cases=cases,
        costs=StageCosts(FACTS, model, ()),
        limits=LIMITS,
        reporter=ProgressReporter(None, len(cases)),
        start=None,
    )


def pruning_of(one: search._Search) -> PruningBound:
    defaults = default_frontiers(one.costs, one.cases[-1], begun=one.report_costing)
    pruning = search._pruning_bound(one, search._first_plan(one, defaults))
    assert pruning is not None
    return pruning


def planned(facts: Facts, model: CostModel) -> Plan:
    plan = best_plan(facts, model, limits=LIMITS)
    assert isinstance(plan, Plan)
    return plan


@pytest.mark.slow
@cases(("seed", "staleness"), [(0, 0), (1, 1), (2, 2), (3, 0)], few=1)
def test_the_best_plan_is_as_fast_as_when_every_choice_is_costed(seed: int, staleness: int) -> None:
    facts = FACTS.model_copy(update={"staleness": staleness})
    model = RandomModel(seed, 2**27)
    with mock.patch.object(search, "_pruning_bound", return_value=None):
        whole = planned(facts, model)
    found = planned(facts, model)
    assert found.period_seconds == pytest.approx(whole.period_seconds, rel=1e-4)
    assert found.solver.bound_seconds <= whole.period_seconds * (1 + 1e-6)


def test_a_choice_is_dropped_by_the_seconds_of_its_kind_of_pool() -> None:
    stage, model = PPO_GRAPH.by_name["reward_score"], ToyModel(FACTS)
    whole = frontier(FACTS, model, stage, ())
    kinds = list(whole.candidates)
    most = {kind: 1.2 * min(c.seconds for c in whole.candidates[kind]) for kind in kinds[1:]}
    found = frontier(
        FACTS, model, stage, (), time_limits={kind: TimeLimit(seconds, seconds) for kind, seconds in most.items()}
    )
    assert found.candidates[kinds[0]] == ()
    assert found.rejected[TOO_SLOW]
    for kind, seconds in most.items():
        assert found.candidates[kind] == tuple(c for c in whole.candidates[kind] if c.seconds <= seconds)


def test_what_is_known_of_one_stage_lowers_what_the_others_may_take() -> None:
    asked = synchronous_search()
    worth = pruning_of(asked)
    scope, every = asked.cases[0], PoolKind(0, 4)
    actor, critic = PPO_GRAPH.by_name["actor_train"], PPO_GRAPH.by_name["critic_train"]
    before = worth.time_limits("actor_train", scope.key_for(actor))
    worth.tighten("critic_train", scope.key_for(critic), search._frontier(asked.costs, worth, scope, critic))
    after = worth.time_limits("actor_train", scope.key_for(actor))
    assert after[every].seconds <= before[every].seconds <= max(worth.max_period_seconds) * 1.01
    assert after[every].tail_seconds == after[every].seconds
    assert after.keys() <= before.keys()
    assert PoolKind(0, 1) not in after


def test_what_streams_may_take_long_but_not_when_what_it_streams_has_ended() -> None:
    asked = synchronous_search()
    worth, scope = pruning_of(asked), asked.cases[0]
    reads = PPO_GRAPH.by_name["reward_score"]
    assert scope.streams(reads)
    for name in ("actor_generate", "actor_train"):
        worth.tighten(
            name,
            scope.key_for(PPO_GRAPH.by_name[name]),
            search._frontier(asked.costs, worth, scope, PPO_GRAPH.by_name[name]),
        )
    most = worth.time_limits("reward_score", scope.key_for(reads))
    assert all(may.tail_seconds <= may.seconds for may in most.values())
    assert any(may.tail_seconds < may.seconds for may in most.values())
    whole = [
        one
        for candidates in frontier(FACTS, asked.costs.model, reads, (), search_case=scope).candidates.values()
        for one in candidates
    ]
    kept = {
        one
        for candidates in search._frontier(asked.costs, worth, scope, reads).candidates.values()
        for one in candidates
    }
    assert kept
    assert all(
        one in kept or not most[PoolKind(0, one.layout.num_ranks)].allows(one.seconds, one.tail_seconds)
        for one in whole
    )


@pytest.mark.parametrize(("gap", "status"), [(0.0, "optimal"), (0.1, "feasible")])
def test_a_search_that_ends_with_its_first_plan_has_proven_the_gap(gap: float, status: str) -> None:
    """As it would where arithmetic alone excludes everything that is better by more than the gap."""
    with mock.patch.object(
        PruningBound, "lower_bound_seconds", lambda pruning, position: pruning.max_period_seconds[position]
    ):
        found = best_plan(FACTS, ToyModel(FACTS), limits=Limits(max_deterministic_time=20.0, gap=gap))
    assert isinstance(found, Plan)
    assert found.solver.status == status
    assert found.solver.gap <= gap + 1e-5


@pytest.mark.parametrize("gap", [0.0, 0.02, 0.3])
def test_a_first_plan_that_is_near_enough_the_bound_ends_the_search(gap: float) -> None:
    """Whatever was not costed then could not make it shorter by more than the gap."""
    model = ToyModel(FACTS)
    best = planned(FACTS, model)
    found = best_plan(FACTS, model, limits=Limits(max_deterministic_time=20.0, gap=gap))
    assert isinstance(found, Plan)
    assert found.solver.gap <= gap + 1e-5
    assert found.solver.bound_seconds <= best.period_seconds * (1 + 1e-5)
    if gap == 0.3:
        assert found.solver.work.num_time_costs < 0.8 * best.solver.work.num_time_costs
        assert found.solver.status == "feasible"
