"""Admission: every prompt of a run is admitted once and in one order, however many sequences stay in flight."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from meshwright.cost_models.period_ends import AllSequences, FirstEnded, WholeStep
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.trace import NUM_SAMPLED_TOKENS, NUM_SAMPLES
from meshwright.runtime.inference.slots import Finish, Prompt, Response
from meshwright.runtime.model.end_tokens import StopConditions
from meshwright.runtime.rollout.admission import Admission, replica_share
from meshwright.runtime.rollout.prompts import PromptData
from tests.planner.jobs import small_facts
from tests.runtime.plans_by_hand import Where, plan_by_hand

BATCH, REPLICAS, STEPS = 64, 2, range(3, 15)
PER_STEP = BATCH // REPLICAS
SCHEDULES: dict[str, dict[str, int]] = {
    "in turns": {},
    "three batches in flight": {"batches_in_flight": 3},
    "overcommit": {"overcommit": 16},
}
either = pytest.mark.parametrize("how", SCHEDULES)


@cache
def plan(how: str, replicas: int = REPLICAS) -> Plan:
    facts = small_facts(ranks_per_node=replicas, batch_size=BATCH, response=32, memory_bytes=2**40)
    schedule = Schedule(generation_slots=8, **SCHEDULES[how])  # type: ignore[arg-type]
    schedule = replace(schedule, overcommit=schedule.overcommit // replicas * replicas)
    everywhere = f"0:{replicas}", f"dp{replicas}"
    where = {"other": Where(*everywhere), "actor_generate": Where(*everywhere, schedule)}
    return plan_by_hand(facts.model_copy(update={"staleness": 2}), where)


DATA = PromptData(
    train=tuple((number,) * (1 + number % 7) for number in range(100)),
    ends=StopConditions(tokens={1: "<eos>"}),
    stop=None,
    batch_size=BATCH,
    seed=0,
    num_tokens=100,
)


def admission(how: str, replica: int = 0, steps: range = STEPS) -> Admission:
    return Admission(plan(how), DATA, replica, steps)


def answered(prompt: Prompt, num_tokens: int = 4) -> Response:
    kept: Any = {"tokens": (1,) * num_tokens, "logprobs": (0.0,) * num_tokens, "versions": (0,) * num_tokens}
    return Response(prompt=prompt, finish=Finish.EOS, first_period=0, **kept)


@either
def test_every_prompt_of_a_run_is_admitted_once_and_none_of_a_later_step(how: str) -> None:
    draws = Counter(
        prompt.sample_id
        for replica in range(REPLICAS)
        for found in [admission(how, replica)]
        for step in STEPS
        for prompt in found.admit(step).prompts
    )
    assert draws == Counter(prompt.sample_id for step in STEPS for prompt in DATA.batch(step))


@either
def test_uneven_replicas_admit_every_prompt_once_and_fill_every_row(how: str) -> None:
    """Of 64 rows five replicas have 13, 13, 13, 13 and 12."""
    draws, rows = Counter[int](), list[int]()
    for replica in range(5):
        found = Admission(plan(how, 5), DATA, replica, STEPS)
        draws.update(prompt.sample_id for step in STEPS for prompt in found.admit(step).prompts)
        rows += found.rows([answered(prompt) for prompt in replica_share(DATA.batch(4), replica, 5)])
    assert draws == Counter(prompt.sample_id for step in STEPS for prompt in DATA.batch(step))
    assert sorted(rows) == list(range(BATCH))


def test_the_order_of_a_replicas_prompts_does_not_depend_on_what_stays_in_flight() -> None:
    orders = [[p.sample_id for step in STEPS for p in found.admit(step).prompts] for found in map(admission, SCHEDULES)]
    assert orders[0] == orders[1] == orders[2]


def test_batches_in_flight_are_admitted_at_first_and_none_at_the_end() -> None:
    found = admission("three batches in flight")
    numbers = [len(found.admit(step).prompts) for step in STEPS]
    assert numbers == [3 * PER_STEP, *[PER_STEP] * (len(STEPS) - 3), 0, 0]


def test_sequences_that_are_held_back_become_one_more_each_step_and_never_more_than_the_plans() -> None:
    steps = range(STEPS.start, STEPS.start + 20)
    found, beyond = admission("overcommit", steps=steps), []
    for number, step in enumerate(steps, start=1):
        found.admit(step)
        beyond.append(found.num_admitted - (steps.start + number) * PER_STEP)
    assert beyond == [*range(1, 9), *[8] * 11, 0]


@either
def test_an_admission_that_is_resumed_goes_on_as_the_one_before_it(how: str) -> None:
    whole, stopped = admission(how), STEPS.start + 4
    for step in range(STEPS.start, stopped):
        delivered = [answered(prompt, 5 + prompt.row % 3) for prompt in DATA.batch(step)[::REPLICAS]]
        whole.admit(step)
        whole.record_delivered(delivered[:-1])
    later = admission(how, steps=range(stopped, STEPS.stop))
    later.restore(whole.num_admitted, whole.mean_response_tokens, whole.partial_batches)
    for step in range(stopped, STEPS.stop):
        assert later.admit(step) == whole.admit(step)
        assert later.num_admitted == whole.num_admitted
    assert later.partial_batches == whole.partial_batches != ()


def test_what_was_drawn_for_a_batch_is_told_when_its_last_response_is_delivered() -> None:
    found = admission("overcommit")
    mine = replica_share(DATA.batch(4), 0, REPLICAS)
    other = replica_share(DATA.batch(5), 0, REPLICAS)
    assert found.record_delivered([answered(prompt) for prompt in (*mine[:-1], other[0])]) == {}
    assert found.partial_batches == ((4, PER_STEP - 1, 4 * (PER_STEP - 1)), (5, 1, 4))
    told = found.record_delivered([answered(mine[-1], 30)])
    assert told == {NUM_SAMPLES: PER_STEP, NUM_SAMPLED_TOKENS: 4.0 * (PER_STEP - 1) + 30}
    assert found.partial_batches == ((5, 1, 4),)


def test_a_turn_waits_for_all_for_its_step_or_for_those_that_end_first() -> None:
    step = STEPS.start
    assert admission("in turns").admit(step).delivery == AllSequences()
    assert admission("three batches in flight").admit(step).delivery == WholeStep(step)
    assert admission("overcommit").admit(step).delivery == FirstEnded(count=PER_STEP, max_deferral=2)


def test_responses_of_one_step_keep_their_rows_and_those_of_several_fill_the_replicas() -> None:
    responses = [answered(prompt) for prompt in replica_share(DATA.batch(4), 1, REPLICAS)]
    assert admission("in turns", 1).rows(responses) == tuple(response.row for response in responses)
    assert admission("overcommit", 1).rows(responses) == tuple(range(1, BATCH, REPLICAS))


def test_replicas_share_prompts_by_their_lengths() -> None:
    prompts = DATA.batch(4)
    shares = [replica_share(prompts, replica, REPLICAS) for replica in range(REPLICAS)]
    assert sorted(prompt.row for share in shares for prompt in share) == list(range(BATCH))
    for share in shares:
        lengths = [len(prompt.tokens) for prompt in share]
        assert lengths == sorted(lengths)
