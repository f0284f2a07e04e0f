"""The size of a replica's paged KV cache, from the distribution of tokens that its sequences in flight hold.

Slots are assumed independent, so that their sum is approximately normal. The cache is sized for a quantile of this sum
in the decode round in which it is largest; sequences that need more are pre-empted.
"""

from __future__ import annotations

from enum import Enum, auto
from functools import cached_property
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from meshwright.profiles.in_flight.refills import Numbers, SlotRefills
from meshwright.profiles.lengths import Histogram
from meshwright.profiles.packing import BLOCK_TOKENS, num_blocks_for

FIT_PROBABILITY = 0.9
"""Probability that the sequences in flight fit in the cache, in the round in which they need most."""

_STEPS = 256
"""Maximum number of time steps, each of several decode rounds, into which the longest response is divided."""


class Arrivals(Enum):
    """When further batches of sequences arrive; a batch arrives at the end of a period of the steady state."""

    NEVER = auto()
    EVENLY = auto()  # at constant intervals, when replicas wait for each other
    IN_ORDER = auto()  # when the first batch in flight is complete
    FIRST_ENDED = auto()  # when as many sequences have finished as a batch has


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
                if in_flight - num_rows >= num_slots:  # so many are unfinished whenever a period ends
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
