"""Turns of a rollout: the model draws, a tool answers, the model goes on behind what it was told.

A rollout of k turns draws a_1 ... a_k tokens and is told r_1 ... r_(k-1) between them. With all of them independent its
sum is a compound distribution: of generating functions, sum_k P(k) A(z)^k R(z)^(k-1) (Feller, An Introduction to
Probability Theory, volume 1, chapter XII). They are taken by a Fourier transform, so that nothing is drawn.
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

_MOST_POINTS = 2**14
"""Of a transform: longer sums are taken in steps of several units."""

_EDGES = np.concatenate([np.linspace(0, 0.9, 65)[:-1], 1 - 0.1 * np.logspace(0, -5, 64), [1.0]])
"""Between which a sum keeps its mean alone: equally likely parts, and finer ones where the longest lie."""

MOST_TURNS = 1024
"""Of a rollout."""

_NUMBER = "turns of a rollout"
_RESULT = "tokens of a tool's answer between two turns; longer answers are truncated to its max"
_LATENCY = "latency of one call of the tool"
_MAX_TOKENS = "tokens behind the prompt, generated and of tools, at which a rollout is truncated"


class ToolTurns(Document):
    """Several turns a rollout: the response of a workload is then that of each turn."""

    number: LengthSpec = Field(description=_NUMBER)
    result: LengthSpec = Field(description=_RESULT)
    latency_seconds: LatencySpec = Field(default=LatencySpec(fixed=0.0), description=_LATENCY)
    max_tokens: int = Field(gt=0, description=_MAX_TOKENS)

    @model_validator(mode="after")
    def _few_turns(self) -> Self:
        if self.number.max > MOST_TURNS:
            raise ValueError(f"turns.number.max={self.number.max} is more than {MOST_TURNS}; use that or fewer")
        return self

    def lengths(self, response: LengthSpec) -> Histogram:
        """Tokens behind the prompt, drawn and told, where each turn draws a `response`."""
        return summed(_resolved(self.number), _resolved(response), _resolved(self.result), self.max_tokens)

    def drawn(self, response: LengthSpec) -> Histogram:
        """Of those the tokens that are drawn. The most that a rollout has cuts this sum as if nothing were told."""
        return summed(_resolved(self.number), _resolved(response), None, self.max_tokens)

    @cached_property
    def latencies(self) -> Latencies:
        """Of one call of the tool."""
        return self.latency_seconds.resolve()

    @property
    def mean_calls(self) -> float:
        """Of the tool by a rollout."""
        return _resolved(self.number).mean - 1

    def rounds(self, response: LengthSpec, seconds_of_round: float) -> Histogram:
        """From a rollout's first round to its last, those in which it waits for its tool counted by their seconds."""
        if math.isinf(seconds_of_round):
            return self.drawn(response)
        latencies = self.latencies
        pairs = zip(latencies.seconds, latencies.probabilities, strict=True)
        waits = _whole([(seconds / seconds_of_round, p) for seconds, p in pairs])
        longest = self.max_tokens + math.ceil(latencies.longest / seconds_of_round) * (self.number.max - 1)
        return summed(_resolved(self.number), _resolved(response), waits, longest)


@lru_cache(maxsize=64)  # a cost model asks for the same ones in every iteration
def _resolved(lengths: LengthSpec) -> Histogram:
    return lengths.resolve()


def summed(number: Histogram, each: Histogram, between: Histogram | None, longest: int) -> Histogram:
    """The distribution of `number` draws of `each` and one less of `between`, cut at `longest`.

    The mean is kept in each of some hundred parts.
    """
    most = number.maximum * each.maximum + (number.maximum - 1) * (between.maximum if between else 0)
    step = -(-most // _MOST_POINTS)
    size = 2 ** math.ceil(math.log2(most // step + 2 * number.maximum + 2))
    drawn = np.fft.rfft(_on_grid(each, step, size))
    told = np.fft.rfft(_on_grid(between, step, size)) if between else np.ones_like(drawn)
    total, power = np.zeros_like(drawn), np.ones_like(drawn)
    chances = dict(zip(number.tokens, number.probabilities, strict=True))
    for turn in range(1, number.maximum + 1):
        power = power * drawn
        total += chances.get(turn, 0.0) * power
        power = power * told
    found = np.clip(np.fft.irfft(total, size), 0.0, None)
    return _in_parts(np.minimum(np.arange(size) * step, longest), found / found.sum())


def _on_grid(lengths: Histogram, step: int, size: int) -> NDArray[np.float64]:
    """Probabilities at multiples of `step`, each length split between its neighbours so that the mean is kept."""
    places, chances = np.array(lengths.tokens) / step, np.array(lengths.probabilities)
    below = np.floor(places).astype(int)
    grid = np.zeros(size)
    np.add.at(grid, below, chances * (below + 1 - places))
    np.add.at(grid, below + 1, chances * (places - below))
    return grid


def _in_parts(lengths: NDArray[np.int64], chances: NDArray[np.float64]) -> Histogram:
    """The mean of each part, of the last one the longest too."""
    middles = chances.cumsum() - chances / 2
    parts = np.searchsorted(_EDGES, middles, side="right").astype(np.int64)
    parts[lengths == lengths.max()] = len(_EDGES) + 1
    weights = np.bincount(parts, chances)
    means = np.bincount(parts, chances * lengths) / np.where(weights > 0, weights, 1.0)
    kept = weights > 1e-12
    return _whole(list(zip(means[kept].tolist(), (weights[kept] / weights[kept].sum()).tolist(), strict=True)))


def _whole(pairs: list[tuple[float, float]]) -> Histogram:
    """Numbers with their probabilities, split between the whole ones below and above so that the mean is kept."""
    found: dict[int, float] = {}
    for number, chance in pairs:
        below = math.floor(number + 1e-9)
        above = max(0.0, number - below)
        found[below] = found.get(below, 0.0) + chance * (1 - above)
        if above > 0:
            found[below + 1] = found.get(below + 1, 0.0) + chance * above
    return Histogram(tuple(sorted(found)), tuple(found[number] for number in sorted(found)))
