"""Stages that may use the same pools share one list of them, and what they cost does not depend on who costs it."""

from __future__ import annotations

from meshwright.planner.plan.pins import parse_pin
from meshwright.planner.plan.steps_ahead import synchronous_case
from meshwright.planner.search.frontiers import Frontier, StageCosts, frontier
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.stages import Stage
from tests.planner.jobs import ToyModel, small_facts

FACTS = small_facts(batch_size=4)
PIN = parse_pin("actor_train.pool=0:2", PPO_GRAPH)


def test_only_a_pin_on_its_pool_gives_a_stage_pools_of_its_own() -> None:
    costs = StageCosts(FACTS, ToyModel(FACTS), (PIN,))
    every = costs.pools["critic_train"]
    assert all(costs.pools[stage.name] is every for stage in PPO_GRAPH.stages if stage.name != "actor_train")
    assert [str(ranks) for ranks in costs.pools["actor_train"]] == ["0:2"]
    assert len(costs.kinds["actor_train"]) == 1


def test_side_by_side_every_stage_has_the_frontier_that_it_has_alone() -> None:
    costs = StageCosts(FACTS, ToyModel(FACTS), (PIN,))

    def work(stage: Stage) -> Frontier:
        return costs.frontier(stage, synchronous_case(PPO_GRAPH), None)

    found = costs.in_parallel(work, PPO_GRAPH.stages, prepare=lambda: None, on_start=lambda _: None)
    assert found == [frontier(FACTS, ToyModel(FACTS), stage, (PIN,)) for stage in PPO_GRAPH.stages]
    assert [one.queries for one in costs.costed_frontiers] == [one.queries for one in found]
