"""What another plan takes over: each prompt that was not trained on, once, and what it could have begun itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from meshwright.planner.plan.plan import Plan
from meshwright.profiles.environment.dynamic_sampling import DynamicSampling
from meshwright.profiles.errors import BadInput
from meshwright.profiles.schedule import Schedule
from meshwright.runtime.inference.in_flight import GenerationState, InFlightState, SamplingDigests, SequencesInFlight
from meshwright.runtime.inference.slots import Finish, PartialResponse, Prompt, Response
from meshwright.runtime.rollout.plan_change import Resumed, resume_under_new_plan
from tests.planner.jobs import small_facts
from tests.runtime.plans_by_hand import Where, plan_by_hand

BATCH, DONE = 4, 2


def plan(staleness: int) -> Plan:
    facts = small_facts(batch_size=BATCH, response=32, memory_bytes=2**40).model_copy(update={"staleness": staleness})
    generation = Where("0:1", "tp1", Schedule(generation_slots=2, batches_in_flight=staleness + 1))
    return plan_by_hand(facts, {"other": Where("0:1"), "actor_generate": generation})


def prompt(draw: int) -> Prompt:
    return Prompt(row=draw % BATCH, sample_id=draw, tokens=(5,), step=draw // BATCH)


def state_in_flight() -> InFlightState:
    """After two updates of four prompts: draw 3 was put off, draw 12 was taken ahead and trained on in its stead.

    Row 0 of step 2 is delivered, draw 3 has ended, draw 8 goes on, draw 9 waits, and the others are not admitted.
    """
    fields = {
        "tokens": {0: torch.tensor([5, 7, 8])},
        "prompt_lengths": {0: torch.tensor([1])},
        "truncated": {0: torch.tensor([1])},
        "behaviour_logprobs": {0: torch.tensor([-0.5, -0.25, 0.0])},
        "versions": {0: torch.tensor([1, 2, 0])},
    }
    ended = Response(prompt=prompt(3), tokens=(9,), logprobs=(-1.0,), versions=(0,), finish=Finish.EOS, first_period=0)
    flight = SequencesInFlight(
        period=1,
        live=((),),
        paused=(PartialResponse(prompt=prompt(10), tokens=(6, 6), logprobs=(-2.0, -2.0), versions=(1, 1)),),
        waiting=(prompt(9),),
        ended=(ended,),
        blocks=(),
        cached=(),
    )
    drawing = GenerationState(
        num_admitted=12,
        mean_response_tokens=2.0,
        in_flight=flight,
        delivered={1: {0: 12}, 2: {0: 8}},
        unadmitted=(11, 13, 14, 15),
        end_step=4,
    )
    return InFlightState(digests=SamplingDigests("a", "b"), num_steps=9, experience={2: fields}, generation=drawing)


def carried(bound: int, *, max_response: int = 32, draws_again: bool = False) -> Resumed:
    return resume_under_new_plan(
        [state_in_flight()], plan(bound), DONE, BATCH, max_response=max_response, resamples=draws_again
    )


def sampled(bound: int = 0) -> Plan:
    found = plan(bound)
    workload = found.facts.workload.model_copy(update={"dynamic_sampling": DynamicSampling(acceptance=0.5)})
    return found.model_copy(update={"facts": found.facts.model_copy(update={"workload": workload})})


def test_dynamic_sampling_goes_on_behind_the_prompts_that_it_was_dealt() -> None:
    drawing = GenerationState(num_admitted=0, mean_response_tokens=0.0, in_flight=None, num_wave_prompts=18)
    known = InFlightState(digests=SamplingDigests("a", "b"), num_steps=9, experience={}, generation=drawing)
    others = replace(known, generation=None)
    for draws_again in (False, True):
        found = resume_under_new_plan([others, known], sampled(), DONE, BATCH, max_response=32, resamples=draws_again)
        assert found == Resumed(num_wave_prompts=18)


def test_groups_that_were_kept_and_not_trained_on_are_drawn_again_from_their_own_prompts() -> None:
    drawing = GenerationState(
        num_admitted=0,
        mean_response_tokens=0.0,
        in_flight=None,
        num_wave_prompts=24,
        wave_prompts_before={DONE - 1: 6, DONE: 12, DONE + 1: 18},
    )
    experience = {step: {"tokens": {row: torch.tensor([5, 7]) for row in range(BATCH)}} for step in (DONE, DONE + 1)}
    known = InFlightState(digests=SamplingDigests("a", "b"), num_steps=9, experience=experience, generation=drawing)
    found = resume_under_new_plan([known, known], sampled(), DONE, BATCH, max_response=32, resamples=False)
    assert found == Resumed(num_wave_prompts=12, num_resampled=2 * BATCH)


def test_a_checkpoint_that_does_not_tell_what_was_dealt_is_refused() -> None:
    with pytest.raises(BadInput, match="does not record how many prompts were used so far"):
        resume_under_new_plan([], sampled(), DONE, BATCH, max_response=32, resamples=False)


def test_prompts_that_no_update_has_used_are_dealt_in_the_order_of_their_draws() -> None:
    assert carried(2).reassigned == {2: (3, 8, 9, 10), 3: (11, 13, 14, 15)}
    assert carried(0, draws_again=True).reassigned == carried(2).reassigned


@pytest.mark.parametrize(("bound", "kept"), [(0, set()), (1, {8, 10}), (2, {3, 8, 10})])
def test_a_response_goes_on_where_the_plan_allows_the_policy_that_began_it(bound: int, kept: set[int]) -> None:
    found = carried(bound)
    assert set(found.samples) == kept
    assert found.num_resampled == 3 - len(kept)


def test_tokens_come_with_the_log_probabilities_and_versions_that_they_were_drawn_with() -> None:
    begun = carried(2).samples
    assert begun[8].tokens == (7, 8)
    assert begun[8].logprobs == (-0.5, -0.25)
    assert begun[8].versions == (1, 2)
    assert (begun[8].finish, begun[3].finish, begun[10].finish) == (Finish.LENGTH, Finish.EOS, None)


def test_nothing_is_carried_over_that_is_too_long_now_or_where_it_is_drawn_again() -> None:
    assert set(carried(2, max_response=2).samples) == {3, 8}  # draw 10 has two tokens and would draw a third
    assert carried(2, draws_again=True).samples == {}
    assert carried(2, draws_again=True).num_resampled == 3


def test_what_was_under_way_is_said_in_one_sentence() -> None:
    assert carried(1).notes == ("2 responses in flight are continued under this plan, and 1 are sampled again",)
    assert Resumed().notes == ()


def test_a_checkpoint_that_lacks_prompts_is_refused() -> None:
    whole = state_in_flight()
    assert whole.generation is not None
    part = replace(whole, generation=replace(whole.generation, unadmitted=(11,)))
    with pytest.raises(BadInput, match="has 5 prompts for the batches of steps 2 to 3, which take 8"):
        resume_under_new_plan([part], plan(0), DONE, BATCH, max_response=32, resamples=False)


def test_with_nothing_under_way_nothing_is_carried_over() -> None:
    assert resume_under_new_plan([], plan(0), DONE, BATCH, max_response=32, resamples=False) == Resumed()
