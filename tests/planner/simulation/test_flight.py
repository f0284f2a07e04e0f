"""Sequences from turn to turn: the runtime's own bookkeeping delivers the same ones, and none is lost or starves."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from meshwright.planner.simulation.flight import Drawn, SimulatedFlight, Turn, first_ended, whole_step
from meshwright.planner.simulation.generated import generation_seconds
from meshwright.planner.simulation.round_times import Grid, RoundTimes
from meshwright.runtime.generation import slots, turn_rules

_AXES = np.array([1.0, 1024.0]), np.array([1.0, 10_000.0])
TIMES = RoundTimes(
    prefill=Grid(*_AXES, np.array([[3.0, 5.0], [40.0, 90.0]])), round_=Grid(*_AXES, np.array([[1.0, 2.0], [5.0, 9.0]]))
)

ROWS, DEFERRAL = 8, 3


def batch(seed: int, step: int) -> list[Drawn]:
    """Long-tailed responses."""
    draw = random.Random(f"{seed} {step}")
    return [
        Drawn(
            step=step, row=row, prompt_tokens=draw.randint(1, 9), response_tokens=min(90, int(draw.paretovariate(0.7)))
        )
        for row in range(ROWS)
    ]


def admissions(seed: int, ahead: int, num_turns: int) -> Iterator[list[Drawn]]:
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
) -> list[Turn]:
    flight = SimulatedFlight(num_slots, num_stages, TIMES)
    return [
        flight.play(admitted, first_ended(ROWS, DEFERRAL) if extra else whole_step(step), least_rounds)
        for step, admitted in enumerate(admissions(seed, extra or (batches - 1) * ROWS, num_turns))
    ]


class RuntimesFlight:
    """The runtime's slots, flight and delivery, with tokens that nothing has computed: its generator's turn."""

    def __init__(self, num_slots: int, num_stages: int) -> None:
        self._flight = turn_rules.Flight(slots.cut_slots(num_slots, min(num_stages, num_slots)))
        self._drawn: set[int] = set()

    def turn(
        self, admitted: Sequence[slots.Prompt], delivery: turn_rules.Delivery, least_rounds: int
    ) -> tuple[slots.Response, ...]:
        self._flight.begin(admitted, least_rounds)
        rotation = itertools.cycle(self._flight.groups)
        delivered = self._flight.deliver(delivery)
        while delivered is None:
            group = next(rotation)
            if self._learn(group) or self._flight.num_rounds == least_rounds:
                delivered = self._flight.deliver(delivery)
            if delivered is None:
                group.admit(self._flight.waiting, self._flight.turn)
                if group.live:
                    self._drawn.add(group.first_slot)
                self._flight.num_rounds += group is self._flight.groups[-1]
        for group in itertools.islice(rotation, len(self._flight.groups)):
            self._learn(group)
        return delivered

    def _learn(self, group: slots.SlotGroup) -> bool:
        if group.first_slot not in self._drawn:
            return False
        self._drawn.remove(group.first_slot)
        count = len(group.live)
        responses, _ = group.record([0] * count, [0.0] * count, version=self._flight.turn, finish=_by_length)
        self._flight.ended += responses
        return bool(responses)


def _by_length(sequence: slots.LiveSequence) -> slots.Finish | None:
    return slots.Finish.LENGTH if len(sequence.tokens) == sequence.prompt.max_response else None


def prompt_of(one: Drawn) -> slots.Prompt:
    tokens = (0,) * one.prompt_tokens
    return slots.Prompt(row=one.row, draw=0, tokens=tokens, step=one.step, max_response=one.response_tokens)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("num_slots", [2, 5, 8, 24])
@pytest.mark.parametrize(("batches", "extra"), [(2, 0), (4, 0), (1, 2), (1, 8)])
@pytest.mark.parametrize("least_rounds", [0, 7, 40])
def test_it_delivers_what_the_runtime_delivers_token_by_token(
    num_stages: int, num_slots: int, batches: int, extra: int, least_rounds: int
) -> None:
    ours = play(num_slots, num_slots, num_stages, batches=batches, extra=extra, least_rounds=least_rounds, num_turns=25)
    theirs = RuntimesFlight(num_slots, num_stages)
    for step, admitted in enumerate(admissions(num_slots, extra or (batches - 1) * ROWS, 25)):
        delivery = turn_rules.FirstEnded(ROWS, DEFERRAL) if extra else turn_rules.WholeStep(step)
        responses = theirs.turn([prompt_of(one) for one in admitted], delivery, least_rounds)
        assert [(one.step, one.row) for one in ours[step].delivered] == [(r.step, r.row) for r in responses]
        assert [one.tokens_by_turn() for one in ours[step].delivered] == [Counter(r.versions) for r in responses]


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
            assert number - one.first_turn <= (DEFERRAL if extra else batches - 1)
            assert sum(one.tokens_by_turn().values()) == one.response_tokens


def test_a_batch_alone_takes_what_it_takes_without_carrying_over() -> None:
    for step in range(10):
        alone = batch(3, step)
        turn = SimulatedFlight(5, 1, TIMES).play(alone, whole_step(step))
        prompts, responses = (
            np.array([getattr(one, name) for one in alone]) for name in ("prompt_tokens", "response_tokens")
        )
        assert turn.seconds == pytest.approx(generation_seconds(prompts, responses, 5, 1, TIMES))


def test_live_sequences_are_counted_over_the_rounds_of_a_turn() -> None:
    # Rounds 1-2 have two sequences, rounds 3-6 the longer one.
    both = [Drawn(step=0, row=row, prompt_tokens=1, response_tokens=tokens) for row, tokens in enumerate((2, 6))]
    assert SimulatedFlight(2, 1, TIMES).play(both, whole_step(0)).live == pytest.approx(8 / 6)


def test_what_is_under_way_makes_the_next_turn_shorter() -> None:
    # One response of 9 tokens in each batch of two: in its own turn it has 8 to go when the short one has ended.
    def batches(step: int) -> list[Drawn]:
        return [Drawn(step=step, row=row, prompt_tokens=1, response_tokens=tokens) for row, tokens in enumerate((1, 9))]

    flight = SimulatedFlight(4, 1, TIMES)
    lone = flight.play([*batches(0), *batches(1)], whole_step(0))
    following = flight.play(batches(2), whole_step(1))
    assert following.seconds == 0
    assert {one.step for one in following.delivered} == {1}
    assert lone.seconds > 0


@pytest.mark.parametrize("least_rounds", [0, 12])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_responses_that_begin_together_end_in_every_second_turn_unless_turns_keep_a_pace(
    least_rounds: int, num_stages: int
) -> None:
    flight, length = SimulatedFlight(2 * ROWS, num_stages, TIMES), 24

    def batch_of(step: int) -> list[Drawn]:
        return [Drawn(step=step, row=row, prompt_tokens=1, response_tokens=length) for row in range(ROWS)]

    rounds = []
    for step in range(10):
        flight.play([*(batch_of(0) if step == 0 else ()), *batch_of(step + 1)], whole_step(step), least_rounds)
        rounds.append(flight.num_rounds)
    assert rounds == ([24] + [12] * 9 if least_rounds else [24, 0] * 5)


def test_a_turn_goes_on_for_its_pace_only_while_something_is_left_to_draw() -> None:
    flight = SimulatedFlight(8, 1, TIMES)
    flight.play([Drawn(step=0, row=0, prompt_tokens=1, response_tokens=3)], whole_step(0), 90)
    assert flight.num_rounds == 3
