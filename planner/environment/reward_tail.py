"""How long rewards go on after the last response, where each response is handed over when it ends.

A reward has W workers for a replica, each with one call of b samples at a time, and a queue in order of arrival.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from meshwright.profiles.environment.latency import Latencies

_MOST_STEPS = 2**20
"""Steps of the probability that all calls are done, which are looked at together."""

_NUM_CELLS = 2**14
"""Number of cells of the grid by which a wait is bounded."""

_NEVER = -60.0
"""The logarithm of a probability that is as good as none."""

Seconds = NDArray[np.float64]


class Served(NamedTuple):
    """A reward's time for a call, and the samples that its workers have at a time."""

    latencies: Latencies
    num_at_a_time: int


def tail_seconds(ends: Seconds, rewards: Sequence[Served], num_replicas: int = 1) -> float:
    """Expected seconds from the last of the `ends` of responses [n] until every reward of each of them is known, for
    the slowest of `num_replicas` replicas.

    With a worker for each response the law is exact: they are independent, so all of them are done t seconds after the
    last one with probability P(t) = prod_i F(t + e_n - s_i) over the starts s_i = e_i of their calls, and the tail is
    the integral of 1 - P(t)^R (David and Nagaraja, Order Statistics, section 2.1, for variables that are not alike).
    P rises in steps, one for each time that a call may take, and is integrated from step to step, so that no call is
    too rare or too long to count.

    With fewer workers a call starts when W calls before it have made room as calls of the mean time m would,
    s_i = max(e_i, s_{i-W} + m): a queue with constant service, which waits as long as a fluid one under load.
    """
    pairs, longest = _waits(ends, rewards)
    if longest <= 0:
        return 0.0
    calls = [_Calls.of(wait, one) for wait, one in pairs]
    first = max(0.0, *(one.seconds[0] - float(wait.min()) for wait, one in pairs))  # before it P is 0
    return first + _open_seconds(calls, first, 2 * longest, 0.0, num_replicas)[0]  # behind the longest all is done


class _Calls(NamedTuple):
    """The calls of a reward: for how long they have been under way when the last response ends, each time once with
    the number of them [n]; the times that one may take, and by how much the logarithm of the probability that it is
    done rises there [k], but at the first, where that is from 0."""

    waits: Seconds
    counts: Seconds
    seconds: Seconds
    rises: Seconds

    @classmethod
    def of(cls, wait: Seconds, latencies: Latencies) -> Self:
        """The calls that are not all done when the last response ends."""
        waits, counts = np.unique(wait[wait < latencies.longest], return_counts=True)
        reached = np.minimum(np.cumsum(latencies.probabilities), 1.0)
        reached[-1] = 1.0
        logs = np.log(reached)
        return cls(waits, counts.astype(float), np.array(latencies.seconds), np.diff(logs, prepend=logs[0]))

    def steps(self, begin: float, end: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each wait the first of its times that come behind `begin`, and how many do up to `end` [n]."""
        first, behind = (np.searchsorted(self.seconds, at + self.waits, side="right") for at in (begin, end))
        return first, behind - first


def _open_seconds(
    calls: Sequence[_Calls], begin: float, end: float, log_at_end: float, num_replicas: int
) -> tuple[float, float]:
    """The integral of 1 - P^R from `begin` to `end`, and log P behind `begin`, where log P at the end is known."""
    steps = [one.steps(begin, end) for one in calls]
    middle = (begin + end) / 2
    if sum(int(counts.sum()) for _, counts in steps) > _MOST_STEPS and begin < middle < end:
        late, log = _open_seconds(calls, middle, end, log_at_end, num_replicas)
        early, log = _open_seconds(calls, begin, middle, log, num_replicas)
        return early + late, log
    times, rises = [begin, end], [0.0, 0.0]
    parts = [(np.array(times), np.array(rises))]
    for one, (first, counts) in zip(calls, steps, strict=True):
        index = np.repeat(np.arange(len(counts)), counts)
        step = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts) + first[index]
        parts.append((np.clip(one.seconds[step] - one.waits[index], begin, end), one.rises[step] * one.counts[index]))
    at, rise = (np.concatenate(each) for each in zip(*parts, strict=True))
    order = np.argsort(at)
    logs = log_at_end - np.cumsum(rise[order][:0:-1])[::-1]
    return float((np.diff(at[order]) * -np.expm1(num_replicas * logs)).sum()), float(logs[0])


def tail_at_least_seconds(ends: Seconds, rewards: Sequence[Served], num_replicas: int = 1) -> float:
    """Below `tail_seconds`, by little, and much sooner known: waits are rounded up to a grid, and times to its next."""
    pairs, longest = _waits(ends, rewards)
    if longest <= 0:
        return 0.0
    cell, logs = longest / _NUM_CELLS, np.zeros(_NUM_CELLS)
    for wait, one in pairs:
        cells = np.ceil(wait[wait < one.longest] / cell).astype(np.int64)
        first = int(cells.min(initial=0))  # negative where calls begin behind the last response
        counts = np.bincount(cells - first, minlength=1)
        times: Seconds = cell * np.arange(first + 1, first + _NUM_CELLS + len(counts), dtype=np.float64)
        with np.errstate(divide="ignore"):
            known = np.maximum(np.log(one.within(times)), _NEVER)
        size = 1 << len(times).bit_length()
        spectrum = np.fft.rfft(known, size) * np.fft.rfft(counts, size).conj()
        logs += np.fft.irfft(spectrum, size)[:_NUM_CELLS]
    return float((1 - np.exp(logs * num_replicas)).mean() * longest)


def least_arrival_seconds(latencies: Sequence[Latencies], num_samples: int) -> float:
    """Seconds from the start of a generation before which its rewards are not all known, as `tail_seconds` expects
    them: no call starts before the generation, and none of so many independent ones waits for another."""
    served = [Served(one, num_samples) for one in latencies]
    return tail_at_least_seconds(np.zeros(num_samples), served) if served and num_samples else 0.0


def drawn_tail_seconds(ends: Seconds, rewards: Sequence[Served], draw: np.random.Generator) -> float:
    """As `tail_seconds` of one replica, of a queue in which each call takes a time that is drawn."""
    last = 0.0
    for one in rewards:
        calls = draw.choice(one.latencies.seconds, len(ends), p=one.latencies.probabilities)
        free = [0.0] * min(one.num_at_a_time, len(ends))
        for end, call in zip(np.sort(ends).tolist(), calls.tolist(), strict=True):
            done = max(end, free[0]) + call
            heapq.heapreplace(free, done)
            last = max(last, done)
    return last - float(ends.max())


def least_tail_seconds(latencies: Sequence[Latencies]) -> float:
    """Below which no tail is: that of the response that ends last, which has nothing to wait for."""
    return max((one.mean for one in latencies), default=0.0)


def _waits(ends: Seconds, rewards: Sequence[Served]) -> tuple[list[tuple[Seconds, Latencies]], float]:
    """By reward, for how long calls have been under way when the last response ends [n], with the latencies of the
    reward; and the longest that any goes on."""
    ordered = np.sort(ends)
    waits = [ordered[-1] - _starts(ordered, one.num_at_a_time, one.latencies.mean) for one in rewards]
    pairs = [(wait, one.latencies) for wait, one in zip(waits, rewards, strict=True)]
    return pairs, max(one.longest - float(wait.min()) for wait, one in pairs)


def _starts(ends: Seconds, num_at_a_time: int, mean: float) -> Seconds:
    if num_at_a_time >= len(ends) or mean <= 0:
        return ends
    starts = ends.tolist()
    for index in range(num_at_a_time, len(starts)):
        starts[index] = max(starts[index], starts[index - num_at_a_time] + mean)
    return np.array(starts)


def response_ends(tokens: Sequence[int], num_slots: int, seconds: float) -> Seconds:
    """When responses of so many tokens end [n], the last of them after so many seconds: they take free slots in their
    order, and a round lasts as long as any other."""
    free, rounds = [0] * min(num_slots, len(tokens)), []
    for length in tokens:
        rounds.append(free[0] + length)
        heapq.heapreplace(free, rounds[-1])
    return np.array(rounds, dtype=float) * (seconds / max(rounds))
