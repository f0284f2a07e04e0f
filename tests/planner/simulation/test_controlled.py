"""Controllers in a simulated run: they stay at or below the plan, change nothing they have no say in, lose nobody."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planner.plan.plan import Plan
from meshwright.planner.program.controllers import Controllers, StepObservation
from meshwright.planner.simulation.sampled_durations import Sampled, SimulatedControllers, assumed_reward
from meshwright.planner.simulation.simulate import simulate
from meshwright.planner.simulation.simulated_generation import InFlightGeneration, Lengths
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import GENERATE
from meshwright.profiles.trace import NUM_CHUNK_TOKENS, NUM_OVERCOMMIT
from tests.planner.drawn import carrying_over, model_of
from tests.planner.plans import long_facts
from tests.planner.simulation.test_flight import TIMES
from tests.runtime.plans_by_hand import Where, plan_by_hand

NUM_TURNS = 500


def controlled(plan: Plan) -> Plan:
    return plan.model_copy(update={"facts": plan.facts.model_copy(update={"controllers": True})})


def streamed(chunk_tokens: int = 256) -> Plan:
    """Half of four ranks generate, the others score what they draw as it is drawn."""
    where = {
        "other": Where("0:4"),
        "actor_generate": Where("0:2", "dp2"),
        "reward_score": Where("2:2", "dp2", Schedule(chunk_tokens=chunk_tokens)),
        "ref_logprob": Where("2:2", "dp2", Schedule(chunk_tokens=128)),
    }
    return plan_by_hand(long_facts(), where | {"other": Where("0:4", "dp4")})


@settings(max_examples=30)
@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(-1, 1)), min_size=80, max_size=80))
def test_no_setting_is_above_the_plans(observed: list[tuple[float, float]]) -> None:
    for plan in (carrying_over(overcommits=True)[0], streamed()):
        controllers, schedule = Controllers(controlled(plan)), plan.placement(GENERATE).schedule
        largest = max(p.schedule.chunk_tokens for p in plan.placements)
        for turn in range(len(observed)):
            for step in controllers.missing_steps(turn):
                controllers.observe(
                    StepObservation(step=step, seconds=observed[step][0], scores_by_age=((1, observed[step][1]),))
                )
            found = controllers.setting(turn)
            assert 0 <= found.overcommit <= schedule.overcommit
            assert found.overcommit % plan.placement(GENERATE).layout.dp == 0
            assert found.chunk_tokens <= largest


def test_a_turn_begins_as_the_plan_says_until_steps_were_observed() -> None:
    plan = carrying_over(overcommits=True)[0]
    controllers = Controllers(controlled(plan))
    for turn in range(controllers.delay):
        assert controllers.missing_steps(turn) == range(0)
        assert controllers.setting(turn).overcommit == plan.placement(GENERATE).schedule.overcommit
    assert controllers.missing_steps(controllers.delay) == range(1)


@pytest.mark.parametrize("has_batches_in_flight", [True, False], ids=["batches", "one size"])
def test_a_plan_that_leaves_no_choice_is_simulated_as_without_controllers(has_batches_in_flight: bool) -> None:
    plan = carrying_over(overcommits=False)[0] if has_batches_in_flight else streamed(128)
    without, having = (Sampled(one, model_of, seed=1) for one in (plan, controlled(plan)))
    assert [without.of_step(step) for step in range(20)] == [having.of_step(step) for step in range(20)]


def test_overcommit_falls_when_rewards_have_levelled_off_and_not_before() -> None:
    plan = controlled(carrying_over(overcommits=True)[0])
    control, largest = SimulatedControllers(plan, model_of), plan.placement(GENERATE).schedule.overcommit
    found = [control.of_step(step).overcommit for step in range(NUM_TURNS)]
    assert assumed_reward(60) > assumed_reward(50) + 0.05
    assert set(found[:60]) == {largest}
    assert min(found[300:]) < largest


def test_the_chunks_that_make_the_shortest_turn_are_kept() -> None:
    plan = controlled(streamed())
    control = SimulatedControllers(plan, model_of)
    settings_ = [control.of_step(step) for step in range(50)]
    assert [one.chunk_tokens for one in settings_[:6]] == [128] * 3 + [256] * 3
    periods = {one.chunk_tokens: control.plan_in(one).period_seconds for one in settings_}
    assert settings_[-1].chunk_tokens == min(periods, key=lambda size: (periods[size], size))
    assert control.plan_in(settings_[5]) == plan


def test_shorter_chunks_change_what_the_reader_takes_and_nothing_else() -> None:
    plan = controlled(streamed())
    control, drawn, usual = (
        SimulatedControllers(plan, model_of),
        *(Sampled(p, model_of, seed=1) for p in (plan, streamed())),
    )
    short, normal = drawn.of_step(0), usual.of_step(0)
    assert short.setting == control.of_step(0)
    changed = {stage for stage in short.seconds if short.seconds[stage] != normal.seconds[stage]}
    assert changed == {"reward_score"}
    assert short.tail_seconds["reward_score"] != plan.placement("reward_score").tail_seconds
    assert short.tail_seconds["ref_logprob"] == plan.placement("ref_logprob").tail_seconds


def test_over_many_turns_with_controllers_no_sequence_is_lost_delivered_twice_or_starves() -> None:
    plan = controlled(carrying_over(overcommits=True)[0])
    batch_size = plan.facts.workload.batch_size

    def lengths(step: int) -> tuple[Lengths, Lengths]:
        """A sequence is known by its prompt."""
        draw = np.random.default_rng(step)
        responses = np.minimum(draw.pareto(0.7, batch_size) + 1, 200).astype(np.int64)
        return np.arange(step * batch_size, (step + 1) * batch_size), responses

    control = SimulatedControllers(plan, model_of)
    generation = InFlightGeneration(plan, lengths, TIMES, 1.0, lambda step: control.of_step(step).overcommit)
    turns = [generation.of_step(step) for step in range(NUM_TURNS)]
    assert len({control.of_step(step).overcommit for step in range(NUM_TURNS)}) > 2
    delivered = Counter(prompt for turn in turns for prompt in turn.prompts.tolist())
    assert set(delivered.values()) == {1}
    assert [len(turn.prompts) for turn in turns] == [batch_size] * NUM_TURNS
    assert max(max(turn.tokens_by_staleness) for turn in turns) <= plan.staleness
    latest = NUM_TURNS * batch_size - plan.placement(GENERATE).schedule.overcommit * (plan.staleness + 1)
    assert set(range(latest)) <= set(delivered)


def test_a_simulation_tells_what_was_decided_in_its_answer_and_its_trace() -> None:
    plan = controlled(streamed())
    found = simulate(plan, Sampled(plan, model_of, seed=0), steps=10, traced=True)
    assert len(found.settings) == 10
    facts = [span.facts for span in found.spans if span.instruction == GENERATE and span.rank == 0]
    assert [fact[NUM_CHUNK_TOKENS] for fact in facts] == [one.chunk_tokens for one in found.settings]
    assert {fact[NUM_OVERCOMMIT] for fact in facts} == {0}
    assert simulate(streamed(), Sampled(streamed(), model_of, seed=0), steps=2).settings == ()
