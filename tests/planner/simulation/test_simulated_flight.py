"""Sequences from turn to turn: the runtime's own bookkeeping delivers the same ones, and none is lost or starves."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from meshwright.cost_models.period_ends import DeliveryRule, FirstEnded, WholeStep
from meshwright.planner.simulation.flight import Flight
from meshwright.planner.simulation.simulated_flight import (
    Grid,
    PeriodResult,
    RoundTimes,
    SimulatedFlight,
    SimulatedSequence,
)
from meshwright.planner.simulation.simulated_generation import simulate_batch
from meshwright.runtime.inference.slots import Finish, LiveGroup, PartialResponse, Prompt, Response
from tests.seeds import cases

_AXES = np.array([1.0, 1024.0]), np.array([1.0, 10_000.0])
TIMES = RoundTimes(
    prefill=Grid(*_AXES, np.array([[3.0, 5.0], [40.0, 90.0]])), round_=Grid(*_AXES, np.array([[1.0, 2.0], [5.0, 9.0]]))
)

ROWS, DEFERRAL = 8, 3


def batch(seed: int, step: int) -> list[SimulatedSequence]:
    """Long-tailed responses."""
    draw = random.Random(f"{seed} {step}")
    return [
        SimulatedSequence(
            step=step, row=row, prompt_tokens=draw.randint(1, 9), response_tokens=min(90, int(draw.paretovariate(0.7)))
        )
        for row in range(ROWS)
    ]


def admissions(seed: int, ahead: int, num_turns: int) -> Iterator[list[SimulatedSequence]]:
    """The new prompts of each turn, when `ahead` are in flight beyond a batch."""
    arriving = itertools.chain.from_iterable(batch(seed, step) for step in itertools.count())
    yield list(itertools.islice(arriving, ROWS + ahead))
    for _ in range(num_turns - 1):
        yield list(itertools.islice(arriving, ROWS))


def play(
    seed: int,
    num_slots: int,
    num_stages: int,
    *,
    batches: int = 1,
    extra: int = 0,
    least_rounds: int = 0,
    num_turns: int,
) -> list[PeriodResult]:
    flight = SimulatedFlight(num_slots, num_stages, TIMES)
    return [
        flight.run_period(admitted, FirstEnded(ROWS, DEFERRAL) if extra else WholeStep(step), least_rounds)
        for step, admitted in enumerate(admissions(seed, extra or (batches - 1) * ROWS, num_turns))
    ]


class RuntimesFlight:
    """The runtime's slots in a flight, with tokens that nothing has computed: its generator's turn."""

    def __init__(self, num_slots: int, num_stages: int) -> None:
        self._flight: Flight[Prompt, LiveGroup, Response] = Flight(LiveGroup.split(num_slots, num_stages))
        self._drawn: set[int] = set()

    def turn(self, admitted: Sequence[Prompt], delivery: DeliveryRule, least_rounds: int) -> tuple[Response, ...]:
        return self._flight.run_period(
            admitted, delivery, process_sampled=self._learn, step=self._advance, min_rounds=least_rounds
        )

    def _learn(self, group: LiveGroup) -> list[Response]:
        if group.first_slot not in self._drawn:
            return []
        self._drawn.remove(group.first_slot)
        zeros = np.zeros(len(group.live))
        responses, _ = group.record(zeros.astype(int), zeros, version=self._flight.period, finish=_by_length)
        return responses

    def _advance(self, group: LiveGroup) -> int:
        num_admitted, waiting = 0, self._flight.waiting
        while waiting and not group.is_full:
            group.add(PartialResponse(prompt=waiting.popleft(), first_period=self._flight.period))
            num_admitted += 1
        if group.live:
            self._drawn.add(group.first_slot)
        return num_admitted


def _by_length(group: LiveGroup) -> dict[int, Finish]:
    records, rows = group.records, group.rows
    return dict.fromkeys(np.flatnonzero(records.num_sampled[rows] == records.max_tokens[rows]).tolist(), Finish.LENGTH)


def prompt_of(one: SimulatedSequence) -> Prompt:
    tokens = (0,) * one.prompt_tokens
    return Prompt(row=one.row, sample_id=0, tokens=tokens, step=one.step, max_response=one.response_tokens)


@cases("num_stages", [1, 3, 2], few=2)
@cases("num_slots", [5, 24, 2, 8], few=2)
@pytest.mark.parametrize(("batches", "extra"), [(2, 0), (4, 0), (1, 2), (1, 8)])
@cases("least_rounds", [0, 40, 7], few=2)
def test_it_delivers_what_the_runtime_delivers_token_by_token(
    num_stages: int, num_slots: int, batches: int, extra: int, least_rounds: int
) -> None:
    ours = play(num_slots, num_slots, num_stages, batches=batches, extra=extra, least_rounds=least_rounds, num_turns=25)
    theirs = RuntimesFlight(num_slots, num_stages)
    for step, admitted in enumerate(admissions(num_slots, extra or (batches - 1) * ROWS, 25)):
        delivery = FirstEnded(ROWS, DEFERRAL) if extra else WholeStep(step)
        responses = theirs.turn([prompt_of(one) for one in admitted], delivery, least_rounds)
        assert [(one.step, one.row) for one in ours[step].delivered] == [(r.step, r.row) for r in responses]
        assert [one.tokens_by_period() for one in ours[step].delivered] == [Counter(r.versions) for r in responses]


@pytest.mark.parametrize("least_rounds", [0, 20])
@pytest.mark.parametrize(("batches", "extra"), [(2, 0), (4, 0), (1, 2), (1, 8)])
def test_over_many_turns_no_sequence_is_lost_delivered_twice_or_starves(
    batches: int, extra: int, least_rounds: int
) -> None:
    played = play(7, 6, 2, batches=batches, extra=extra, least_rounds=least_rounds, num_turns=500)
    delivered = [(one.step, one.row) for turn in played for one in turn.delivered]
    assert max(Counter(delivered).values()) == 1
    assert [len(turn.delivered) for turn in played] == [ROWS] * 500
    ahead = extra or (batches - 1) * ROWS
    admitted = [(one.step, one.row) for some in admissions(7, ahead, 500) for one in some]
    missing = set(admitted) - set(delivered)
    assert set(delivered) <= set(admitted)
    assert len(missing) == ahead
    assert min(step for step, _ in missing) >= 500 - DEFERRAL - -(-ahead // ROWS)
    for number, turn in enumerate(played):
        for one in turn.delivered:
            assert number - one.first_period <= (DEFERRAL if extra else batches - 1)
            assert sum(one.tokens_by_period().values()) == one.response_tokens


def test_a_batch_alone_takes_what_it_takes_without_carrying_over() -> None:
    for step in range(10):
        alone = batch(3, step)
        turn = SimulatedFlight(5, 1, TIMES).run_period(alone, WholeStep(step))
        prompts, responses = (
            np.array([getattr(one, name) for one in alone]) for name in ("prompt_tokens", "response_tokens")
        )
        expected = simulate_batch(prompts, responses, 5, 1, TIMES)
        assert turn.seconds == pytest.approx(expected.seconds)
        assert turn.live == pytest.approx(expected.live)
        assert turn.held.peak == expected.held.peak
        assert turn.held.mean == pytest.approx(expected.held.mean, rel=0.01)


def test_live_sequences_are_counted_over_the_rounds_of_a_turn() -> None:
    # Rounds 1-2 have two sequences, rounds 3-6 the longer one.
    both = [
        SimulatedSequence(step=0, row=row, prompt_tokens=1, response_tokens=tokens) for row, tokens in enumerate((2, 6))
    ]
    assert SimulatedFlight(2, 1, TIMES).run_period(both, WholeStep(0)).live == pytest.approx(8 / 6)


def test_what_is_under_way_makes_the_next_turn_shorter() -> None:
    # One response of 9 tokens in each batch of two: in its own turn it has 8 to go when the short one has ended.
    def batches(step: int) -> list[SimulatedSequence]:
        return [
            SimulatedSequence(step=step, row=row, prompt_tokens=1, response_tokens=tokens)
            for row, tokens in enumerate((1, 9))
        ]

    flight = SimulatedFlight(4, 1, TIMES)
    lone = flight.run_period([*batches(0), *batches(1)], WholeStep(0))
    following = flight.run_period(batches(2), WholeStep(1))
    assert following.seconds == 0
    assert {one.step for one in following.delivered} == {1}
    assert lone.seconds > 0


@pytest.mark.parametrize("least_rounds", [0, 12])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_responses_that_begin_together_end_in_every_second_turn_unless_turns_keep_a_pace(
    least_rounds: int, num_stages: int
) -> None:
    flight, length = SimulatedFlight(2 * ROWS, num_stages, TIMES), 24

    def batch_of(step: int) -> list[SimulatedSequence]:
        return [SimulatedSequence(step=step, row=row, prompt_tokens=1, response_tokens=length) for row in range(ROWS)]

    rounds = []
    for step in range(10):
        flight.run_period([*(batch_of(0) if step == 0 else ()), *batch_of(step + 1)], WholeStep(step), least_rounds)
        rounds.append(flight.num_rounds)
    assert rounds == ([24] + [12] * 9 if least_rounds else [24, 0] * 5)


def test_a_turn_goes_on_for_its_pace_only_while_something_is_left_to_draw() -> None:
    flight = SimulatedFlight(8, 1, TIMES)
    flight.run_period([SimulatedSequence(step=0, row=0, prompt_tokens=1, response_tokens=3)], WholeStep(0), 90)
    assert flight.num_rounds == 3
