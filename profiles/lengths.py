"""Distributions of prompt and response lengths, in tokens.

Every distribution becomes a histogram, over which costs are integrated; a mean is not enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from meshwright.profiles.documents import Document

_NUM_BINS, _NUM_TAIL_BINS = 64, 14
"""Number of equally likely bins of a log-normal, and of the parts of its last one, each half as likely as the one
before: the longest of a million lengths is still a bin of its own."""

_BISECTIONS = 60
"""Bisection steps after which a factor is exact to float precision."""

_POWER_RANGE, _POWER_RATIO = (0.25, 4.0), 1.001
"""Range of the exponent when stretching lengths, and the ratio at which its bisection ends."""


@dataclass(frozen=True)
class Histogram:
    """A discrete distribution of lengths: `tokens` ascending, `probabilities` summing to 1."""

    tokens: tuple[int, ...]
    probabilities: tuple[float, ...]

    @cached_property
    def mean(self) -> float:
        return math.fsum(t * p for t, p in zip(self.tokens, self.probabilities, strict=True))

    @property
    def maximum(self) -> int:
        return self.tokens[-1]

    def stratified_sample(self, count: int) -> NDArray[np.int64]:
        """Return a stratified sample of `count` lengths [count], ascending: the middle of each equally likely part."""
        ends = np.minimum(count, np.floor(self._cumulative * count + 0.5 + 1e-9)).astype(int)
        counts = np.diff(ends, prepend=0)
        counts[-1] += count - ends[-1]
        return np.repeat(np.array(self.tokens, dtype=np.int64), counts)

    @cached_property
    def _cumulative(self) -> NDArray[np.float64]:
        """The probability of at most each length."""
        return np.cumsum(self.probabilities)

    def plus(self, other: Histogram) -> Histogram:
        """Return the distribution of the sum of two independent lengths."""
        weights: dict[int, float] = {}
        for length, p in zip(self.tokens, self.probabilities, strict=True):
            for addend, q in zip(other.tokens, other.probabilities, strict=True):
                weights[length + addend] = weights.get(length + addend, 0.0) + p * q
        tokens = tuple(sorted(weights))
        return Histogram(tokens, tuple(weights[length] for length in tokens))

    @property
    def mean_tokens_in_flight(self) -> float:
        """Mean number of tokens sampled so far of a sequence in flight at a random time.

        Sequences are observed in proportion to their length (inspection paradox), halfway on average:
        E[n^2] / (2 E[n]).
        """
        square = sum(p * n * n for n, p in zip(self.tokens, self.probabilities, strict=True))
        return square / self.mean / 2

    def expected_maximum(self, count: int) -> float:
        """Return the expected longest of `count` independent lengths."""
        reached = np.minimum(1.0, self._cumulative) ** count
        return float(np.diff(reached, prepend=0.0) @ np.array(self.tokens))


@dataclass(frozen=True)
class InterpolatedLengths:
    """A distribution whose quantiles lie between those of two others, at `share` of the way from `low` to `high`.

    Means, expected maxima and stratified samples are linear in the quantiles, so they are interpolated directly.
    """

    low: Histogram
    high: Histogram
    share: float

    @property
    def mean(self) -> float:
        return self._between(self.low.mean, self.high.mean)

    def expected_maximum(self, count: int) -> float:
        """Return the expected longest of `count` independent lengths."""
        return self._between(self.low.expected_maximum(count), self.high.expected_maximum(count))

    def stratified_sample(self, count: int) -> NDArray[np.int64]:
        """Return a stratified sample of `count` lengths [count], ascending."""
        low, high = self.low.stratified_sample(count), self.high.stratified_sample(count)
        return np.rint(low + self.share * (high - low)).astype(np.int64)

    def _between(self, low: float, high: float) -> float:
        return low + self.share * (high - low)


Lengths: TypeAlias = Histogram | InterpolatedLengths
"""A distribution of lengths: a histogram, or one interpolated between two histograms."""


class LengthSpec(Document):
    """Lengths in tokens: fixed, log-normal by `median` and `p99`, or a `histogram` of [tokens, weight] pairs.

    Longer lengths count as `max`, in every form.
    """

    max: int = Field(gt=0, description="longest length in tokens; longer ones are truncated")
    fixed: int | None = Field(default=None, gt=0, description="every length is this")
    median: float | None = Field(default=None, gt=0, description="median of a log-normal distribution")
    p99: float | None = Field(default=None, gt=0, description="99th percentile of a log-normal distribution")
    histogram: tuple[tuple[int, float], ...] | None = Field(default=None, description="pairs of tokens and weight")

    @model_validator(mode="after")
    def _one_form(self) -> LengthSpec:
        forms = [self.fixed is not None, self.median is not None or self.p99 is not None, self.histogram is not None]
        if sum(forms) != 1:
            raise ValueError("give one of: fixed, median with p99, or histogram")
        if forms[1] and (self.median is None or self.p99 is None or self.p99 < self.median):
            raise ValueError("a log-normal needs median and p99 with p99 >= median")
        if self.fixed is not None and self.fixed > self.max:
            raise ValueError(f"fixed={self.fixed} is longer than max={self.max}")
        if any(t < 1 or w < 0 for t, w in self.histogram or ()):
            raise ValueError("a histogram needs lengths of 1 or more and weights of 0 or more")
        if self.histogram is not None and not any(w > 0 for _, w in self.histogram):
            raise ValueError("a histogram needs a weight that is not 0")
        return self

    def resolve(self) -> Histogram:
        """Return the histogram of this distribution, truncated at `max`."""
        if self.fixed is not None:
            return Histogram((self.fixed,), (1.0,))
        if self.histogram is not None:
            return _truncated(self.histogram, self.max)
        assert self.median is not None
        assert self.p99 is not None
        return _truncated(lognormal_bins(self.median, self.p99), self.max)

    def with_mean(self, mean: float) -> LengthSpec:
        """Scale all lengths by one factor, within 1..max, so that their mean is as near to `mean` as possible."""
        lengths = self.resolve()
        if math.isclose(lengths.mean, mean, rel_tol=1e-6):
            return self
        return _with_mean(tuple(zip(lengths.tokens, lengths.probabilities, strict=True)), mean, self.max)

    def stretched(self, mean: float, longest: float, count: int) -> LengthSpec:
        """Transform each length n to c n^b so that the mean is `mean` and the expected longest of `count` is `longest`,
        or as near as b between 1/4 and 4 allows.
        """
        lengths, low, high = self.resolve(), *_POWER_RANGE
        while True:
            power = math.sqrt(low * high)
            pairs = ((tokens**power, p) for tokens, p in zip(lengths.tokens, lengths.probabilities, strict=True))
            stretched = _with_mean(tuple(pairs), mean, self.max)
            if high / low < _POWER_RATIO:
                return stretched
            low, high = (power, high) if stretched.resolve().expected_maximum(count) < longest else (low, power)


def _with_mean(pairs: tuple[tuple[float, float], ...], mean: float, longest: int) -> LengthSpec:
    """The lengths scaled by one factor, within 1..longest, to this mean; `pairs` are (length, probability)."""
    low, high = 0.0, longest / pairs[0][0]
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        reached = math.fsum(p * min(max(length * middle, 1.0), longest) for length, p in pairs)
        low, high = (middle, high) if reached < mean else (low, middle)
    return LengthSpec(max=longest, histogram=tuple(_scaled(pairs, high, longest)))


def _scaled(pairs: tuple[tuple[float, float], ...], factor: float, longest: int) -> Iterator[tuple[int, float]]:
    """Each length times the factor, split between the integers below and above so that the mean is preserved."""
    for unscaled, weight in pairs:
        length = min(max(unscaled * factor, 1.0), float(longest))
        above = length - math.floor(length)
        yield math.floor(length), weight * (1 - above)
        if above:
            yield math.floor(length) + 1, weight * above


def lognormal_bins(median: float, p99: float) -> tuple[tuple[int, float], ...]:
    """Return the length and the probability of each bin of a log-normal, ascending: equally likely bins, the last of
    them in ever less likely parts, each at the quantile of its middle."""
    sigma = math.log(p99 / median) / NormalDist().inv_cdf(0.99)
    tail = [1.0 / _NUM_BINS / 2**part for part in range(_NUM_TAIL_BINS)]
    beyond = [1.0, *((_NUM_BINS - i) / _NUM_BINS for i in range(1, _NUM_BINS)), *tail[1:], 0.0]
    bins = [((above + below) / 2, above - below) for above, below in pairwise(beyond)]
    quantiles = [median * math.exp(-sigma * NormalDist().inv_cdf(middle)) for middle, _ in bins]
    return tuple((max(1, round(q)), weight) for q, (_, weight) in zip(quantiles, bins, strict=True))


def _truncated(pairs: tuple[tuple[int, float], ...], longest: int) -> Histogram:
    weights: dict[int, float] = {}
    for tokens, weight in pairs:
        weights[min(tokens, longest)] = weights.get(min(tokens, longest), 0.0) + weight
    total = math.fsum(weights.values())
    kept = sorted((t, w / total) for t, w in weights.items() if w > 0)
    return Histogram(tuple(t for t, _ in kept), tuple(p for _, p in kept))
