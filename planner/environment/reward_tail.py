"""How long rewards go on after the last response, where each response is handed over when it ends.

A reward has W workers for a replica, each with one call of b samples at a time, and a queue in order of arrival.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.profiles.environment.latency import Latencies

_NUM_TIMES = 1024
"""At which the probability that all is done is asked."""

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
    With fewer workers a call starts when W calls before it have made room as calls of the mean time m would,
    s_i = max(e_i, s_{i-W} + m): a queue with constant service, which waits as long as a fluid one under load.
    """
    pairs, longest = _waits(ends, rewards)
    if longest <= 0:
        return 0.0
    # The middles of equally long parts: a distribution may step anywhere.
    times = (np.arange(_NUM_TIMES) + 0.5) * (longest / _NUM_TIMES)
    done = np.ones_like(times)
    for wait, one in pairs:
        open_at_end = wait[wait < one.longest]
        for some in np.array_split(open_at_end, max(1, len(open_at_end) // _NUM_TIMES)):
            done *= one.within(times[:, None] + some[None, :]).prod(axis=1)
    found = float((1 - done**num_replicas).mean() * longest)
    return max(found, tail_at_least_seconds(ends, rewards, num_replicas))  # rare long calls fall between the times


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
