"""The tail of rewards is the law of a queue that was played: exact with a worker for each response, near with fewer."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.planner.job import reward_tail
from meshwright.planner.job.reward_tail import (
    RewardWorkers,
    SecondsArray,
    _elapsed_calls,
    arrival_lower_bound_seconds,
    response_ends,
    sampled_tail_seconds,
    tail_lower_bound_seconds,
    tail_seconds,
    unqueued_tail_seconds,
)
from meshwright.profiles.environment.latency import Latencies, LatencySpec
from tests.seeds import seeds

SLOW = LatencySpec(mean=2.0, p99=20.0).resolve()
ENDS = np.sort(np.random.default_rng(1).lognormal(3.0, 0.8, 64))


def at_once(ends: SecondsArray, latencies: Latencies, num_replicas: int, times: int = 20000) -> float:
    """The mean over draws of every call's latency, where each begins when its response ends."""
    size = (times, num_replicas, len(ends))
    calls = np.random.default_rng(0).choice(latencies.seconds, size, p=latencies.probabilities)
    return float(((ends + calls).max(axis=(1, 2)) - ends.max()).mean())


def played(ends: SecondsArray, latencies: Latencies, num_workers: int, times: int = 1000) -> float:
    """The mean over queues in which every call draws its own latency; calls start in order of arrival."""
    draw = np.random.default_rng(0)
    return float(
        np.mean([sampled_tail_seconds(ends, [RewardWorkers(latencies, num_workers)], draw) for _ in range(times)])
    )


def test_with_a_worker_for_each_response_the_tail_is_that_of_the_played_queue() -> None:
    for ends in (ENDS, ENDS / 8):
        assert tail_seconds(ends, [RewardWorkers(SLOW, 64)]) == pytest.approx(at_once(ends, SLOW, 1), rel=0.03)


@pytest.mark.parametrize("num_workers", [4, 16, 64])
@pytest.mark.parametrize("part", [1, 8, 1000])
def test_a_tail_is_just_above_what_it_is_at_least(num_workers: int, part: int) -> None:
    served = [RewardWorkers(SLOW, num_workers), RewardWorkers(LatencySpec(fixed=0.5).resolve(), 64)]
    for num_replicas in (1, 4):
        found = tail_seconds(ENDS / part, served, num_replicas)
        least = tail_lower_bound_seconds(ENDS / part, served, num_replicas)
        assert 0.98 * found - 0.1 <= least <= found
        arrival = arrival_lower_bound_seconds([one.latencies for one in served], 64 * num_replicas)
        assert arrival <= (ENDS.max() / part + found) * (1 + 1e-3)


@pytest.mark.parametrize("seconds", [5.0, 50.1, 600.0])
def test_a_tail_of_calls_that_are_seldom_long_is_never_below_what_it_is_at_least(seconds: float) -> None:
    seldom = LatencySpec(histogram=((1.0, 9999.0), (seconds, 1.0))).resolve()
    served = [RewardWorkers(seldom, 64)]
    for ends in (ENDS, np.zeros(64)):
        assert tail_lower_bound_seconds(ends, served) <= tail_seconds(ends, served)


def drawn_case(seed: int) -> tuple[SecondsArray, list[RewardWorkers], int]:
    """Ends, one or two rewards of any kind with few workers or many, and replicas."""
    draw = np.random.default_rng(seed)
    ends = np.sort(draw.lognormal(3.0, 0.8, int(draw.integers(1, 150)))) / draw.choice([1, 8, 1000])
    kinds = (
        LatencySpec(mean=2.0, p99=20.0),
        LatencySpec(fixed=0.5),
        LatencySpec(histogram=((1.0, 9999.0), (float(draw.uniform(1, 600)), 1.0))),
        LatencySpec(histogram=tuple((float(s), float(w)) for s, w in draw.uniform(0, 5, (5, 2)))),
    )
    chosen = draw.choice(len(kinds), int(draw.integers(1, 3)))
    served = [RewardWorkers(kinds[kind].resolve(), int(draw.integers(1, len(ends) + 3))) for kind in chosen]
    return ends, served, int(draw.choice([1, 4, 64]))


def on_a_grid(
    ends: SecondsArray, served: list[RewardWorkers], num_replicas: int, num_times: int = 20000
) -> tuple[float, float]:
    """The integral of 1 - P^R by the middles of as many parts, and how long a part is."""
    pairs, longest = _elapsed_calls(ends, served)
    times = (np.arange(num_times) + 0.5) * (longest / num_times)
    done = np.ones_like(times)
    for wait, latencies in pairs:
        for one in wait:
            done *= latencies.cdf(times + one)
    return float((1 - done**num_replicas).mean() * longest), longest / num_times


@seeds(8, all=400)
def test_a_tail_is_the_integral_of_its_law_whatever_steps_it_has(seed: int) -> None:
    ends, served, num_replicas = drawn_case(seed)
    expected, part = on_a_grid(ends, served, num_replicas)
    assert tail_seconds(ends, served, num_replicas) == pytest.approx(expected, abs=6 * part, rel=1e-9)


@seeds(25, all=2000)
def test_what_a_tail_is_at_least_is_never_above_it(seed: int) -> None:
    ends, served, num_replicas = drawn_case(seed)
    assert tail_lower_bound_seconds(ends, served, num_replicas) <= tail_seconds(ends, served, num_replicas)


def test_steps_that_are_looked_at_in_parts_add_up_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    served = [RewardWorkers(SLOW, 16), RewardWorkers(SLOW, 64)]
    whole = tail_seconds(ENDS, served, 4)
    monkeypatch.setattr(reward_tail, "_MAX_STEPS", 100)
    assert tail_seconds(ENDS, served, 4) == pytest.approx(whole, rel=1e-12)


def test_the_slowest_of_several_replicas_is_that_of_played_queues() -> None:
    found = tail_seconds(ENDS[-16:], [RewardWorkers(SLOW, 16)], num_replicas=4)
    assert found == pytest.approx(at_once(ENDS[-16:], SLOW, 4), rel=0.03)


@pytest.mark.parametrize("num_workers", [1, 2, 4, 8, 16])
def test_with_fewer_workers_the_tail_is_near_that_of_the_played_queue(num_workers: int) -> None:
    """Seconds of the tail against those of the whole: calls do not average out where few are left."""
    ends = ENDS / 4
    law, found = tail_seconds(ends, [RewardWorkers(SLOW, num_workers)]), played(ends, SLOW, num_workers)
    assert law == pytest.approx(found, rel=0.2)


def test_a_queue_that_is_played_serves_in_order_of_arrival() -> None:
    fixed, draw = LatencySpec(fixed=3.0).resolve(), np.random.default_rng(0)
    ends = np.array([0.0, 5.0, 1.0, 1.5])
    assert sampled_tail_seconds(ends, [RewardWorkers(fixed, 1)], draw) == pytest.approx(7.0)
    assert sampled_tail_seconds(ends, [RewardWorkers(fixed, 2)], draw) == pytest.approx(3.0)
    assert sampled_tail_seconds(ends, [RewardWorkers(fixed, 9), RewardWorkers(fixed, 1)], draw) == pytest.approx(7.0)


def test_a_constant_latency_is_waited_for_once_where_workers_are_many() -> None:
    fixed = LatencySpec(fixed=3.0).resolve()
    assert tail_seconds(ENDS, [RewardWorkers(fixed, 64)]) == pytest.approx(3.0, rel=1e-3)
    assert tail_seconds(np.zeros(12), [RewardWorkers(fixed, 4)]) == pytest.approx(9.0, rel=1e-3)


def test_no_tail_is_shorter_than_the_call_of_the_last_response() -> None:
    for number in (1, 4, 64):
        assert tail_seconds(ENDS, [RewardWorkers(SLOW, number)]) >= unqueued_tail_seconds([SLOW])
    assert unqueued_tail_seconds([]) == 0.0


def test_more_workers_more_time_between_ends_and_fewer_replicas_never_lengthen_the_tail() -> None:
    by_workers = [tail_seconds(ENDS / 8, [RewardWorkers(SLOW, number)]) for number in (1, 2, 4, 8, 16, 32, 64)]
    assert by_workers == sorted(by_workers, reverse=True)
    by_stretch = [tail_seconds(ENDS * factor, [RewardWorkers(SLOW, 4)]) for factor in (0.1, 0.5, 1.0, 2.0)]
    assert by_stretch == sorted(by_stretch, reverse=True)
    by_replicas = [tail_seconds(ENDS, [RewardWorkers(SLOW, 64)], number) for number in (1, 2, 8)]
    assert by_replicas == sorted(by_replicas)


def test_every_reward_of_a_response_is_waited_for() -> None:
    fixed = LatencySpec(fixed=3.0).resolve()
    both = tail_seconds(ENDS, [RewardWorkers(SLOW, 64), RewardWorkers(fixed, 64)])
    assert both >= max(tail_seconds(ENDS, [RewardWorkers(one, 64)]) for one in (SLOW, fixed)) - 0.05


def test_responses_end_by_their_tokens_in_the_slots_that_are_free_first() -> None:
    assert response_ends([2, 4, 8], 3, 16.0).tolist() == [4.0, 8.0, 16.0]
    assert response_ends([2, 2, 2, 2], 2, 8.0).tolist() == [4.0, 4.0, 8.0, 8.0]
