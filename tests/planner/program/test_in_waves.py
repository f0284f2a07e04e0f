"""What is repeated for every wave: drawing, scoring and telling the scores; all else is followed once, behind it."""

from __future__ import annotations

import pytest

from meshwright.planner.compile import compile_plan
from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.steps_ahead import steps_ahead_patterns
from meshwright.planner.program.check_program import check_program
from meshwright.planner.program.program import MoveWeights, Program, Receive, RunStage, Send, Waves, lower, split_waves
from meshwright.profiles.stages import GENERATE
from tests.planner.analysis.test_oversampling import sampled_facts
from tests.planner.jobs import critic_free_facts
from tests.runtime.plans_by_hand import Where, plan_by_hand

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
    waves = waves_of(plan)
    assert check_program(Program((*waves.instructions, *waves.exchange)), plan.graph) == ()


def test_every_instruction_is_followed_and_those_of_waves_and_the_others_each_keep_their_order(plan: Plan) -> None:
    whole, parted, repeated = lower(plan), split_waves(lower(plan), plan), waves_of(plan).instructions
    for are_repeated in (True, False):
        one, other = (
            [one for one in program.instructions if (one in repeated) == are_repeated] for program in (whole, parted)
        )
        assert one == other
    assert {one.stage for one in repeated if isinstance(one, RunStage)} == {GENERATE, SCORE}


def test_nothing_of_a_step_but_its_first_wave_comes_before_the_selection(plan: Plan) -> None:
    """What a stage is handed of a step is of groups that were kept."""
    parted, waves = split_waves(lower(plan), plan), waves_of(plan)
    before = parted.instructions[: waves.num_before_selection]
    assert all(isinstance(one, MoveWeights) or one in waves.instructions for one in before)


def test_stages_of_the_step_before_keep_their_places_beside_a_wave_that_is_drawn_a_step_ahead() -> None:
    facts = sampled_facts().model_copy(update={"staleness": 1})
    [_, ahead] = steps_ahead_patterns(facts.graph, 1)
    where = {GENERATE: Where("0:2", "dp2"), "other": Where("2:2", "dp2")}
    order = (GENERATE, "ref_logprob", "actor_logprob", "actor_train", SCORE)
    found = plan_by_hand(facts, where, ahead, order)
    whole, parted = lower(found), split_waves(lower(found), found)
    assert parted.waves is not None
    assert parted.waves.steps_ahead == found.placement(SCORE).steps_ahead == 1
    selection = whole.instructions.index(parted.waves.instructions[-1])
    trained = whole.instructions.index(next(one for one in whole.instructions if one.name == "actor_train"))
    assert trained < selection
    assert parted.instructions.index(whole.instructions[trained]) < parted.waves.num_before_selection
    assert check_program(parted, found.graph) == ()


def test_all_ranks_that_draw_or_score_are_told_all_that_decides_what_is_paid(plan: Plan) -> None:
    waves = waves_of(plan)
    told = [one for one in waves.exchange if isinstance(one, Receive)]
    assert [(one.producer, one.fields, one.ranks) for one in told] == [
        (GENERATE, ("truncated", "response_lengths", "sampled_lengths", "sequence_digests"), waves.ranks),
        (SCORE, ("scores",), waves.ranks),
    ]
    assert set(waves.ranks) == {*plan.pool_of(GENERATE).ranks, *plan.pool_of(SCORE).ranks}


def test_what_a_wave_sends_has_channels_of_its_own(plan: Plan) -> None:
    parted, waves = split_waves(lower(plan), plan), waves_of(plan)
    pairs = {(one.producer, one.consumer) for one in (*parted.instructions, *waves.exchange) if isinstance(one, Send)}
    assert len({parted.channels[pair] for pair in pairs}) == len(pairs)
