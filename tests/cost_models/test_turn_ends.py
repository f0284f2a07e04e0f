"""Turns end by what they deliver, each replica by its own sequences; that a flight ends them so is tested with it."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.cost_models import steady_state
from meshwright.cost_models.period_ends import PeriodEnds
from meshwright.cost_models.rounds import Batch
from meshwright.cost_models.steady_state import Overlap, SteadyState, period_bounds, simulate_periods
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.workload import Workload


def ends(max_deferral: int | None, *admitted: list[list[int]]) -> list[list[int]]:
    """The bounds of turns of two rows, [replica, turn]; what is admitted to each ends in the rounds given, and starts
    when it is admitted."""
    turns = PeriodEnds(len(admitted[0]), 2, max_deferral)
    for rounds in admitted:
        end = np.array(rounds)
        turns.add(np.repeat(turns.bounds[:, -1:], end.shape[1], axis=1), end)
        turns.end_period()
    found: list[list[int]] = turns.bounds.tolist()
    return found


def test_in_order_a_turn_waits_for_the_last_of_its_own_batch_and_for_no_other() -> None:
    assert ends(None, [[3, 9, 1, 2], [1, 2, 30, 40]], [[10, 11], [50, 60]]) == [[0, 9, 9], [0, 2, 40]]


def test_with_deferral_a_turn_takes_the_first_to_end_and_waits_for_what_is_due() -> None:
    # Of 3, 90, 1 the two short ones are delivered; in the next turn 90 is not due yet, and in the one after it is.
    admitted = [[3, 90, 1]], [[5, 7]], [[8, 9]]
    assert ends(2, *admitted) == [[0, 3, 7, 90]]
    assert ends(1, *admitted) == [[0, 3, 90, 90]]


def test_a_period_takes_its_minimum_of_rounds_while_tokens_are_left() -> None:
    periods = PeriodEnds(1, 2, 2, min_rounds=20)
    for rounds in ([3, 90, 1], [25, 27], [26, 91]):
        periods.add(np.repeat(periods.bounds[:, -1:], len(rounds), axis=1), np.array([rounds]))
        periods.end_period()
    assert periods.bounds.tolist() == [[0, 20, 40, 90]]
    alone = PeriodEnds(1, 2, 2, min_rounds=20)
    alone.add(np.zeros((1, 2), dtype=np.int64), np.array([[3, 5]]))
    assert alone.end_period().tolist() == [5]


@pytest.mark.check_all
@pytest.mark.parametrize("max_deferral", [1, 2])
@pytest.mark.parametrize(("batch_size", "num_replicas"), [(8, 1), (8, 2), (16, 4), (64, 2)])
def test_periods_of_small_batches_are_as_long_as_those_of_many_random_ones(
    batch_size: int, num_replicas: int, max_deferral: int
) -> None:
    """The medians of a few strata of a long tail have too few tokens, and replicas go on for a minimum of rounds: with
    overcommit, periods of few rows were predicted up to 18 % too short."""
    workload = _workload(response=LengthSpec(max=4096, median=384, p99=3500), batch_size=batch_size)
    num_rows, law = batch_size // num_replicas, SteadyState(workload)
    for overcommit in (max(1, num_rows // 4), num_rows):
        overlap = Overlap(overcommit=overcommit, max_deferral=max_deferral)
        num_slots, num_periods = num_rows + overcommit, 1000
        shape = num_replicas, num_slots + num_periods * num_rows
        responses = workload.response_lengths.stratified_sample(shape[0] * shape[1])
        bounds = period_bounds(
            np.random.default_rng(1).permutation(responses).reshape(shape),
            num_slots=num_slots,
            num_rows=num_rows,
            in_flight=num_slots,
            num_periods=num_periods,
            max_deferral=max_deferral,
            min_rounds=int(law.unpaced_rounds(num_rows, num_slots, overlap)) if num_replicas > 1 else 0,
        )
        found = np.diff(bounds)[:, 40:].max(axis=0).mean()
        assert law.rounds(num_rows, num_slots, overlap).num_rounds == pytest.approx(found, rel=0.05)


SETTINGS = [
    (24, Overlap()),
    (24, Overlap(batches_in_flight=3)),
    (40, Overlap(batches_in_flight=2)),
    (24, Overlap(overcommit=6, max_deferral=1)),
    (30, Overlap(overcommit=12, max_deferral=3)),
]


@pytest.mark.parametrize(("num_slots", "overlap"), SETTINGS)
def test_replicas_side_by_side_take_the_turns_of_each_alone(num_slots: int, overlap: Overlap) -> None:
    num_rows, num_turns = 24, 9
    in_flight = overlap.in_flight(num_rows)
    drawn = np.random.default_rng(3).choice([2, 9, 30, 200], size=(5, in_flight + num_turns * num_rows))
    found = period_bounds(
        drawn,
        num_slots=num_slots,
        num_rows=num_rows,
        in_flight=in_flight,
        num_periods=num_turns,
        max_deferral=overlap.deferral,
    )
    for responses, bounds in zip(drawn, found.tolist(), strict=True):
        batches = _batches(responses, num_rows)
        assert bounds == simulate_periods(batches, num_slots, num_turns, overlap).bounds


def test_replicas_whose_responses_are_alike_are_not_played(monkeypatch: pytest.MonkeyPatch) -> None:
    for plays in ("simulate_periods", "period_bounds"):
        monkeypatch.setattr(steady_state, plays, lambda *_, **__: pytest.fail("a replica was played"))
    for num_replicas in (4, 16):
        fixed = _workload(response=LengthSpec(max=64, fixed=64), batch_size=32 * num_replicas)
        assert SteadyState(fixed).rounds(32, 8, Overlap()).num_rounds == 4 * 64


@pytest.mark.parametrize("overlap", [Overlap(batches_in_flight=2), Overlap(overcommit=16, max_deferral=2)], ids=str)
def test_replicas_are_played_until_they_are_as_slow_as_is_enough(
    monkeypatch: pytest.MonkeyPatch, overlap: Overlap
) -> None:
    played = _counting_plays(monkeypatch)
    shares = steady_state.sampled_responses(
        _workload(response=LengthSpec(max=512, median=60, p99=500), batch_size=256), 32
    )

    def slowest(enough: float) -> tuple[float, int]:
        played.clear()
        return steady_state._slowest_rounds(shares, 8, 24, overlap, stop_at=enough), len(played)

    whole, num_whole = slowest(np.inf)
    one, num_one = slowest(0.0)
    assert (num_whole, num_one) == (8, 1)
    assert one <= whole
    assert slowest(0.9 * whole)[0] >= 0.9 * whole
    assert slowest(1.1 * whole) == (whole, 8)


def test_an_overcommit_of_a_whole_batch_plays_its_half_and_what_is_half_of_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played = _counting_plays(monkeypatch)
    workload = _workload(response=LengthSpec(max=512, median=60, p99=500), batch_size=128)
    SteadyState(workload).rounds(64, 96, Overlap(overcommit=64, max_deferral=2))
    assert {overlap.overcommit for overlap in played} <= {8, 16, 32, 64}
    # The mean replica, and two with and without pacing, of four overcommits and two deferrals.
    assert len(played) <= 5 * 4 * 2


def test_of_very_many_replicas_a_sample_stands_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = _workload(response=LengthSpec(max=512, median=60, p99=500), batch_size=8192)
    all_played = SteadyState(workload).rounds(32, 16, Overlap(batches_in_flight=2)).num_rounds
    monkeypatch.setattr(steady_state, "_MAX_SEQUENCES", 2048)
    assert steady_state.sampled_responses(workload, 32).shape == (8, 64, 32)
    assert SteadyState(workload).rounds(32, 16, Overlap(batches_in_flight=2)).num_rounds == pytest.approx(
        all_played, rel=0.03
    )


@pytest.mark.parametrize(("num_rows", "num_replicas"), [(8, 1), (4, 2), (3, 3), (2, 4)])
def test_replicas_that_are_played_hold_a_whole_batch(num_rows: int, num_replicas: int) -> None:
    workload = _workload(response=LengthSpec(max=512, median=60, p99=500), batch_size=8)
    assert steady_state.sampled_responses(workload, num_rows).shape[1:] == (num_replicas, num_rows)


def _counting_plays(monkeypatch: pytest.MonkeyPatch) -> list[Overlap]:
    """The settings that are played from now on, one after the other."""
    played: list[Overlap] = []

    def counted(
        batches: tuple[Batch, ...], num_slots: int, num_turns: int, overlap: Overlap, *, min_rounds: int = 0
    ) -> steady_state.SimulatedPeriods:
        played.append(overlap)
        return simulate_periods(batches, num_slots, num_turns, overlap, min_rounds=min_rounds)

    monkeypatch.setattr(steady_state, "simulate_periods", counted)
    return played


def _batches(responses: np.ndarray, num_rows: int) -> tuple[Batch, ...]:
    """All whole batches of a stream of responses."""
    whole = responses[: len(responses) // num_rows * num_rows].reshape(-1, num_rows)
    return tuple(Batch(rows, rows) for rows in whole)


def _workload(*, response: LengthSpec, batch_size: int) -> Workload:
    return Workload(batch_size=batch_size, prompt=LengthSpec(max=16, fixed=16), response=response)
