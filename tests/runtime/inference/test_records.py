"""Records: each row has its own tokens, however many rows draw at a time and whoever had the row before."""

from __future__ import annotations

import random

import numpy as np

from meshwright.runtime.inference.slots import NO_LIMIT, Records


def test_rows_keep_what_they_drew_in_whatever_company() -> None:
    draw, records, expected = random.Random(0), Records(5), {row: [] for row in range(5)}
    for row in range(5):
        records.start(row, num_prompt=row + 1, max_tokens=NO_LIMIT, sample_id=row)
    for step in range(400):
        rows = np.array(draw.sample(range(5), draw.randint(1, 5)))
        records.add(rows, rows + 10 * step, -rows.astype(float), version=step)
        for row in rows.tolist():
            expected[row].append(row + 10 * step)
        assert records.last(rows).tolist() == [expected[row][-1] for row in rows.tolist()]
    for row in range(5):
        assert records.tokens(row) == expected[row]
        assert records.versions(row) == [token // 10 for token in expected[row]]
        assert set(records.logprobs(row)) == {-float(row)}
    lengths = [row + len(expected[row]) for row in range(5)]
    assert records.cached(np.arange(5)).tolist() == lengths


def test_a_row_that_begins_anew_has_nothing_and_goes_on_from_what_it_is_given() -> None:
    records = Records(2)
    records.start(1, num_prompt=3, max_tokens=9, sample_id=0)
    records.add(np.array([1]), np.array([4]), np.zeros(1), 0)
    records.start(1, num_prompt=2, max_tokens=5, sample_id=7)
    assert records.tokens(1) == []
    tokens = tuple(range(100))
    records.extend(1, tokens, (0.5,) * 100, (2,) * 100)
    assert (records.tokens(1), records.cached(np.array([1])).tolist()) == ([*tokens], [101])


def test_several_rounds_at_once_are_as_one_by_one() -> None:
    rounds = np.random.default_rng(0).integers(0, 50, (90, 2, 3)).astype(float)
    rows, one_by_one, at_once = np.array([4, 0, 2]), Records(5), Records(5)
    for records in (one_by_one, at_once):
        records.start(0, num_prompt=1, max_tokens=NO_LIMIT, sample_id=0)
        records.extend(0, (7, 8), (0.5, 0.5), (1, 1))
    for tokens, logprobs in rounds:
        one_by_one.add(rows, tokens.astype(int), logprobs, 3)
    at_once.add_several(rows, rounds[:0], 3)
    at_once.add_several(rows, rounds, 3)
    assert at_once.last(rows).tolist() == one_by_one.last(rows).tolist()
    for row in rows.tolist():
        for values in ("tokens", "logprobs", "versions"):
            assert getattr(at_once, values)(row) == getattr(one_by_one, values)(row)


def test_rows_keep_the_sets_that_their_tokens_were_sampled_from() -> None:
    """In rounds one by one, in rounds at once, and in what a row continues from; a tool token has no set."""
    draw = np.random.default_rng(0)
    rounds = draw.integers(0, 50, (90, 5, 3)).astype(float)
    rounds[:, 3:][draw.random((90, 2, 3)) < 0.3] = -1
    rows, one_by_one, at_once = np.array([4, 0, 2]), Records(5, 3), Records(5, 3)
    before = (np.array([7, 9], dtype=np.int32).tobytes(), b"")
    for records in (one_by_one, at_once):
        records.start(0, num_prompt=1, max_tokens=NO_LIMIT, sample_id=0)
        records.extend(0, (7, 8), (0.5, 0.5), (1, -1), before)
    for tokens, logprobs, *kept in rounds:
        one_by_one.add(rows, tokens.astype(int), logprobs, 3, kept)
    at_once.add_several(rows, rounds, 3)
    for index, row in enumerate(rows.tolist()):
        expected = [np.array([k for k in kept if k >= 0], dtype=np.int32).tobytes() for kept in rounds[:, 2:, index]]
        assert at_once.kept(row) == one_by_one.kept(row) == (*(before if row == 0 else ()), *expected)
    at_once.start(0, num_prompt=1, max_tokens=NO_LIMIT, sample_id=1)
    at_once.extend(0, (3,), (0.0,), (-1,), (b"",))
    assert at_once.kept(0) == (b"",)


def test_without_sets_a_row_has_none() -> None:
    records = Records(1)
    records.start(0, num_prompt=1, max_tokens=NO_LIMIT, sample_id=0)
    records.add(np.array([0]), np.array([4]), np.zeros(1), 0)
    assert records.kept(0) == ()
