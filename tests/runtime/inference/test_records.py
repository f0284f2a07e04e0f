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
