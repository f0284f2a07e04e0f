"""Timed calls are a distribution with its provenance."""

from __future__ import annotations

import json

import pytest

from meshwright.profiles.documents import parse
from meshwright.profiles.environment.latency import CallKey, LatencySpec, TimedCalls
from meshwright.profiles.errors import BadInput

CALLS = TimedCalls(
    called=CallKey(kind="reward", target="mine:style"),
    seconds=(0.4, 0.1, 0.1, 0.2, 0.2),
    num_failed=3,
    date="2026-11-25",
)


def test_every_call_is_as_likely_as_every_other() -> None:
    found = CALLS.latency.resolve()
    assert found.seconds == (0.1, 0.2, 0.4)
    assert found.probabilities == pytest.approx((0.4, 0.4, 0.2))
    assert found.mean == pytest.approx(0.2)
    assert CALLS.latency.description == "0.2 s (the mean of 5 on 2026-11-25, 3 more failed)"


@pytest.mark.parametrize("seconds", [[], [-0.1, 0.2]])
def test_no_call_and_a_negative_time_are_refused(seconds: list[float]) -> None:
    with pytest.raises(BadInput, match="seconds"):
        parse(TimedCalls, json.dumps({**json.loads(CALLS.model_dump_json()), "seconds": seconds}), "calls")


def test_a_histogram_that_is_not_of_the_calls_it_names_is_refused() -> None:
    told = json.loads(CALLS.latency.model_dump_json())
    assert parse(LatencySpec, json.dumps(told), "latency") == CALLS.latency
    told["measured"]["num_calls"] = 6
    with pytest.raises(BadInput, match=r"measured\.num_calls=6 is not the sum of the histogram's weights"):
        parse(LatencySpec, json.dumps(told), "latency")
