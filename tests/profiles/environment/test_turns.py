"""Totals of a multi-turn rollout."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.profiles.environment.turns import ToolTurns, compound_distribution
from meshwright.profiles.lengths import Histogram, LengthSpec

EACH = LengthSpec(max=300, median=60, p99=280)


def turns(**changes: object) -> ToolTurns:
    given = {
        "number": {"max": 6, "median": 3, "p99": 6},
        "result": {"max": 50, "median": 20, "p99": 50},
        "latency_seconds": {"mean": 1, "p99": 5},
        "max_tokens": 4000,
    }
    return ToolTurns.model_validate({**given, **changes})


def test_a_sum_over_turns_has_the_mean_of_its_parts() -> None:
    several = turns()
    number, each, told = several.number.resolve(), EACH.resolve(), several.result.resolve()
    assert several.sampled(EACH).mean == pytest.approx(number.mean * each.mean)
    assert several.lengths(EACH).mean == pytest.approx(number.mean * each.mean + (number.mean - 1) * told.mean)
    assert several.mean_calls == pytest.approx(number.mean - 1)


def test_a_sum_of_few_numbers_is_exact() -> None:
    coin = Histogram((1, 2), (0.5, 0.5))
    found = compound_distribution(coin, coin, Histogram((0, 3), (0.5, 0.5)), 100)
    exact = {1: 0.25, 2: 0.3125, 3: 0.125, 4: 0.0625, 5: 0.0625, 6: 0.125, 7: 0.0625}
    assert dict(zip(found.tokens, found.probabilities, strict=True)) == pytest.approx(exact)


def test_the_longest_of_many_is_that_of_drawn_ones() -> None:
    several = turns()
    found, draw = several.lengths(EACH), np.random.default_rng(0)
    number, each, told = (one.resolve() for one in (several.number, EACH, several.result))
    totals = [
        draw.choice(each.tokens, k, p=each.probabilities).sum()
        + draw.choice(told.tokens, k - 1, p=told.probabilities).sum()
        for k in draw.choice(number.tokens, 6400, p=number.probabilities)
    ]
    assert found.expected_maximum(64) == pytest.approx(np.array(totals).reshape(-1, 64).max(axis=1).mean(), rel=0.03)
    assert found.mean == pytest.approx(np.mean(totals), rel=0.03)


def test_waiting_counts_in_rounds() -> None:
    several = turns()
    waiting = several.mean_calls * several.latency_seconds.resolve().mean
    assert several.rounds(EACH, 0.02).mean == pytest.approx(several.sampled(EACH).mean + waiting / 0.02, rel=1e-6)
    assert several.rounds(EACH, float("inf")) == several.sampled(EACH)


def test_a_rollout_is_cut_at_its_most_tokens() -> None:
    found = turns(max_tokens=400).lengths(EACH)
    assert found.maximum == 400
    assert found.mean < turns().lengths(EACH).mean


def test_more_turns_than_are_counted_are_refused() -> None:
    with pytest.raises(ValueError, match=r"turns\.number\.max=2000 is more than 1024"):
        turns(number={"max": 2000, "fixed": 3})
