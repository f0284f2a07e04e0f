"""The reward tail: seconds from the end of the last response until all rewards are known.

Each response is scored as soon as it ends. On each replica a reward has a first-come first-served queue, and workers
that score W = `concurrency` samples at a time.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from meshwright.profiles.environment.latency import Latencies

_MAX_STEPS = 2**20
"""Maximum number of steps of the distribution function that are held in memory at once."""

_NUM_CELLS = 2**14
"""Number of grid cells of the lower bound."""

_NEVER = -60.0
"""Logarithm of a negligible probability, in place of minus infinity."""

SecondsArray = NDArray[np.float64]


class RewardWorkers(NamedTuple):
    """Latencies of one call of a reward, and the number of samples that its workers on a replica score at a time."""

    latencies: Latencies
    concurrency: int


def tail_seconds(ends: SecondsArray, rewards: Sequence[RewardWorkers], num_replicas: int = 1) -> float:
    """Return the expected seconds from the last of the `ends` of responses [n] until all their rewards are known.

    The result is for the slowest of R = `num_replicas` replicas. If W is at least the number of responses it is exact:
    calls are independent, so that all are done t seconds after the last response with probability P(t) =
    prod_i F(t + e_n - s_i) over the starts s_i = e_i of the calls, and the tail is the integral of 1 - P(t)^R (David
    and Nagaraja, Order Statistics, section 2.1, for variables that are not identically distributed). P is a step
    function with a step for each possible latency of each call, and is integrated step by step, so that no call is too
    rare or too long to count.

    With a smaller W, starts are those of a queue with constant service time m, the mean latency: s_i = max(e_i,
    s_{i-W} + m). Under load the waits are those of a fluid queue.
    """
    pairs, longest = _elapsed_calls(ends, rewards)
    if longest <= 0:
        return 0.0
    calls = [_Calls.of(elapsed, one) for elapsed, one in pairs]
    first = max(0.0, *(one.seconds[0] - float(elapsed.min()) for elapsed, one in pairs))  # P is 0 before
    return first + _integrate(calls, first, 2 * longest, 0.0, num_replicas)[0]  # P is 1 from `longest` on


class _Calls(NamedTuple):
    """The calls of a reward that may still run when the last response ends.

    `elapsed` has the distinct times since their starts [n], `counts` the number of calls with each [n], `seconds` the
    possible latencies [k], and `rises` the increase of log F at each of them [k], which is 0 at the first.
    """

    elapsed: SecondsArray
    counts: SecondsArray
    seconds: SecondsArray
    rises: SecondsArray

    @classmethod
    def of(cls, elapsed: SecondsArray, latencies: Latencies) -> Self:
        """Return the calls that may not be done when the last response ends, given the times since all starts [m]."""
        distinct, counts = np.unique(elapsed[elapsed < latencies.longest], return_counts=True)
        cumulative = np.minimum(np.cumsum(latencies.probabilities), 1.0)
        cumulative[-1] = 1.0
        logs = np.log(cumulative)
        return cls(distinct, counts.astype(float), np.array(latencies.seconds), np.diff(logs, prepend=logs[0]))

    def steps(self, begin: float, end: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each of `elapsed`, the index of the first latency after `begin`, and the number up to `end` [n]."""
        first, last = (np.searchsorted(self.seconds, at + self.elapsed, side="right") for at in (begin, end))
        return first, last - first


def _integrate(
    calls: Sequence[_Calls], begin: float, end: float, log_at_end: float, num_replicas: int
) -> tuple[float, float]:
    """Return the integral of 1 - P^R from `begin` to `end`, and log P just after `begin`, given log P at `end`."""
    steps = [one.steps(begin, end) for one in calls]
    middle = (begin + end) / 2
    if sum(int(counts.sum()) for _, counts in steps) > _MAX_STEPS and begin < middle < end:
        late, log = _integrate(calls, middle, end, log_at_end, num_replicas)
        early, log = _integrate(calls, begin, middle, log, num_replicas)
        return early + late, log
    times, rises = [begin, end], [0.0, 0.0]
    parts = [(np.array(times), np.array(rises))]
    for one, (first, counts) in zip(calls, steps, strict=True):
        index = np.repeat(np.arange(len(counts)), counts)
        step = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts) + first[index]
        parts.append((np.clip(one.seconds[step] - one.elapsed[index], begin, end), one.rises[step] * one.counts[index]))
    at, rise = (np.concatenate(each) for each in zip(*parts, strict=True))
    order = np.argsort(at)
    logs = log_at_end - np.cumsum(rise[order][:0:-1])[::-1]
    return float((np.diff(at[order]) * -np.expm1(num_replicas * logs)).sum()), float(logs[0])


def tail_lower_bound_seconds(ends: SecondsArray, rewards: Sequence[RewardWorkers], num_replicas: int = 1) -> float:
    """Return a tight lower bound of `tail_seconds` that is much faster to compute: times are rounded to a grid."""
    pairs, longest = _elapsed_calls(ends, rewards)
    if longest <= 0:
        return 0.0
    cell, logs = longest / _NUM_CELLS, np.zeros(_NUM_CELLS)
    for elapsed, one in pairs:
        cells = np.ceil(elapsed[elapsed < one.longest] / cell).astype(np.int64)
        first = int(cells.min(initial=0))  # negative if calls start after the last response
        counts = np.bincount(cells - first, minlength=1)
        times: SecondsArray = cell * np.arange(first + 1, first + _NUM_CELLS + len(counts), dtype=np.float64)
        with np.errstate(divide="ignore"):
            log_done = np.maximum(np.log(one.cdf(times)), _NEVER)
        size = 1 << len(times).bit_length()
        spectrum = np.fft.rfft(log_done, size) * np.fft.rfft(counts, size).conj()
        logs += np.fft.irfft(spectrum, size)[:_NUM_CELLS]
    return float((1 - np.exp(logs * num_replicas)).mean() * longest)


def arrival_lower_bound_seconds(latencies: Sequence[Latencies], num_samples: int) -> float:
    """Return a lower bound on the seconds from the start of a generation until all rewards are known.

    All calls are assumed to start with the generation and to run in parallel.
    """
    served = [RewardWorkers(one, num_samples) for one in latencies]
    return tail_lower_bound_seconds(np.zeros(num_samples), served) if served and num_samples else 0.0


def sampled_tail_seconds(ends: SecondsArray, rewards: Sequence[RewardWorkers], rng: np.random.Generator) -> float:
    """Return a random sample of the tail of one replica: each call of the queue takes a random latency."""
    last = 0.0
    for one in rewards:
        latencies = rng.choice(one.latencies.seconds, len(ends), p=one.latencies.probabilities)
        free_at = [0.0] * min(one.concurrency, len(ends))
        for end, latency in zip(np.sort(ends).tolist(), latencies.tolist(), strict=True):
            done = max(end, free_at[0]) + latency
            heapq.heapreplace(free_at, done)
            last = max(last, done)
    return last - float(ends.max())


def unqueued_tail_seconds(latencies: Sequence[Latencies]) -> float:
    """Return a lower bound on the tail: the mean latency of the response that ends last, without queueing."""
    return max((one.mean for one in latencies), default=0.0)


def _elapsed_calls(
    ends: SecondsArray, rewards: Sequence[RewardWorkers]
) -> tuple[list[tuple[SecondsArray, Latencies]], float]:
    """Return (seconds from the start of each call to the end of the last response [n], latencies) for each reward.

    Also return the longest time that any call may take after the last response.
    """
    ordered = np.sort(ends)
    elapsed = [ordered[-1] - _starts(ordered, one.concurrency, one.latencies.mean) for one in rewards]
    pairs = [(seconds, one.latencies) for seconds, one in zip(elapsed, rewards, strict=True)]
    return pairs, max(one.longest - float(seconds.min()) for seconds, one in pairs)


def _starts(ends: SecondsArray, num_at_a_time: int, mean: float) -> SecondsArray:
    if num_at_a_time >= len(ends) or mean <= 0:
        return ends
    starts = ends.tolist()
    for index in range(num_at_a_time, len(starts)):
        starts[index] = max(starts[index], starts[index - num_at_a_time] + mean)
    return np.array(starts)


def response_ends(tokens: Sequence[int], num_slots: int, seconds: float) -> SecondsArray:
    """Return the times in seconds at which responses of these lengths end [n], the last one at `seconds`.

    Responses take free slots in order, and all decode rounds take equally long.
    """
    free_at, end_rounds = [0] * min(num_slots, len(tokens)), []
    for length in tokens:
        end_rounds.append(free_at[0] + length)
        heapq.heapreplace(free_at, end_rounds[-1])
    return np.array(end_rounds, dtype=float) * (seconds / max(end_rounds))
