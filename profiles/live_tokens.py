"""The tokens that a replica's sequences in flight hold at a time, as a distribution: what a paged cache is planned by.

A slot is taken by one sequence after another, so that its age is that of a renewal process which began with the turn:
with p the probabilities of response lengths, a sequence begins in round t with u(t) = sum_n p(n) u(t - n), u(0) = 1
(Feller, An Introduction to Probability Theory, volume 1, chapter XIII), and is a rounds old at t with u(t-a) P(R>a).
Slots are taken as independent, so that the sum of many is near a normal distribution. Most tokens are held in the round
in which its quantile is largest. The cache has as many, and no more: what is drawn beyond it gives way and waits.
"""

from __future__ import annotations

from functools import cached_property
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.profiles.cache import BLOCK_TOKENS, blocks_of
from meshwright.profiles.lengths import Histogram

Numbers = NDArray[np.float64]

PROBABILITY = 0.9
"""With which the sequences in flight need no more than the cache has, in the round in which they need most."""

_STEPS, _LIFETIMES = 256, 4
"""Rounds are counted in steps, so many of the longest response at most, over so many longest responses."""


class CacheNeed(NamedTuple):
    """Blocks of a replica's cache; how often in a turn sequences give way on average, and the tokens then."""

    blocks: int
    preemptions: float
    preempted_tokens: float


class LiveTokens:
    """Of one workload's lengths. Every answer is computed once."""

    def __init__(self, prompts: Histogram, responses: Histogram, longest: int) -> None:
        """`longest` tokens has a sequence at most."""
        self._prompts, self._responses, self._longest = prompts, responses, longest
        self._step = -(-responses.maximum // _STEPS)
        self._known: dict[tuple[int, int, bool, int], CacheNeed] = {}

    def need(self, num_slots: int, in_flight: int, *, runs_on: bool, rows_per_prompt: int = 1) -> CacheNeed:
        """Of `num_slots` slots through which `in_flight` sequences go in a turn, or with `runs_on` turn after turn;
        `rows_per_prompt` read one prompt."""
        key = num_slots, in_flight, runs_on, rows_per_prompt
        if key not in self._known:
            self._known[key] = self._need(*key)
        return self._known[key]

    def _need(self, num_slots: int, in_flight: int, runs_on: bool, rows_per_prompt: int) -> CacheNeed:
        waves = in_flight / num_slots
        begun = self._begun if runs_on else _until(self._begun, waves)
        tokens = self._tokens(rows_per_prompt)
        mean = np.convolve(begun, self._alive * tokens)
        square = np.convolve(begun, self._alive * (tokens**2 + self._prompt_variance))
        spread = np.sqrt(np.maximum(square - mean**2, 0.0) * num_slots)
        quantiles = num_slots * mean + NormalDist().inv_cdf(PROBABILITY) * spread
        peak = int(quantiles.argmax())
        most = num_slots * blocks_of(self._longest)
        blocks = min(most, max(blocks_of(self._longest), blocks_of(int(np.ceil(quantiles[peak])))))
        if blocks == most or not spread[peak]:
            return CacheNeed(blocks, 0.0, 0.0)
        beyond = (blocks * BLOCK_TOKENS - num_slots * float(mean[peak])) / float(spread[peak])
        chance = 1 - NormalDist().cdf(beyond)
        excess = float(spread[peak]) * (NormalDist().pdf(beyond) - beyond * chance)
        return CacheNeed(blocks, max(1.0, waves) * chance, excess / chance if chance else 0.0)

    @cached_property
    def _ended(self) -> Numbers:
        """The probability that a response takes k + 1 steps."""
        steps = -(-np.array(self._responses.tokens) // self._step)
        return np.bincount(steps - 1, weights=np.array(self._responses.probabilities)).astype(np.float64)

    @cached_property
    def _alive(self) -> Numbers:
        """The probability that a response is not over after so many steps."""
        found: Numbers = self._ended[::-1].cumsum()[::-1]
        return found

    @cached_property
    def _begun(self) -> Numbers:
        """Sequences that begin in each step, in one slot."""
        longest = len(self._ended)
        begun = np.zeros(_LIFETIMES * longest)
        begun[0] = 1.0
        for step in range(1, len(begun)):
            before = begun[max(0, step - longest) : step][::-1]
            begun[step] = before @ self._ended[: len(before)]
        return begun

    def _tokens(self, rows_per_prompt: int) -> Numbers:
        """That a sequence holds after so many steps: its part of the prompt, what it has drawn, the next token, and
        half of the last block."""
        shared = (1 - (1 - self._alive) ** rows_per_prompt) / (rows_per_prompt * self._alive)
        drawn = (np.arange(len(self._alive)) + 0.5) * self._step
        found: Numbers = self._prompts.mean * shared + drawn + 1 + (BLOCK_TOKENS - 1) / 2
        return found

    @cached_property
    def _prompt_variance(self) -> float:
        lengths = zip(self._prompts.tokens, self._prompts.probabilities, strict=True)
        return sum(p * (tokens - self._prompts.mean) ** 2 for tokens, p in lengths)


def _until(begun: Numbers, number: float) -> Numbers:
    """The first so many of those that begin."""
    before = np.concatenate([[0.0], begun.cumsum()[:-1]])
    found: Numbers = np.clip(number - before, 0.0, begun)
    return found
