"""Generation that runs on from turn to turn: batches in flight, and overcommitted prompts."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.protocol import StageQuery
from meshwright.cost_models.rounds import Batch, batch_rounds, replica_responses
from meshwright.cost_models.steady_state import Overlap, SteadyState, simulate_periods, whole_steps
from meshwright.profiles.errors import BadInput
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.workload import Workload
from tests.seeds import cases

BATCHES = [Overlap(batches_in_flight=b) for b in (1, 2, 3, 5)]
OVERCOMMITS = [Overlap(overcommit=extra, max_deferral=d) for extra in (8, 24, 64) for d in (1, 2, 3)]


@pytest.mark.parametrize("num_slots", [64, 200])
def test_one_batch_in_flight_is_synchronous(long_tail: Workload, num_slots: int) -> None:
    assert SteadyState(long_tail).rounds(64, num_slots, Overlap()) == batch_rounds(long_tail, 64, 64)


@pytest.mark.parametrize("num_slots", [1, 4, 16])
def test_synchronous_replicas_whose_sequences_wait_for_slots_wait_for_the_slowest(
    long_tail: Workload, num_slots: int
) -> None:
    played = _played_as_drawn(long_tail, 8, 64, num_slots, Overlap())
    slowest, mean = np.diff(played).max(axis=0).mean(), np.diff(played).mean()
    found = SteadyState(long_tail).rounds(64, num_slots, Overlap())
    assert found.num_rounds == pytest.approx(slowest, rel=0.05)
    assert found.num_rounds > 1.1 * mean
    work = [
        sum(w.rounds * w.live for w in rounds.windows) for rounds in (found, batch_rounds(long_tail, 64, num_slots))
    ]
    assert work[0] == pytest.approx(work[1])


@cases("num_slots", [16, 100, 4, 64, 320], few=2)
@pytest.mark.parametrize("overlap", [*BATCHES, *OVERCOMMITS], ids=str)
def test_a_turn_does_one_batchs_work_and_never_in_fewer_rounds_than_its_slots_allow(
    long_tail: Workload, overlap: Overlap, num_slots: int
) -> None:
    lengths = long_tail.response_lengths
    is_alone = overlap.in_flight(64) == 64  # its replica waits for the longest response of all
    alone = float(replica_responses(lengths, long_tail.batch_size, 64).sum())
    num_tokens = alone if is_alone else 64 * lengths.mean
    rounds = SteadyState(long_tail).rounds(64, num_slots, overlap)
    slots = min(num_slots, overlap.in_flight(64))
    assert rounds.num_rounds >= num_tokens / slots
    assert sum(w.rounds * w.live for w in rounds.windows) == pytest.approx(num_tokens - 64)
    assert sum(p.calls * p.rows for p in (rounds.first, rounds.refills)) == pytest.approx(64)
    assert all(window.live <= slots + 1e-9 for window in rounds.windows)
    assert all(window.context <= long_tail.max_tokens - 2 for window in rounds.windows)


@cases("num_slots", [4, 100, 16, 64, 320], few=2)
@pytest.mark.parametrize("num_rows", [1, 7, 64])
def test_a_larger_setting_never_takes_more_rounds(long_tail: Workload, num_rows: int, num_slots: int) -> None:
    turns = SteadyState(long_tail)

    def taken(overlap: Overlap) -> float:
        return turns.rounds(num_rows, num_slots, overlap).num_rounds

    in_batches = [taken(Overlap(batches_in_flight=b)) for b in (1, 2, 3, 4, 5)]
    assert in_batches == sorted(in_batches, reverse=True)
    extras = sorted({whole_steps(extra, num_rows) for extra in range(1, num_rows + 1)})
    table = [
        [taken(Overlap(overcommit=e, max_deferral=d) if e else Overlap()) for d in (1, 2, 3)] for e in (0, *extras)
    ]
    assert all(more <= less for row in table for less, more in pairwise(row))
    assert all(more <= less for column in zip(*table, strict=True) for less, more in pairwise(column))


@pytest.mark.parametrize("batches_in_flight", [2, 3, 4])
@cases("num_slots", [16, 96, 256, 48, 64, 128], few=3)
def test_fixed_lengths_wait_for_slots_or_for_their_turns(
    fixed: Workload, num_slots: int, batches_in_flight: int
) -> None:
    """64 rows of 28 tokens: a turn is 28 x 64 row-rounds over the slots, or a sequence's 28 rounds over its turns."""
    rounds = SteadyState(fixed).rounds(64, num_slots, Overlap(batches_in_flight=batches_in_flight))
    assert rounds.num_rounds == pytest.approx(28 * max(64 / num_slots, 1 / batches_in_flight))


def test_a_batch_overcommitted_in_whole_is_two_batches_in_flight_when_lengths_are_fixed(fixed: Workload) -> None:
    turns = SteadyState(fixed)
    two = turns.rounds(64, 128, Overlap(batches_in_flight=2))
    assert turns.rounds(64, 128, Overlap(overcommit=64, max_deferral=1)).num_rounds == two.num_rounds == 14


def test_a_tail_that_may_take_more_turns_no_longer_decides(long_tail: Workload) -> None:
    """With a slot for every row a turn is as long as the longest response, over the turns that it may take."""
    turns = SteadyState(long_tail.model_copy(update={"batch_size": 64}))
    longest = turns.rounds(64, 64, Overlap()).num_rounds
    for overlap in (Overlap(batches_in_flight=3), Overlap(overcommit=64, max_deferral=2)):
        assert turns.rounds(64, 320, overlap).num_rounds == pytest.approx(longest / 3, rel=0.1)


@pytest.mark.parametrize("num_replicas", [1, 8])
@pytest.mark.parametrize(
    "overlap", [Overlap(batches_in_flight=2), Overlap(batches_in_flight=4), *OVERCOMMITS[:3]], ids=str
)
def test_a_turn_is_as_long_as_that_of_the_slowest_of_the_replicas(
    long_tail: Workload, overlap: Overlap, num_replicas: int
) -> None:
    """Lengths are drawn, the replicas play them side by side, and the next turn waits for the slowest."""
    num_slots = 512 // num_replicas
    played = _played_as_drawn(long_tail, num_replicas, 64, num_slots, overlap)
    slowest = np.diff(played).max(axis=0)[10:].mean()
    turns = SteadyState(long_tail.model_copy(update={"batch_size": 64 * num_replicas}))
    assert turns.rounds(64, num_slots, overlap).num_rounds == pytest.approx(slowest, rel=0.1)


def test_a_long_response_holds_up_the_batches_behind_it(long_tail: Workload) -> None:
    """So eight batches in flight do not take an eighth of a batch's rounds, where batches differ much."""
    few_rows = long_tail.model_copy(update={"batch_size": 16})
    overlap = Overlap(batches_in_flight=8)
    alone, running_on = (SteadyState(few_rows).rounds(16, 128, how).num_rounds for how in (Overlap(), overlap))
    [bounds] = _played_as_drawn(few_rows, 1, 16, 128, overlap, num_turns=2000)
    assert running_on == pytest.approx(np.diff(bounds)[10:].mean(), rel=0.15)
    assert running_on > 1.15 * alone / 8


def _played_as_drawn(
    workload: Workload, num_replicas: int, num_rows: int, num_slots: int, overlap: Overlap, *, num_turns: int = 60
) -> list[list[int]]:
    """Of each replica the rounds between which its turns lie."""
    lengths = workload.response_lengths
    size = (num_turns, num_replicas, num_rows)
    drawn = np.random.default_rng(1).choice(lengths.tokens, p=lengths.probabilities, size=size)
    return [
        simulate_periods(tuple(Batch(rows, rows) for rows in drawn[:, replica]), num_slots, num_turns, overlap).bounds
        for replica in range(num_replicas)
    ]


def test_replicas_with_equal_lengths_do_not_wait_for_each_other(fixed: Workload) -> None:
    overlap = Overlap(batches_in_flight=2)
    alone = SteadyState(fixed.model_copy(update={"batch_size": 64})).rounds(64, 128, overlap)
    assert SteadyState(fixed).rounds(64, 128, overlap).num_rounds == alone.num_rounds


@pytest.fixture
def ask(a100s: Callable[[int], Cluster], query: Callable[..., StageQuery], long_tail: Workload) -> Callable[..., float]:
    model = AnalyticModel(a100s(1), long_tail, "bf16")

    def of(layout: str, max_deferral: int = 0, slots: int = 64, **schedule: int) -> float:
        question = query("actor_generate", layout, slots=slots, **schedule)
        return model.seconds(replace(question, max_deferral=max_deferral)).total

    return of


@pytest.mark.parametrize("layout", ["tp1,dp8", "tp2,pp2,dp2", "pp4,dp2"])
def test_a_long_tail_is_generated_sooner_when_it_may_run_on(ask: Callable[..., float], layout: str) -> None:
    alone = ask(layout)
    assert ask(layout, batches_in_flight=3) < ask(layout, batches_in_flight=2) < 0.9 * alone
    assert ask(layout, 2, overcommit=256) < ask(layout, 1, overcommit=256) < 0.9 * alone


def test_more_deferral_without_overcommit_changes_nothing(ask: Callable[..., float]) -> None:
    assert ask("dp8", 3) == ask("dp8")
    assert ask("dp8", 3, batches_in_flight=2) == ask("dp8", batches_in_flight=2)


def test_less_than_a_step_of_overcommit_is_none() -> None:
    assert [whole_steps(extra, 64) for extra in (0, 7, 8, 15, 64)] == [0, 0, 8, 8, 64]
    assert [whole_steps(extra, 4) for extra in (0, 1, 4)] == [0, 1, 4]


def test_overcommit_that_could_not_be_delivered_in_time_is_refused(ask: Callable[..., float]) -> None:
    with pytest.raises(BadInput, match="overcommit=8 with max_deferral=0 defers nothing; allow a staleness of 1"):
        ask("dp8", overcommit=8)
    with pytest.raises(BadInput, match="overcommit=513 is more than the 512 sequences of a batch"):
        ask("dp8", 1, overcommit=513)


def test_first_and_later_admissions_are_kept_apart(long_tail: Workload) -> None:
    """A turn starts with a batch's prompts where there are slots for them, and with a few where there are not."""
    wide, narrow = (SteadyState(long_tail).rounds(64, slots, Overlap(batches_in_flight=3)) for slots in (192, 16))
    assert wide.first.rows > 60
    assert narrow.first.rows < 4 < narrow.refills.calls
