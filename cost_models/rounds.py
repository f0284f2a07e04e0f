"""The decode rounds of a generation: how many, how full and with how much cached, over the distribution of lengths.

In each round a live sequence samples one token, so a response of n tokens occupies a slot for n rounds, the first of
which is its prefill. Sequences take free slots in their order of arrival (list scheduling; Graham, SIAM J. Appl. Math.
17(2), 1969). `cost_models.steady_state` asks for them, and adds sequences that stay in flight between periods; for
multi-turn rollouts see `cost_models.rollout_cost`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.profiles.lengths import Histogram, Lengths
from meshwright.profiles.workload import Workload

NUM_ORDERS = 8
"""Number of arrival orders that the rounds are averaged over: the longest response may come early or late."""

_NUM_WINDOWS = 8
"""Rounds are costed in this many windows of equal length, each at its mean number of live sequences."""

_GOLDEN = (math.sqrt(5) - 1) / 2
"""Multiples of the golden ratio modulo 1 are evenly spread: an order without randomness and without pattern."""

Integers = NDArray[np.int64]
Numbers = NDArray[np.float64]


class RoundWindow(NamedTuple):
    """`rounds` consecutive rounds in which `live` sequences decode, with `context` cached tokens each on average."""

    rounds: float
    live: float
    context: float


class Prefill(NamedTuple):
    """Prefills in `calls` rounds, each of `rows` packed prompts with `tokens` tokens on average."""

    calls: float
    rows: float
    tokens: float


@dataclass(frozen=True)
class Rounds:
    """The rounds of one replica during a generation, and how full they are.

    `first` are the prefills of the first round, `refills` those of later rounds, in slots that became free.
    """

    num_rounds: float
    windows: tuple[RoundWindow, ...]
    first: Prefill
    refills: Prefill

    def with_drafts(self, tokens_per_round: float) -> Rounds:
        """Return the rounds of the same sequences if each grows by `tokens_per_round` tokens in a decode round.

        All sequences grow at this mean rate, so a round with drafts stands for `tokens_per_round` rounds without. It
        has prefills if one of those has: with n of them, of which a share s have prefills, 1 - (1 - s)^n.
        """
        if tokens_per_round == 1:
            return self
        decoded = self.num_rounds - self.first.calls
        refills = self.refills
        if refills.calls:
            share = min(1.0, refills.calls / decoded)
            calls = decoded / tokens_per_round * (1 - (1 - share) ** tokens_per_round)
            refills = refills._replace(calls=calls, rows=refills.rows * refills.calls / calls)
        return Rounds(
            num_rounds=self.first.calls + decoded / tokens_per_round,
            windows=tuple(window._replace(rounds=window.rounds / tokens_per_round) for window in self.windows),
            first=self.first,
            refills=refills,
        )

    @cached_property
    def num_busy(self) -> float:
        """The rounds of the first prefills, and those in which some sequence decodes."""
        return self.first.calls + sum(window.rounds for window in self.windows)

    @cached_property
    def num_shared(self) -> float:
        """The rounds in which some sequences start and others decode."""
        return max(0.0, self.num_busy + self.refills.calls - self.num_rounds)

    @cached_property
    def num_sampled(self) -> float:
        """Tokens sampled in those rounds, if each sequence samples one in a round."""
        return self.first.calls * self.first.rows + self.num_decoded

    @cached_property
    def num_decoded(self) -> float:
        """Decode rounds, counted once for each sequence that decodes in them."""
        return sum(window.rounds * window.live for window in self.windows)


class Batch(NamedTuple):
    """Response and prompt tokens of one replica's rows, in order of arrival."""

    responses: Integers
    prompts: Integers


def batch_rounds(workload: Workload, num_rows: int, num_slots: int) -> Rounds:
    """Return the rounds of the replica that holds the batch's longest response, averaged over arrival orders."""
    responses = replica_responses(workload.response_lengths, workload.batch_size, num_rows)
    return rounds_of_responses(responses, workload.prompt_lengths, num_slots)


def rounds_of_responses(responses: Integers, prompt_lengths: Histogram, num_slots: int) -> Rounds:
    """Return the rounds of a replica with these responses, ascending [row], averaged over arrival orders."""
    num_rows, prompt = len(responses), prompt_lengths.mean
    counts = [_isolated_rounds(batch, num_slots) for batch in ordered_batches(responses, prompt_lengths)]
    calls = sum(count.num_refills for count in counts) / len(counts)
    per_call = (num_rows - num_slots) / calls if calls else 0.0
    return Rounds(
        num_rounds=sum(count.num_rounds for count in counts) / len(counts),
        windows=mean_windows(counts),
        first=Prefill(1, num_slots, prompt),
        refills=Prefill(calls, per_call, prompt),
    )


def ordered_batches(responses: Integers, prompt_lengths: Histogram) -> tuple[Batch, ...]:
    """Return a replica's rows in `NUM_ORDERS` orders of arrival, or in one if all rows are equal.

    `responses` are their response lengths, ascending [row]. Prompts are the medians of equally likely strata of their
    distribution.
    """
    num_rows = len(responses)
    prompts = prompt_lengths.stratified_sample(num_rows)
    if np.ptp(responses) == np.ptp(prompts) == 0:
        return (Batch(responses, prompts),)
    phases = [i / NUM_ORDERS for i in range(NUM_ORDERS)]
    return tuple(Batch(responses[_order(num_rows, p)], prompts[_order(num_rows, p + 0.5)]) for p in phases)


def replica_responses(lengths: Lengths, batch_size: int, num_rows: int) -> Integers:
    """Return the response lengths of the replica with the batch's longest response, ascending.

    They are the medians of `num_rows` equally likely strata of their distribution; the last one is the expected longest
    response of the whole batch, since every replica waits for the slowest.
    """
    responses = lengths.stratified_sample(num_rows)
    responses[-1] = max(responses[-1], round(lengths.expected_maximum(batch_size)))
    return responses


def _order(count: int, phase: float) -> Integers:
    """Return a fixed order of `count` sorted rows that spreads long and short ones evenly, shifted by `phase`."""
    order: Integers = np.argsort(((np.arange(count) - count + 1) * _GOLDEN + phase) % 1.0, kind="stable")
    return order


def admit(free: list[int], responses: Integers, release: int) -> Integers:
    """Return the round in which each response starts; all of them arrive in round `release`.

    `free` is a heap of the rounds from which the slots are free; it is updated. Each response takes the slot that is
    free first, and none overtakes another. `release` must not decrease from call to call.
    """
    take_first_free, starts, lengths = heapq.heapreplace, [], iter(responses.tolist())
    while free[0] < release:  # slots that were free before
        length = next(lengths, None)
        if length is None:
            break
        take_first_free(free, release + length)
        starts.append(release)
    starts += [take_first_free(free, free[0] + length) for length in lengths]
    return np.array(starts, dtype=np.int64)


class RoundCounts(NamedTuple):
    """Counts over consecutive rounds; the arrays have one entry per window."""

    num_rounds: int
    num_first: int  # sequences that start in the first round
    num_refills: int  # later rounds in which sequences start
    num_refilled: int  # sequences that start in those later rounds
    rounds: Numbers  # rounds in which some sequence decodes
    row_rounds: Numbers  # the same, counted once per decoding sequence
    cached: Numbers  # cached tokens of those sequences, counted once per round


def _isolated_rounds(batch: Batch, num_slots: int) -> RoundCounts:
    """Return the rounds of a batch that shares the slots with no other batch."""
    if np.ptp(batch.responses) == 0:
        start = np.arange(len(batch.responses)) // num_slots * batch.responses[0]
    else:
        free = batch.responses[:num_slots].tolist()
        heapq.heapify(free)
        start = np.concatenate([np.zeros_like(free), admit(free, batch.responses[num_slots:], 0)])
    end = start + batch.responses
    return round_counts(start, end, batch.prompts, 0, int(end.max()))


def round_counts(start: Integers, end: Integers, prompts: Integers, begin: int, finish: int) -> RoundCounts:
    """Return rounds [begin, finish) of sequences that occupy slots in rounds [start, end).

    They decode in all of their rounds but the first.
    """
    starting = start[(begin <= start) & (start < finish)]
    num_first = int(np.count_nonzero(starting == begin))
    num_refills = len(np.unique(starting)) - (num_first > 0)
    low, high = np.maximum(start + 1, begin), np.minimum(end, finish)
    decoding = low < high
    offset, low, high = (prompts - start)[decoding], low[decoding], high[decoding]
    bounds = np.linspace(0, finish - begin, _NUM_WINDOWS + 1).round().astype(int) + begin
    idle = _count_within(*_gaps(low, high, begin, finish), bounds).sum(axis=1)
    decoded = _count_within(low, high, bounds)
    middles = (np.maximum(low, bounds[:-1, None]) + np.minimum(high, bounds[1:, None]) - 1) / 2
    rounds = (np.diff(bounds) - idle).astype(float)
    return RoundCounts(
        num_rounds=finish - begin,
        num_first=num_first,
        num_refills=num_refills,
        num_refilled=len(starting) - num_first,
        rounds=rounds,
        row_rounds=decoded.sum(axis=1).astype(float),
        cached=(decoded * (offset + middles - 1)).sum(axis=1),
    )


def _count_within(low: Integers, high: Integers, bounds: Integers) -> Integers:
    """Return the rounds of each interval [low, high) in each window between two bounds, [windows, intervals]."""
    counts: Integers = np.maximum(np.minimum(high, bounds[1:, None]) - np.maximum(low, bounds[:-1, None]), 0)
    return counts


def _gaps(low: Integers, high: Integers, begin: int, finish: int) -> tuple[Integers, Integers]:
    """Return the intervals of [begin, finish) that none of the intervals [low, high) covers."""
    order = np.argsort(low)
    covered = np.concatenate([[begin], np.maximum.accumulate(high[order])])
    following = np.concatenate([low[order], [finish]])
    gaps = following > covered
    return covered[gaps], following[gaps]


def mean_windows(all_counts: Sequence[RoundCounts]) -> tuple[RoundWindow, ...]:
    """Return the windows averaged over several counts; equal ones are merged, and those without decoding dropped."""
    columns = zip(*((counts.rounds, counts.row_rounds, counts.cached) for counts in all_counts), strict=True)
    rounds, row_rounds, cached = (np.sum(column, axis=0) for column in columns)
    rounds_by_window: dict[tuple[float, float], float] = {}
    for number, live, tokens in zip(rounds.tolist(), row_rounds.tolist(), cached.tolist(), strict=True):
        if number:
            key = live / number, tokens / live
            rounds_by_window[key] = rounds_by_window.get(key, 0.0) + number
    return tuple(
        RoundWindow(number / len(all_counts), live, context) for (live, context), number in rounds_by_window.items()
    )
