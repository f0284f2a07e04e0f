"""The size of a replica's paged KV cache, from the distribution of tokens that its sequences in flight hold.

Slots are refilled as in a renewal process and assumed independent, so that the sum of their tokens is approximately
normal. The cache is sized for a quantile of this sum in the decode round in which it is largest; sequences that need
more are pre-empted. Time is counted in steps of one or more decode rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from statistics import NormalDist
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.profiles.lengths import Histogram
from meshwright.profiles.packing import BLOCK_TOKENS, num_blocks_for

Numbers: TypeAlias = NDArray[np.float64]

_EndOf: TypeAlias = Callable[[int, Numbers, Numbers], float]
"""The step in which a period ends, given its number from 1 on, and the cumulative starts and finishes by each step."""

_LIFETIMES = 4
"""Length of the time axis, as a multiple of the steps of the longest response."""

_ROUNDING = 1e-9
"""Tolerance of comparisons between expected numbers of sequences."""


@dataclass(frozen=True, eq=False)
class SlotRefills:
    """Expected starts per step [steps] in one slot; `ending[k]` is the probability that a sequence takes k + 1 steps.

    While sequences wait, a free slot is refilled at once. In a slot that is filled at time 0, starts form a renewal
    process: with p the distribution of response lengths, u(t) = sum_n p(n) u(t - n) start in step t, u(0) = 1 (Feller,
    An Introduction to Probability Theory, volume 1, chapter XIII). If a fraction v(t) of the slot is available,
    sequences start with the increments of v, each followed by such a process, so that live(t) = sum_a starts(t - a)
    P(R > a) equals v(t).
    """

    ending: Numbers

    @cached_property
    def alive(self) -> Numbers:
        """The probability that a sequence is alive k steps after its start [k]."""
        survival: Numbers = self.ending[::-1].cumsum()[::-1]
        return survival

    @cached_property
    def always(self) -> Numbers:
        """Starts in each step if sequences always wait."""
        longest = len(self.ending)
        starts = np.zeros(_LIFETIMES * longest)
        starts[0] = 1.0
        for step in range(1, len(starts)):
            previous = starts[max(0, step - longest) : step][::-1]
            starts[step] = previous @ self.ending[: len(previous)]
        return starts

    def alone(self, waiting: float) -> Numbers:
        """Return the starts of `waiting` sequences that wait at time 0, if none arrive later."""
        return self._starts_in(np.ones(len(self.always)), waiting)

    def evenly(self, batch: float, period: float) -> Numbers:
        """Return the starts if a batch waits at time 0 and another arrives every `period` steps."""
        return self._simulate(batch, batch, lambda number, *_: int(number * period))

    def in_order(self, waiting: float, batch: float, longest: float) -> Numbers:
        """Return the starts if `waiting` sequences wait at time 0 and a batch arrives whenever the oldest is complete.

        A batch is complete `longest` steps after its first sequence has started, or at once if that has passed.
        """

        def end(number: int, starts: Numbers, _: Numbers) -> float:
            first = int(starts.searchsorted((number - 1) * batch + _ROUNDING))
            return first + int(longest) if first < len(starts) else np.inf

        return self._simulate(waiting, batch, end)

    def first_ended(self, waiting: float, batch: float) -> Numbers:
        """Return the starts if `waiting` sequences wait at time 0 and a batch arrives whenever as many sequences as a
        batch has have finished."""

        def end(number: int, _: Numbers, finished: Numbers) -> float:
            step = int(finished.searchsorted(number * batch - _ROUNDING))
            return step if step < len(finished) else np.inf

        return self._simulate(waiting, batch, end)

    def _simulate(self, waiting: float, batch: float, end_of: _EndOf) -> Numbers:
        """Simulate period after period to the end of the time axis."""
        longest, size = len(self.ending), len(self.always)
        starts, finished, live = np.zeros(size), np.zeros(size), np.zeros(size + longest)
        now, number = 0, 1
        while now < size:
            stop = min(size, now + longest)
            starts[now:stop] = self._starts_in(1 - live[now:stop], waiting)
            started = starts[:stop].cumsum()
            live_now = np.convolve(starts[now:stop], self.alive)[: stop - now]
            finished[now:stop] = started[now:] - live[now:stop] - live_now
            end = max(now, end_of(number, started, finished[:stop]))
            is_complete = end <= stop
            if is_complete:
                stop, number = int(end), number + 1
            starts[stop:] = 0.0
            if starts[now:stop].any():
                live[now : stop + longest - 1] += np.convolve(starts[now:stop], self.alive)
            waiting += batch * is_complete - float(starts[now:stop].sum())
            now = stop
        return starts

    def _starts_in(self, available: Numbers, waiting: float) -> Numbers:
        """Starts of `waiting` sequences in a slot whose `available` fraction does not decrease."""
        if waiting < _ROUNDING:
            return np.zeros(len(available))
        starts = np.convolve(np.diff(available, prepend=0.0), self.always[: len(available)])[: len(available)]
        limited: Numbers = np.diff(np.minimum(starts.cumsum(), waiting), prepend=0.0)
        return limited


FIT_PROBABILITY = 0.9
"""Probability that the sequences in flight fit in the cache, in the round in which they need most."""

_STEPS = 256
"""Maximum number of time steps, each of several decode rounds, into which the longest response is divided."""


class Arrivals(Enum):
    """When further batches of sequences arrive; a batch arrives at the end of a period of the steady state."""

    NEVER = auto()
    EVENLY = auto()  # at constant intervals, when replicas wait for each other
    IN_ORDER = auto()  # when the first batch in flight is complete
    FIRST_ENDED = auto()  # when as many sequences as a batch has have finished


class CacheNeed(NamedTuple):
    """KV blocks of a replica; expected pre-emptions per period, and expected tokens pre-empted each time."""

    blocks: int
    preemptions: float
    preempted_tokens: float


class _Starts(NamedTuple):
    """Expected sequences that start in each step in one slot, and the first step that counts for the cache size."""

    sequences: Numbers
    first: int = 0


class LiveTokens:
    """Cache needs under one distribution of prompt and response lengths; results are memoized."""

    def __init__(self, prompts: Histogram, responses: Histogram, longest: int) -> None:
        """`longest` is the maximum number of tokens of a sequence."""
        self._prompts, self._responses, self._longest = prompts, responses, longest
        self._step = -(-responses.maximum // _STEPS)
        self._known: dict[tuple[int, int, int, Arrivals, int], CacheNeed] = {}

    def need(
        self, num_slots: int, in_flight: int, *, num_rows: int, arrivals: Arrivals, rows_per_prompt: int = 1
    ) -> CacheNeed:
        """Return the cache that `num_slots` slots and `in_flight` sequences need, if batches of `num_rows` arrive.

        `rows_per_prompt` sequences share the KV blocks of a prompt. The need is at least that of any smaller power of
        two of slots, so that more slots never need less.
        """
        key = num_slots, in_flight, num_rows, arrivals, rows_per_prompt
        if key not in self._known:
            self._known[key] = self._need(*key)
        return self._known[key]

    def _need(
        self, num_slots: int, in_flight: int, num_rows: int, arrivals: Arrivals, rows_per_prompt: int
    ) -> CacheNeed:
        starts, first = self._starts(num_slots, in_flight, num_rows, arrivals)
        alive, tokens = self._refills.alive, self._tokens(rows_per_prompt)
        mean = np.convolve(starts, alive * tokens)[first:]
        square = np.convolve(starts, alive * (tokens**2 + self._prompt_variance))[first:]
        spread = np.sqrt(np.maximum(square - mean**2, 0.0) * num_slots)
        quantiles = num_slots * mean + NormalDist().inv_cdf(FIT_PROBABILITY) * spread
        peak = int(quantiles.argmax())
        min_blocks = num_blocks_for(self._longest)
        max_blocks = num_slots * min_blocks
        if fewer := 1 << (num_slots - 1).bit_length() >> 1:
            need_of_fewer = self.need(
                fewer, in_flight, num_rows=num_rows, arrivals=arrivals, rows_per_prompt=rows_per_prompt
            )
            min_blocks = need_of_fewer.blocks
        blocks = min(max_blocks, max(min_blocks, num_blocks_for(int(np.ceil(quantiles[peak])))))
        if blocks == max_blocks or not spread[peak]:
            return CacheNeed(blocks, 0.0, 0.0)
        quantile = (blocks * BLOCK_TOKENS - num_slots * float(mean[peak])) / float(spread[peak])
        overflow = 1 - NormalDist().cdf(quantile)
        excess = float(spread[peak]) * (NormalDist().pdf(quantile) - quantile * overflow)
        return CacheNeed(blocks, max(1.0, in_flight / num_slots) * overflow, excess / overflow if overflow else 0.0)

    def _starts(self, num_slots: int, in_flight: int, num_rows: int, arrivals: Arrivals) -> _Starts:
        """Expected starts per step.

        A period takes at least its work over all slots, and the batches in flight together take at least the longest
        response of one; longer periods leave more slots empty.

        A run starts with all sequences in flight at once. With equal periods, or delivery of those that finish first,
        the starts spread out afterwards; the cache is not sized for this initial peak, in which some sequences wait.
        """
        refills, waves, batch = self._refills, in_flight / num_slots, num_rows / num_slots
        longest = self._responses.expected_maximum(num_rows) / self._step
        period = longest * num_rows / in_flight
        match arrivals:
            case Arrivals.NEVER:
                return _Starts(refills.alone(waves))
            case Arrivals.EVENLY:
                always_full = batch * refills.alive.sum() >= period
                return _Starts(refills.always if always_full else refills.evenly(batch, period))
            case Arrivals.IN_ORDER:
                return _Starts(refills.in_order(waves, batch, longest))
            case Arrivals.FIRST_ENDED:
                if in_flight - num_rows >= num_slots:  # this many are unfinished whenever a period ends
                    return _Starts(refills.always)
                return _Starts(refills.first_ended(waves, batch), len(refills.alive))

    @cached_property
    def _refills(self) -> SlotRefills:
        steps = -(-np.array(self._responses.tokens) // self._step)
        ending = np.bincount(steps - 1, weights=np.array(self._responses.probabilities))
        return SlotRefills(ending.astype(np.float64))

    def _tokens(self, rows_per_prompt: int) -> Numbers:
        """Expected tokens of a sequence after each step: its share of the prompt, sampled, next, and half a block."""
        alive = self._refills.alive
        shared = (1 - (1 - alive) ** rows_per_prompt) / (rows_per_prompt * alive)
        sampled = (np.arange(len(alive)) + 0.5) * self._step
        tokens: Numbers = self._prompts.mean * shared + sampled + 1 + (BLOCK_TOKENS - 1) / 2
        return tokens

    @cached_property
    def _prompt_variance(self) -> float:
        lengths = zip(self._prompts.tokens, self._prompts.probabilities, strict=True)
        return sum(p * (tokens - self._prompts.mean) ** 2 for tokens, p in lengths)
