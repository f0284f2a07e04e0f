"""Multi-turn rollouts: the model generates, a tool answers, and the model continues after the tool tokens.

A rollout of k turns has a_1 ... a_k sampled tokens and r_1 ... r_(k-1) tool tokens between them. If all are
independent, their sum has a compound distribution with the generating function sum_k P(k) A(z)^k R(z)^(k-1) (Feller, An
Introduction to Probability Theory, volume 1, chapter XII). It is computed by a Fourier transform, without random
sampling.
"""

from __future__ import annotations

import math
from functools import cached_property, lru_cache
from typing import Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from meshwright.profiles.documents import Document
from meshwright.profiles.environment.latency import Latencies, LatencySpec
from meshwright.profiles.lengths import Histogram, LengthSpec

_MAX_POINTS = 2**14
"""Maximum points of a Fourier transform; longer sums are computed on a coarser grid."""

_EDGES = np.concatenate([np.linspace(0, 0.9, 65)[:-1], 1 - 0.1 * np.logspace(0, -5, 64), [1.0]])
"""Edges of the quantile bins to which a sum is reduced, keeping each mean; bins are finer in the tail."""

MAX_TURNS = 1024
"""Maximum number of turns of a rollout."""

_NUMBER = "turns of a rollout"
_RESULT = "tokens of a tool's answer between two turns; longer answers are truncated to its max"
_LATENCY = "latency of one call of the tool"
_MAX_TOKENS = "tokens after the prompt, sampled and tool tokens, at which a rollout is truncated"


class ToolTurns(Document):
    """The turns of a rollout; in a workload with turns, `response` has the sampled tokens of each turn."""

    number: LengthSpec = Field(description=_NUMBER)
    result: LengthSpec = Field(description=_RESULT)
    latency_seconds: LatencySpec = Field(default=LatencySpec(fixed=0.0, assumed=True), description=_LATENCY)
    max_tokens: int = Field(gt=0, description=_MAX_TOKENS)

    @model_validator(mode="after")
    def _few_turns(self) -> Self:
        if self.number.max > MAX_TURNS:
            raise ValueError(f"turns.number.max={self.number.max} is more than {MAX_TURNS}; use that or fewer")
        return self

    def lengths(self, response: LengthSpec) -> Histogram:
        """Return the lengths of sampled and tool tokens together; `response` has the lengths that one turn samples."""
        return compound_distribution(
            _resolved(self.number), _resolved(response), _resolved(self.result), self.max_tokens
        )

    def sampled(self, response: LengthSpec) -> Histogram:
        """Return the lengths of the sampled tokens alone, truncated at `max_tokens` as if there were no tool tokens."""
        return compound_distribution(_resolved(self.number), _resolved(response), None, self.max_tokens)

    @cached_property
    def latencies(self) -> Latencies:
        """Latency distribution of one call of the tool."""
        return self.latency_seconds.resolve()

    @property
    def mean_calls(self) -> float:
        """Mean number of tool calls of a rollout."""
        return _resolved(self.number).mean - 1

    def rounds(self, response: LengthSpec, seconds_of_round: float) -> Histogram:
        """Return the decode rounds from a rollout's first to its last, including those in which it waits for its tool.

        `seconds_of_round` converts tool latencies to rounds.
        """
        if math.isinf(seconds_of_round):
            return self.sampled(response)
        latencies = self.latencies
        pairs = zip(latencies.seconds, latencies.probabilities, strict=True)
        waits = _rounded([(seconds / seconds_of_round, p) for seconds, p in pairs])
        longest = self.max_tokens + math.ceil(latencies.longest / seconds_of_round) * (self.number.max - 1)
        return compound_distribution(_resolved(self.number), _resolved(response), waits, longest)


@lru_cache(maxsize=64)  # a cost model needs the same ones again and again
def _resolved(lengths: LengthSpec) -> Histogram:
    return lengths.resolve()


def compound_distribution(number: Histogram, each: Histogram, between: Histogram | None, longest: int) -> Histogram:
    """Return the distribution of the sum of `number` values of `each` and `number` - 1 of `between`, at most `longest`.

    It has at most about 130 values: the means of as many quantile bins.
    """
    between = between if number.maximum > 1 else None
    max_sum = number.maximum * each.maximum + (number.maximum - 1) * (between.maximum if between else 0)
    step = -(-max_sum // _MAX_POINTS)
    size = 2 ** math.ceil(math.log2(max_sum // step + 2 * number.maximum + 2))
    response = np.fft.rfft(_on_grid(each, step, size))
    result = np.fft.rfft(_on_grid(between, step, size)) if between else np.ones_like(response)
    total, power = np.zeros_like(response), np.ones_like(response)
    turn_probabilities = dict(zip(number.tokens, number.probabilities, strict=True))
    for turn in range(1, number.maximum + 1):
        power = power * response
        total += turn_probabilities.get(turn, 0.0) * power
        power = power * result
    weights = np.clip(np.fft.irfft(total, size), 0.0, None)
    return _in_bins(np.minimum(np.arange(size) * step, longest), weights / weights.sum())


def _on_grid(lengths: Histogram, step: int, size: int) -> NDArray[np.float64]:
    """Probabilities at multiples of `step` [size]; lengths between them are split so that the mean is preserved."""
    positions, probabilities = np.array(lengths.tokens) / step, np.array(lengths.probabilities)
    below = np.floor(positions).astype(int)
    grid = np.zeros(size)
    np.add.at(grid, below, probabilities * (below + 1 - positions))
    np.add.at(grid, below + 1, probabilities * (positions - below))
    return grid


def _in_bins(lengths: NDArray[np.int64], probabilities: NDArray[np.float64]) -> Histogram:
    """The distribution of lengths reduced to the mean of each quantile bin; the longest length has a bin of its own."""
    middles = probabilities.cumsum() - probabilities / 2
    bins = np.searchsorted(_EDGES, middles, side="right").astype(np.int64)
    bins[lengths == lengths.max()] = len(_EDGES) + 1
    weights = np.bincount(bins, probabilities)
    means = np.bincount(bins, probabilities * lengths) / np.where(weights > 0, weights, 1.0)
    kept = weights > 1e-12
    return _rounded(list(zip(means[kept].tolist(), (weights[kept] / weights[kept].sum()).tolist(), strict=True)))


def _rounded(pairs: list[tuple[float, float]]) -> Histogram:
    """(number, probability) pairs, split between the integers below and above so that the mean is preserved."""
    weights: dict[int, float] = {}
    for number, probability in pairs:
        below = math.floor(number + 1e-9)
        above = number - below if number - below > 1e-9 else 0.0
        weights[below] = weights.get(below, 0.0) + probability * (1 - above)
        if above > 0:
            weights[below + 1] = weights.get(below + 1, 0.0) + probability * above
    return Histogram(tuple(sorted(weights)), tuple(weights[number] for number in sorted(weights)))
