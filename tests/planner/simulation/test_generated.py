"""Drawn sequences of a step: generated alone, or with what the turns before left in flight."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.cost_models.period_ends import WholeStep
from meshwright.planner.simulation.simulated_flight import Grid, RoundTimes, SimulatedFlight, SimulatedSequence
from meshwright.planner.simulation.simulated_generation import (
    InFlightGeneration,
    Lengths,
    SynchronousGeneration,
    simulate_batch,
)
from meshwright.planner.simulation.simulated_rollouts import SampledRollout, _Replica
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.schedule import Schedule, WhileWaiting
from meshwright.profiles.stages import GENERATE
from tests.planner.drawn import TIMES, carrying_over, plan_of
from tests.planner.jobs import small_facts
from tests.runtime.plans_by_hand import Where, plan_by_hand
from tests.seeds import seeds


def test_a_response_takes_a_round_for_each_token_and_the_first_is_its_prefill() -> None:
    prompts, responses = np.array([10, 10]), np.array([3, 7])
    assert simulate_batch(prompts, responses, 2, 1, TIMES).seconds == pytest.approx(6)
    # One slot: 2 rounds of decoding after the first prefill, 6 after the second.
    assert simulate_batch(prompts, responses, 1, 1, TIMES).seconds == pytest.approx(8)


def test_a_long_run_of_rounds_is_costed_at_each_context_it_passes() -> None:
    # A round takes 0 s up to 100 cached tokens and then a second more for each 100: 2 s at most, 1 s on average.
    bend = Grid(np.array([1.0, 2.0]), np.array([1.0, 100.0, 300.0]), np.array([[0.0, 0.0, 2.0]] * 2))
    times = RoundTimes(prefill=TIMES.prefill, round_=bend)
    found = simulate_batch(np.array([1]), np.array([300]), 1, 1, times).seconds
    assert found == pytest.approx(200, rel=0.02)


def test_a_free_slot_is_refilled_by_the_next_prompt() -> None:
    # Slots are free at 2 and 5: the third response runs from 2 to 6. Nothing decodes only in the very first round.
    assert simulate_batch(np.array([1, 1, 1]), np.array([2, 5, 4]), 2, 1, TIMES).seconds == pytest.approx(5)


@pytest.mark.parametrize("num_slots", [1, 2, 3, 8])
def test_a_round_that_refills_a_slot_and_decodes_is_one_round_where_rounds_are_shared(num_slots: int) -> None:
    """Every round takes 7 s, whatever it does."""
    always = Grid(np.array([1.0, 9.0]), np.array([1.0, 99.0]), np.full((2, 2), 7.0))
    times = RoundTimes(prefill=always, round_=always, has_mixed_batches=True)
    prompts, responses = np.full(8, 4), np.array([3, 9, 1, 30, 2, 2, 14, 5])
    flight = SimulatedFlight(num_slots, 1, times)
    found = flight.run_period(
        [
            SimulatedSequence(step=0, row=row, prompt_tokens=4, response_tokens=tokens)
            for row, tokens in enumerate(responses.tolist())
        ],
        WholeStep(0),
    )
    assert found.seconds == 7 * flight.num_rounds
    assert simulate_batch(prompts, responses, num_slots, 1, times).seconds == found.seconds
    replica = _Replica(times, num_slots, 1, WhileWaiting.LEAVE)
    rollouts = [SampledRollout(4, (tokens,), (), ()) for tokens in responses.tolist()]
    assert replica.simulate([], rollouts, 1)[0] == found.seconds


@pytest.mark.parametrize("num_slots", [1, 2, 3, 8])
def test_more_slots_never_take_longer(num_slots: int) -> None:
    prompts, responses = np.full(8, 4), np.array([3, 9, 1, 30, 2, 2, 14, 5])
    fewer, more = (simulate_batch(prompts, responses, slots, 1, TIMES).seconds for slots in (num_slots, num_slots + 1))
    assert more <= fewer


def lengths_of(step: int) -> tuple[Lengths, Lengths]:
    """16 sequences, other ones in every step."""
    return np.full(16, 8), np.random.default_rng(step).integers(1, 60, 16)


@seeds(2, all=4)
def test_alone_every_step_delivers_its_own_sequences_on_every_replica(seed: int) -> None:
    plan = plan_of(seed, LengthSpec(max=128, fixed=128))
    layout, slots = plan.placement("actor_generate").layout, plan.placement("actor_generate").schedule.generation_slots
    found = SynchronousGeneration(plan, lengths_of, TIMES, 2.0).of_step(5)
    prompts, responses = lengths_of(5)
    assert found.responses.tolist() == responses.tolist()
    assert found.tokens_by_staleness == {0: responses.sum()}
    shares = [(prompts[i :: layout.dp], responses[i :: layout.dp]) for i in range(layout.dp)]
    assert found.seconds == tuple(2 * simulate_batch(*share, slots, layout.pp, TIMES).seconds for share in shares)
    assert all(0 < live <= slots for live in found.live)


@pytest.mark.parametrize("overcommits", [False, True])
def test_every_sequence_is_delivered_once_and_none_is_made_up(overcommits: bool) -> None:
    """Of 12 steps: what was delivered is what was drawn but for what is still in flight, and a token has one age."""
    for plan in carrying_over(overcommits)[:2]:
        extra = plan.placement("actor_generate").schedule.overcommit
        turns = InFlightGeneration(plan, lengths_of, TIMES, 1.0, lambda _, extra=extra: extra)
        found = [turns.of_step(step) for step in range(12)]
        assert all(len(step.responses) == 16 for step in found)
        assert all(sum(step.tokens_by_staleness.values()) == step.responses.sum() for step in found)
        assert all(0 <= age <= plan.staleness for step in found for age in step.tokens_by_staleness)
        drawn = sorted(length for step in range(15) for length in lengths_of(step)[1].tolist())
        for length in np.concatenate([step.responses for step in found]).tolist():
            drawn.remove(length)


@pytest.mark.parametrize("how", [{"batches_in_flight": 2}, {"overcommit": 12}], ids=str)
def test_uneven_replicas_deliver_every_sequence_once(how: dict[str, int]) -> None:
    """Of 16 rows three replicas have 6, 5 and 5."""
    facts = small_facts(ranks_per_node=3, memory_bytes=2**50).model_copy(update={"staleness": 1})
    schedule = Schedule(generation_slots=4, **how)  # type: ignore[arg-type]
    plan = plan_by_hand(facts, {GENERATE: Where("0:3", "dp3", schedule), "other": Where("0:3", "dp3")})
    turns = InFlightGeneration(plan, lengths_of, TIMES, 1.0, lambda _: schedule.overcommit)
    found = [turns.of_step(step) for step in range(12)]
    assert all(len(step.responses) == 16 for step in found)
    drawn = sorted(length for step in range(15) for length in lengths_of(step)[1].tolist())
    for length in np.concatenate([step.responses for step in found]).tolist():
        drawn.remove(length)


def test_a_turn_is_played_once_whatever_is_asked_first() -> None:
    plan = carrying_over(overcommits=False)[0]
    one, other = (InFlightGeneration(plan, lengths_of, TIMES, 1.0, lambda _: 0) for _ in range(2))
    late = one.of_step(4)
    assert one.of_step(4) is late
    assert [one.of_step(step).seconds for step in range(5)] == [other.of_step(step).seconds for step in range(5)]
