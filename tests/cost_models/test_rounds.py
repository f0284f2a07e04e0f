"""Rounds of a generation draw every token once, in slots that are taken in order of arrival."""

import numpy as np
import pytest

from meshwright.cost_models.rounds import (
    admit,
    batch_rounds,
    mean_windows,
    ordered_batches,
    replica_responses,
    round_counts,
)
from meshwright.profiles.workload import Workload


def test_with_a_slot_for_every_row_there_are_as_many_rounds_as_the_longest_row(long_tail: Workload) -> None:
    rounds = batch_rounds(long_tail, 64, 64)
    assert rounds.num_rounds == round(long_tail.response_lengths.expected_maximum(long_tail.batch_size))
    assert rounds.refills.calls == 0


@pytest.mark.parametrize(("rows", "slots"), [(64, 64), (64, 16), (64, 63), (7, 2), (1, 1)])
def test_fixed_lengths_take_whole_waves(fixed: Workload, rows: int, slots: int) -> None:
    rounds = batch_rounds(fixed, rows, slots)
    waves = -(-rows // slots)
    assert rounds.num_rounds == 28 * waves
    assert rounds.refills.calls == waves - 1
    assert sum(window.rounds for window in rounds.windows) == pytest.approx(27 * waves)


@pytest.mark.parametrize("slots", [1, 5, 16, 64])
def test_every_token_but_a_rows_first_is_decoded_once(long_tail: Workload, slots: int) -> None:
    rounds = batch_rounds(long_tail, 64, slots)
    decoded = sum(window.rounds * window.live for window in rounds.windows)
    lengths = list(long_tail.response_lengths.stratified_sample(64))
    lengths[-1] = round(long_tail.response_lengths.expected_maximum(long_tail.batch_size))
    assert decoded == pytest.approx(sum(lengths) - 64)
    assert all(window.live <= slots + 1e-9 for window in rounds.windows)
    assert all(window.context <= long_tail.max_tokens - 2 for window in rounds.windows)


@pytest.mark.parametrize("slots", [1, 5, 16, 64])
def test_a_row_reads_its_own_cache_however_long_the_others_are(long_tail: Workload, slots: int) -> None:
    """The decode rounds of a row of n tokens behind a prompt of p read p, p + 1, ..., p + n - 2 tokens."""
    windows = batch_rounds(long_tail, 64, slots).windows
    read = sum(window.rounds * window.live * window.context for window in windows)
    orders = ordered_batches(
        replica_responses(long_tail.response_lengths, long_tail.batch_size, 64), long_tail.prompt_lengths
    )
    own = [(b.responses - 1) * (b.prompts + (b.responses - 2) / 2) for b in orders]
    assert read == pytest.approx(sum(float(one.sum()) for one in own) / len(orders))


def test_more_slots_take_fewer_rounds(long_tail: Workload) -> None:
    rounds = [batch_rounds(long_tail, 64, slots).num_rounds for slots in (1, 2, 4, 8, 16, 32, 64)]
    assert rounds == sorted(rounds, reverse=True)


def test_each_sequence_takes_the_slot_that_is_free_first_and_none_overtakes() -> None:
    """Two slots, lengths 5, 2, 2, 9: the third waits for the second, the fourth for the third."""
    free = [0, 0]
    assert admit(free, np.array([5, 2, 2, 9]), 0).tolist() == [0, 0, 2, 4]
    assert sorted(free) == [5, 13]
    assert admit(free, np.array([1]), 7).tolist() == [7]


def test_orders_of_arrival_are_of_the_same_rows_and_one_where_all_are_alike(
    long_tail: Workload, fixed: Workload
) -> None:
    batches = ordered_batches(
        replica_responses(long_tail.response_lengths, long_tail.batch_size, 64), long_tail.prompt_lengths
    )
    assert len(batches) == 8
    assert len({tuple(batch.responses.tolist()) for batch in batches}) == 8
    for rows in zip(*((sorted(batch.responses), sorted(batch.prompts)) for batch in batches), strict=True):
        assert all(row == rows[0] for row in rows)
    assert (
        len(ordered_batches(replica_responses(fixed.response_lengths, fixed.batch_size, 64), fixed.prompt_lengths)) == 1
    )


def test_a_sequence_decodes_in_all_of_its_rounds_but_the_first() -> None:
    """Two sequences in rounds [0, 4) and [2, 7), of which rounds [0, 6) are looked at."""
    found = round_counts(np.array([0, 2]), np.array([4, 7]), np.array([10, 20]), 0, 6)
    assert (found.num_first, found.num_refills, found.num_refilled) == (1, 1, 1)
    assert found.row_rounds.sum() == 3 + 3
    assert found.rounds.sum() == 5  # in round 0 the first sequence is prefilled, and nothing decodes


def test_windows_that_are_alike_are_one_and_empty_ones_none() -> None:
    alike = round_counts(np.array([0, 0]), np.array([9, 9]), np.array([5, 5]), 0, 9)
    windows = mean_windows([alike, alike])
    assert sum(window.rounds for window in windows) == pytest.approx(8)
    assert {window.live for window in windows} == {2.0}
    assert mean_windows([round_counts(np.array([0]), np.array([1]), np.array([5]), 0, 1)]) == ()
