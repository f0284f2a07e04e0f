"""How a period ends: what it waits for, what it delivers first, and that the cost model's turns end as these do."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import accumulate, islice, product

import numpy as np
import pytest

from meshwright.cost_models.period_ends import AllSequences, FirstEnded, WholeStep
from meshwright.cost_models.rounds import Batch
from meshwright.cost_models.steady_state import Overlap, period_bounds, simulate_periods
from meshwright.planner.simulation.flight import Flight
from meshwright.planner.simulation.simulated_flight import SimulatedFlight, SimulatedGroup, SimulatedSequence
from meshwright.profiles.errors import BadInput
from tests.planner.simulation.test_simulated_flight import TIMES


def sequence(row: int, *, step: int = 0, first_period: int = 0) -> SimulatedSequence:
    return SimulatedSequence(step=step, row=row, prompt_tokens=1, response_tokens=1, first_period=first_period)


def flight(
    *,
    ended: Iterable[SimulatedSequence] = (),
    live: Iterable[SimulatedSequence] = (),
    waiting: Iterable[SimulatedSequence] = (),
    period: int = 0,
) -> Flight[SimulatedSequence, SimulatedGroup, SimulatedSequence]:
    """In the middle of a period."""
    group = SimulatedGroup(0, 8)
    group.live.extend(live)
    found: Flight[SimulatedSequence, SimulatedGroup, SimulatedSequence] = Flight([group])
    found.resume(period, waiting, ended)
    return found


def rows(delivered: Sequence[SimulatedSequence] | None) -> list[int] | None:
    return None if delivered is None else [one.row for one in delivered]


def test_a_synchronous_turn_waits_for_everything() -> None:
    assert AllSequences()(flight(ended=[sequence(0)], live=[sequence(1)])) is None
    assert rows(AllSequences()(flight(ended=[sequence(1), sequence(0)]))) == [1, 0]


def test_a_turn_for_a_step_waits_for_no_later_step() -> None:
    found = flight(ended=[sequence(3, step=1), sequence(0)], live=[sequence(4, step=1)])
    assert rows(WholeStep(0)(found)) == [0]
    assert WholeStep(1)(found) is None


def test_a_prompt_that_waits_for_a_slot_holds_its_step_back() -> None:
    assert WholeStep(0)(flight(ended=[sequence(0)], waiting=[sequence(1)])) is None


def test_what_is_delivered_leaves_the_flight_in_order_and_what_is_not_stays() -> None:
    found = flight(ended=[sequence(3, step=1), sequence(2), sequence(0)])
    delivered = found.run_period((), WholeStep(0), process_sampled=lambda _: (), step=lambda _: 0)
    assert (rows(delivered), rows(found.ended), found.period) == ([0, 2], [3], 1)


def test_those_that_ended_first_are_delivered_first_but_due_ones_before_them() -> None:
    ended = [sequence(5, first_period=3), sequence(6, first_period=3), sequence(7, first_period=2)]
    assert rows(FirstEnded(2, max_deferral=1)(flight(ended=ended, period=3))) == [5, 7]


@pytest.mark.parametrize(("max_deferral", "delivered"), [(1, None), (2, [0, 1])])
def test_a_turn_does_not_end_before_a_due_sequence_has(max_deferral: int, delivered: list[int] | None) -> None:
    ended = [sequence(row, first_period=3) for row in range(4)]
    found = flight(ended=ended, live=[sequence(9, first_period=2)], period=3)
    assert rows(FirstEnded(2, max_deferral)(found)) == delivered


def test_the_last_turns_deliver_what_is_left() -> None:
    assert rows(FirstEnded(4, max_deferral=1)(flight(ended=[sequence(0)], period=9))) == [0]
    assert rows(FirstEnded(4, max_deferral=1)(flight(period=9))) == []


def test_more_due_sequences_than_a_batch_holds_get_a_sentence() -> None:
    with pytest.raises(BadInput, match="3 sequences are due in one period that delivers 2"):
        FirstEnded(2, max_deferral=1)(flight(ended=[sequence(row) for row in range(3)], period=1))


NUM_ROWS, NUM_TURNS = 8, 12
OVERLAPS = [
    *(Overlap(batches_in_flight=batches) for batches in (1, 2, 3)),
    *(Overlap(overcommit=extra, max_deferral=turns) for extra in (1, 4, 8) for turns in (1, 2, 3)),
]


@pytest.mark.parametrize("num_slots", [2, 5, 8, 12, 100])
@pytest.mark.parametrize("overlap", OVERLAPS, ids=str)
def test_the_cost_model_ends_turns_in_the_rounds_in_which_a_flight_ends_them(overlap: Overlap, num_slots: int) -> None:
    """It plays them as arithmetic on the rounds in which sequences start and end, without slots that are filled."""
    draw = random.Random(f"{overlap} {num_slots}")
    lengths = [min(60, int(draw.paretovariate(0.7))) for _ in range((NUM_TURNS + 3) * NUM_ROWS)]
    batches = np.array(lengths).reshape(-1, NUM_ROWS)
    played = simulate_periods(tuple(Batch(rows, rows) for rows in batches), num_slots, NUM_TURNS, overlap)

    assert played.bounds == [0, *accumulate(_rounds_of_a_flight(batches, num_slots, overlap, NUM_TURNS))]


@pytest.mark.parametrize("num_slots", [1, 2, 4])
@pytest.mark.parametrize(
    "overlap",
    [
        Overlap(),
        Overlap(batches_in_flight=2),
        *(Overlap(overcommit=extra, max_deferral=turns) for extra in (1, 2) for turns in (1, 2)),
    ],
    ids=str,
)
def test_every_small_flight_ends_its_turns_when_the_arrays_do(overlap: Overlap, num_slots: int) -> None:
    """All orders of short and long sequences, two rows a period, in three turns; the arrays have a case in each row."""
    num_rows, num_turns = 2, 3
    in_flight = overlap.in_flight(num_rows)
    cases = np.array(list(product((1, 3), repeat=in_flight + (num_turns - 1) * num_rows)))
    bounds = period_bounds(
        cases,
        num_slots=num_slots,
        num_rows=num_rows,
        in_flight=in_flight,
        num_periods=num_turns,
        max_deferral=overlap.deferral,
    )
    for case, ends in zip(cases, bounds.tolist(), strict=True):
        batches = np.resize(case, (len(case) // num_rows + 1, num_rows))
        assert ends == [0, *accumulate(_rounds_of_a_flight(batches, num_slots, overlap, num_turns))], case


def _rounds_of_a_flight(batches: np.ndarray, num_slots: int, overlap: Overlap, num_turns: int) -> list[int]:
    """The rounds of each period of a flight whose responses have these lengths, [batch, row]."""
    num_rows = batches.shape[1]
    arriving = (
        SimulatedSequence(step=step, row=row, prompt_tokens=1, response_tokens=int(tokens))
        for step, of_step in enumerate(batches)
        for row, tokens in enumerate(of_step)
    )
    simulated, num_rounds = SimulatedFlight(num_slots, 1, TIMES), []
    for period in range(num_turns):
        admitted = list(islice(arriving, num_rows if period else overlap.in_flight(num_rows)))
        simulated.run_period(
            admitted, FirstEnded(num_rows, overlap.max_deferral) if overlap.overcommit else WholeStep(period)
        )
        num_rounds.append(simulated.num_rounds)
    return num_rounds
