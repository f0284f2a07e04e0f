"""A latency is a distribution of seconds, whatever it was given as."""

from __future__ import annotations

import json

import numpy as np
import pytest

from meshwright.profiles.documents import parse
from meshwright.profiles.environment.latency import Latencies, LatencySpec
from meshwright.profiles.errors import BadInput


def quantile(latencies: Latencies, share: float) -> float:
    return latencies.seconds[int(np.searchsorted(np.cumsum(latencies.probabilities), share))]


@pytest.mark.parametrize(("mean", "p99"), [(2.0, 20.0), (0.5, 0.6), (1.0, 3.0)])
def test_a_log_normal_has_the_mean_and_the_p99_that_it_was_given(mean: float, p99: float) -> None:
    found = LatencySpec(mean=mean, p99=p99).resolve()
    assert found.mean == pytest.approx(mean, rel=0.02)
    assert quantile(found, 0.99) == pytest.approx(p99, rel=0.05)


def test_a_log_normal_has_the_median_that_it_was_given() -> None:
    assert quantile(LatencySpec(median=0.7, p99=20.0).resolve(), 0.5) == pytest.approx(0.7, rel=0.01)


def test_the_probability_of_no_more_rises_from_nothing_to_all() -> None:
    found = LatencySpec(histogram=((1.0, 3.0), (2.0, 1.0))).resolve()
    assert found.cdf(np.array([-1.0, 0.5, 1.0, 1.5, 2.0, 9.0])).tolist() == [0, 0, 0.75, 0.75, 1, 1]


def test_longer_calls_are_counted_at_the_longest() -> None:
    found = LatencySpec(mean=2.0, p99=20.0, max=5.0).resolve()
    assert found.longest == 5.0
    assert sum(found.probabilities) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "give one of: fixed"),
        ({"fixed": 1.0, "p99": 2.0}, "give one of: fixed"),
        ({"mean": 1.0}, "needs p99"),
        ({"mean": 1.0, "median": 1.0, "p99": 2.0}, "needs p99 and one of"),
        ({"median": 2.0, "p99": 1.0}, "is less than median"),
        ({"mean": 1.0, "p99": 100.0}, "is 100 times mean=1, and a log-normal has between 1 and 15"),
        ({"histogram": [[1.0, 0.0]]}, "a weight that is not 0"),
        ({"histogram": [[-1.0, 1.0]]}, "seconds of 0 or more"),
    ],
)
def test_what_is_no_distribution_is_refused_in_one_sentence(given: dict[str, object], told: str) -> None:
    with pytest.raises(BadInput, match=told):
        parse(LatencySpec, json.dumps(given), "latency")
