"""What is repeated for every wave: drawing, scoring and telling the scores; all else is followed once, behind it."""

from __future__ import annotations

import pytest

from meshwright.planner.compile import compile_plan
from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.plan.plan import Plan
from meshwright.planner.program.check_program import check_program
from meshwright.planner.program.program import MoveWeights, Program, Receive, RunStage, Send, Waves, lower, split_waves
from meshwright.profiles.stages import GENERATE
from tests.planner.analysis.test_oversampling import sampled_facts
from tests.planner.jobs import critic_free_facts

SCORE = "reward_score"
PINS = {
    "everywhere": ("actor_generate.pool=0:4", "reward_score.pool=0:4"),
    "apart": ("actor_generate.pool=0:2", "reward_score.pool=2:1", "actor_train.pool=3:1"),
    "in one pool": ("actor_generate.pool=0:2", "reward_score.pool=0:2", "ref_logprob.pool=2:2"),
}


def plan_of(*pins: str) -> Plan:
    facts = sampled_facts()
    found = compile_plan(facts, cost_model_of(facts), pins=pins)
    assert isinstance(found, Plan)
    return found


@pytest.fixture(scope="module", params=PINS)
def plan(request: pytest.FixtureRequest) -> Plan:
    return plan_of(*PINS[request.param])


def waves_of(plan: Plan) -> Waves:
    found = split_waves(lower(plan), plan).waves
    assert found is not None
    return found


def test_a_plan_without_dynamic_sampling_has_no_waves() -> None:
    facts = critic_free_facts()
    found = compile_plan(facts, cost_model_of(facts))
    assert isinstance(found, Plan)
    assert split_waves(lower(found), found) == lower(found)


def test_a_wave_can_be_followed_to_its_end_any_number_of_times(plan: Plan) -> None:
    assert check_program(Program(waves_of(plan).instructions), plan.graph) == ()


def test_every_instruction_is_repeated_or_followed_once_and_keeps_its_order(plan: Plan) -> None:
    whole, parted, waves = lower(plan), split_waves(lower(plan), plan), waves_of(plan)
    repeated = [one for one in waves.instructions if one in whole.instructions]
    assert [one for one in whole.instructions if one in repeated] == repeated
    assert [one for one in whole.instructions if one not in repeated] == list(parted.instructions)
    assert {one.stage for one in repeated if isinstance(one, RunStage)} == {GENERATE, SCORE}


def test_nothing_but_weights_comes_before_the_waves(plan: Plan) -> None:
    """What a stage is handed of a step is of groups that were kept."""
    parted, waves = split_waves(lower(plan), plan), waves_of(plan)
    assert all(isinstance(one, MoveWeights) for one in parted.instructions[: waves.num_before])


def test_all_ranks_that_draw_or_score_are_told_all_that_decides_what_is_paid(plan: Plan) -> None:
    waves = waves_of(plan)
    told = [one for one in waves.instructions if isinstance(one, Receive) and one.consumer == GENERATE]
    assert [(one.producer, one.fields, one.ranks) for one in told] == [
        (GENERATE, ("truncated", "response_lengths", "sequence_digests"), waves.ranks),
        (SCORE, ("scores",), waves.ranks),
    ]
    assert set(waves.ranks) == {*plan.pool_of(GENERATE).ranks, *plan.pool_of(SCORE).ranks}


def test_what_a_wave_sends_has_channels_of_its_own(plan: Plan) -> None:
    parted, waves = split_waves(lower(plan), plan), waves_of(plan)
    pairs = {
        (one.producer, one.consumer) for one in (*parted.instructions, *waves.instructions) if isinstance(one, Send)
    }
    assert len({parted.channels[pair] for pair in pairs}) == len(pairs)
