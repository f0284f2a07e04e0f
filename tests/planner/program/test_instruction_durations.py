"""Planned seconds are the plan's own, and so are the hand-overs between its stages."""

from __future__ import annotations

import pytest

from meshwright.planner.job.rewards_and_tools import RewardLoad
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.reward_workers import host_seconds
from meshwright.planner.program.durations import Planned, Precomputed, StepWork, refit_seconds, transfer_delays
from meshwright.planner.program.program import MoveWeights, RunStage, lower
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.environment.latency import LatencySpec
from meshwright.profiles.stages import ENVIRONMENT, GENERATE
from tests.planner.plans import long_facts, random_plan
from tests.seeds import seeds


@pytest.fixture(scope="module")
def plan() -> Plan:
    return random_plan(3, long_facts())


@seeds(2, all=6)
def test_every_stage_and_refit_of_the_program_has_its_planned_seconds(seed: int) -> None:
    plan = random_plan(seed)
    seconds = Planned(plan).of_step(0).seconds
    for instruction in lower(plan).instructions:
        if isinstance(instruction, RunStage):
            assert seconds[instruction.name] == (plan.placement(instruction.stage).cost.total,)
        if isinstance(instruction, MoveWeights):
            assert seconds[instruction.name] == refit_seconds(plan)[instruction.name]


def test_every_step_is_planned_alike_and_draws_the_expected_tokens(plan: Plan) -> None:
    planned, workload = Planned(plan), plan.facts.workload
    assert planned.of_step(0) == planned.of_step(7)
    assert planned.of_step(0).num_tokens == workload.batch_size * 400


def test_what_was_known_of_each_step_is_said_again() -> None:
    works = tuple(StepWork(seconds={"actor_train": (float(step),)}, num_tokens=step) for step in range(3))
    assert [Precomputed("sampled", works).of_step(step) for step in range(3)] == list(works)


def test_what_is_handed_over_arrives_after_its_planned_seconds(plan: Plan) -> None:
    lags = transfer_delays(plan)
    assert lags.transfers == {(edge.producer, edge.consumer): edge.cost.total for edge in plan.edges}
    assert set(lags.transfers) == {(producer, consumer) for producer, consumer, _ in PPO_GRAPH.edges}


def test_a_hand_over_of_tokens_does_not_wait_for_rewards_on_hosts_which_have_one_of_their_own() -> None:
    judge = RewardLoad(
        name="judge", is_remote=True, workers=None, batch_size=1, latency_seconds=LatencySpec(mean=3.0, p99=6.0)
    )
    plan = random_plan(3, long_facts().model_copy(update={"rewards": (judge,)}))
    readers = [edge for edge in plan.edges if host_seconds(edge)]
    lags = transfer_delays(plan)
    assert {edge.consumer for edge in readers} == {"actor_train", "critic_train"}
    for edge in readers:
        assert lags.host_reward_seconds == host_seconds(edge) > 2.9
        assert lags.transfers[GENERATE, edge.consumer] == pytest.approx(edge.cost.total - lags.host_reward_seconds)
        assert lags.transfers[ENVIRONMENT, edge.consumer] == edge.cost.total


@seeds(4, all=20)
def test_only_what_streams_has_a_tail_to_read(seed: int) -> None:
    plan = random_plan(seed, long_facts())
    streaming = {p.stage: p.tail_seconds for p in plan.placements if p.schedule.chunk_tokens}
    assert transfer_delays(plan).tails == streaming
