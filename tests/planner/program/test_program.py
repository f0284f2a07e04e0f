"""The program: every rank has what a stage reads before it runs there, and no wait can close a circle."""

from __future__ import annotations

import pytest

from meshwright.planner.compile import compile_plan
from meshwright.planner.plan.plan import Plan
from meshwright.planner.program.program import MoveWeights, Receive, RunStage, Send, lower, output_owners
from meshwright.profiles.algorithms import PPO_GRAPH
from tests.planner.jobs import RandomModel, small_facts


def plan_of(seed: int, *pins: str) -> Plan:
    plan = compile_plan(small_facts(), RandomModel(seed, memory_scale=1.0), pins=pins)
    assert isinstance(plan, Plan)
    return plan


PINS = (
    ("actor_generate.layout=tp1,pp2,dp2", "actor_train.layout=tp2,dp2"),
    ("reward_score.pool=0:1", "ref_logprob.pool=1:1", "critic_value.pool=2:2", "critic_train.pool=2:2"),
    (),
)


@pytest.fixture(scope="module", params=range(len(PINS)))
def plan(request: pytest.FixtureRequest) -> Plan:
    return plan_of(request.param, *PINS[request.param])


def test_a_rank_holds_every_row_of_every_field_before_a_stage_reads_it(plan: Plan) -> None:
    held: dict[int, set[tuple[str, int]]] = {rank: set() for rank in range(4)}  # (field, owner)
    sent: dict[tuple[str, str], tuple[int, ...]] = {}
    for instruction in lower(plan).instructions:
        match instruction:
            case Send():
                sent[instruction.producer, instruction.consumer] = instruction.targets
            case Receive():
                assert sent[instruction.producer, instruction.consumer] == instruction.ranks
                for rank in instruction.ranks:
                    held[rank] |= {(field, owner) for field in instruction.fields for owner in instruction.owners}
            case RunStage():
                for rank in instruction.ranks:
                    for field in PPO_GRAPH.by_name[instruction.stage].reads:
                        writer = next(stage.name for stage in PPO_GRAPH.stages if field in stage.writes)
                        assert held[rank] >= {(field, owner) for owner in output_owners(plan, writer)}
            case MoveWeights():
                pass


def test_each_stage_runs_once_on_all_ranks_of_its_pool(plan: Plan) -> None:
    runs = [i for i in lower(plan).instructions if isinstance(i, RunStage)]
    assert sorted(run.stage for run in runs) == sorted(stage.name for stage in PPO_GRAPH.stages)
    for run in runs:
        assert run.ranks == tuple(plan.pool_of(run.stage).ranks)


def test_a_field_reaches_a_rank_once(plan: Plan) -> None:
    received = [(i.producer, rank) for i in lower(plan).instructions if isinstance(i, Receive) for rank in i.ranks]
    assert len(received) == len(set(received))


def test_a_send_and_its_receive_share_a_channel_that_no_other_pair_has(plan: Plan) -> None:
    program = lower(plan)
    pairs = {(i.producer, i.consumer) for i in program.instructions if isinstance(i, Send | Receive)}
    assert len({program.channels[pair] for pair in pairs}) == len(pairs)


def test_a_refit_involves_the_ranks_of_both_pools_and_precedes_its_stage(plan: Plan) -> None:
    instructions = lower(plan).instructions
    moves = [i for i in instructions if isinstance(i, MoveWeights)]
    assert {(move.source, move.target) for move in moves} == {(refit.source, refit.target) for refit in plan.refits}
    for move in moves:
        assert set(move.ranks) == {*plan.pool_of(move.source).ranks, *plan.pool_of(move.target).ranks}
        runs = {i.stage: instructions.index(i) for i in instructions if isinstance(i, RunStage)}
        assert instructions.index(move) < runs[move.target]
        assert instructions.index(move) < runs[move.source]


def test_the_owners_are_the_last_pipeline_stage_of_each_replica() -> None:
    # tp1, pp2, dp2 on ranks 0-3: dp varies before pp, so the last stage is on ranks 2 and 3.
    assert output_owners(plan_of(0, *PINS[0]), "actor_generate") == (2, 3)


def test_a_part_of_a_plan_hands_over_among_its_own_stages(plan: Plan) -> None:
    kept = ("actor_generate", "reward_score")
    part = lower(plan, kept).instructions
    assert {i.stage for i in part if isinstance(i, RunStage)} == set(kept)
    assert {i.target for i in part if isinstance(i, MoveWeights)} <= set(kept)
    reached = {rank for i in part if isinstance(i, Receive) for rank in i.ranks}
    assert reached == set(plan.pool_of("reward_score").ranks)
