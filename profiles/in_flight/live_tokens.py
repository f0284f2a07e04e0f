"""The tokens that a replica's sequences in flight hold at a time: what a paged cache is planned by.

Slots are taken as independent, so that the sum of many is near a normal distribution. The cache has its quantile in the
round in which that is largest, and no more: what is drawn beyond it gives way and waits.
"""

from __future__ import annotations

from enum import Enum, auto
from functools import cached_property
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from meshwright.profiles.in_flight.refills import Numbers, Refills
from meshwright.profiles.lengths import Histogram
from meshwright.profiles.packing import BLOCK_TOKENS, blocks_of

PROBABILITY = 0.9
"""With which the sequences in flight need no more than the cache has, in the round in which they need most."""

_STEPS = 256
"""Rounds are counted in steps, so many of the longest response at most."""


class Arrivals(Enum):
    """When a batch of sequences arrives behind those in flight, which is when a turn ends."""

    NEVER = auto()
    EVENLY = auto()  # after turns of one length, where replicas that wait for each other keep a pace
    IN_ORDER = auto()  # when the first batch in flight is complete
    FIRST_ENDED = auto()  # when as many sequences have ended as a batch has


class CacheNeed(NamedTuple):
    """Blocks of a replica's cache; how often in a turn sequences give way on average, and the tokens then."""

    blocks: int
    preemptions: float
    preempted_tokens: float


class _Begun(NamedTuple):
    """Sequences that begin in each step, in one slot, and the step from which on the cache is to hold them."""

    sequences: Numbers
    first: int = 0


class LiveTokens:
    """Those of one distribution of prompts and responses. Every answer is computed once."""

    def __init__(self, prompts: Histogram, responses: Histogram, longest: int) -> None:
        """`longest` tokens has a sequence at most."""
        self._prompts, self._responses, self._longest = prompts, responses, longest
        self._step = -(-responses.maximum // _STEPS)
        self._known: dict[tuple[int, int, int, Arrivals, int], CacheNeed] = {}

    def need(
        self, num_slots: int, in_flight: int, *, num_rows: int, arrivals: Arrivals, rows_per_prompt: int = 1
    ) -> CacheNeed:
        """Of `num_slots` slots and `in_flight` sequences, behind which batches of `num_rows` arrive; `rows_per_prompt`
        read one prompt.

        More slots never need less: it is at least what any smaller power of two of them does.
        """
        key = num_slots, in_flight, num_rows, arrivals, rows_per_prompt
        if key not in self._known:
            self._known[key] = self._need(*key)
        return self._known[key]

    def _need(
        self, num_slots: int, in_flight: int, num_rows: int, arrivals: Arrivals, rows_per_prompt: int
    ) -> CacheNeed:
        begun, first = self._begun(num_slots, in_flight, num_rows, arrivals)
        alive, tokens = self._refills.alive, self._tokens(rows_per_prompt)
        mean = np.convolve(begun, alive * tokens)[first:]
        square = np.convolve(begun, alive * (tokens**2 + self._prompt_variance))[first:]
        spread = np.sqrt(np.maximum(square - mean**2, 0.0) * num_slots)
        quantiles = num_slots * mean + NormalDist().inv_cdf(PROBABILITY) * spread
        peak = int(quantiles.argmax())
        least = blocks_of(self._longest)
        most = num_slots * least
        if fewer := 1 << (num_slots - 1).bit_length() >> 1:
            known = self.need(fewer, in_flight, num_rows=num_rows, arrivals=arrivals, rows_per_prompt=rows_per_prompt)
            least = known.blocks
        blocks = min(most, max(least, blocks_of(int(np.ceil(quantiles[peak])))))
        if blocks == most or not spread[peak]:
            return CacheNeed(blocks, 0.0, 0.0)
        beyond = (blocks * BLOCK_TOKENS - num_slots * float(mean[peak])) / float(spread[peak])
        chance = 1 - NormalDist().cdf(beyond)
        excess = float(spread[peak]) * (NormalDist().pdf(beyond) - beyond * chance)
        return CacheNeed(blocks, max(1.0, in_flight / num_slots) * chance, excess / chance if chance else 0.0)

    def _begun(self, num_slots: int, in_flight: int, num_rows: int, arrivals: Arrivals) -> _Begun:
        """A turn is no shorter than its work over full slots, and batches in flight together no shorter than the
        longest response of one; a longer turn leaves more slots empty.

        At its start a run begins all that is in flight. Equal turns, and those that deliver what ends first, spread it:
        that once, what does not fit has to wait.
        """
        refills, waves, batch = self._refills, in_flight / num_slots, num_rows / num_slots
        longest = self._responses.expected_maximum(num_rows) / self._step
        turn = longest * num_rows / in_flight
        match arrivals:
            case Arrivals.NEVER:
                return _Begun(refills.alone(waves))
            case Arrivals.EVENLY:
                takes_all = batch * refills.alive.sum() >= turn
                return _Begun(refills.always if takes_all else refills.evenly(batch, turn))
            case Arrivals.IN_ORDER:
                return _Begun(refills.in_order(waves, batch, longest))
            case Arrivals.FIRST_ENDED:
                if in_flight - num_rows >= num_slots:  # so many have not ended whenever a turn ends
                    return _Begun(refills.always)
                return _Begun(refills.first_ended(waves, batch), len(refills.alive))

    @cached_property
    def _refills(self) -> Refills:
        steps = -(-np.array(self._responses.tokens) // self._step)
        ending = np.bincount(steps - 1, weights=np.array(self._responses.probabilities))
        return Refills(ending.astype(np.float64))

    def _tokens(self, rows_per_prompt: int) -> Numbers:
        """That a sequence holds after so many steps: its part of the prompt, what it has drawn, the next token, and
        half of the last block."""
        alive = self._refills.alive
        shared = (1 - (1 - alive) ** rows_per_prompt) / (rows_per_prompt * alive)
        drawn = (np.arange(len(alive)) + 0.5) * self._step
        found: Numbers = self._prompts.mean * shared + drawn + 1 + (BLOCK_TOKENS - 1) / 2
        return found

    @cached_property
    def _prompt_variance(self) -> float:
        lengths = zip(self._prompts.tokens, self._prompts.probabilities, strict=True)
        return sum(p * (tokens - self._prompts.mean) ** 2 for tokens, p in lengths)
