"""How long one call of a reward or a tool takes, as a distribution in seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from meshwright.profiles.documents import Document

_NUM_PARTS = 512
"""Of a log-normal, equally likely: where p99 is 10 times the mean, theirs comes out 1 % low."""

_P99 = NormalDist().inv_cdf(0.99)


@dataclass(frozen=True)
class Latencies:
    """The probability of each time: `seconds` ascending, `probabilities` summing to 1."""

    seconds: tuple[float, ...]
    probabilities: tuple[float, ...]

    @cached_property
    def mean(self) -> float:
        return math.fsum(s * p for s, p in zip(self.seconds, self.probabilities, strict=True))

    @property
    def longest(self) -> float:
        return self.seconds[-1]

    def within(self, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        """The probability of no more than each of these times, of the same shape."""
        found: NDArray[np.float64] = self._reached[np.searchsorted(self.seconds, seconds, side="right")]
        return found

    @cached_property
    def _reached(self) -> NDArray[np.float64]:
        reached: NDArray[np.float64] = np.concatenate([[0.0], np.cumsum(self.probabilities)])
        return np.clip(reached, 0.0, 1.0)


class MeasuredCalls(Document):
    """What a distribution was measured on: calls that were answered, and those that were not."""

    num_calls: int = Field(gt=0, description="calls that were answered")
    num_failed: int = Field(default=0, ge=0, description="calls that failed and are not counted")
    date: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}$", description="day of the measurement, as YYYY-MM-DD")

    @property
    def told(self) -> str:
        """For people."""
        failed = f", {self.num_failed} more failed" if self.num_failed else ""
        return f"the mean of {self.num_calls} on {self.date}{failed}"


class LatencySpec(Document):
    """Seconds of a call: `fixed`, log-normal by `p99` with `mean` or `median`, or a `histogram` of [seconds, weight].

    `max` cuts every form: longer calls are counted at `max`. `measured` is of a histogram that `profile` has taken.
    """

    fixed: float | None = Field(default=None, ge=0, le=1e6, description="every call takes this")
    mean: float | None = Field(default=None, gt=0, le=1e6, description="mean of a log-normal distribution")
    median: float | None = Field(default=None, gt=0, le=1e6, description="median of a log-normal distribution")
    p99: float | None = Field(default=None, gt=0, le=1e6, description="99th percentile of a log-normal distribution")
    histogram: tuple[tuple[float, float], ...] | None = Field(default=None, description="pairs of seconds and weight")
    max: float | None = Field(default=None, gt=0, le=1e6, description="longest call; longer ones are cut here")
    measured: MeasuredCalls | None = Field(default=None, description="the calls that a histogram was taken from")

    @model_serializer(mode="wrap")
    def _without_absent(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What was not measured is written as it was before anything could be."""
        return {key: value for key, value in written(self).items() if key != "measured" or value}

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        lognormal = any(value is not None for value in (self.mean, self.median, self.p99))
        if sum((self.fixed is not None, lognormal, self.histogram is not None)) != 1:
            raise ValueError("give one of: fixed, p99 with mean or median, or histogram")
        if lognormal and (self.p99 is None or (self.mean is None) == (self.median is None)):
            raise ValueError("a log-normal needs p99 and one of mean and median")
        if lognormal:
            self._sigma()
        if any(s < 0 or w < 0 for s, w in self.histogram or ()):
            raise ValueError("a histogram needs seconds of 0 or more and weights of 0 or more")
        if self.histogram is not None and not any(w > 0 for _, w in self.histogram):
            raise ValueError("a histogram needs a weight that is not 0")
        if self.measured and math.fsum(w for _, w in self.histogram or ()) != self.measured.num_calls:
            raise ValueError(f"measured.num_calls={self.measured.num_calls} is not what the histogram's weights add to")
        return self

    @property
    def told(self) -> str:
        """Its mean, and the calls that it was measured on, for people."""
        mean = f"{self.resolve().mean:.3g} s"
        return f"{mean} ({self.measured.told})" if self.measured else mean

    def resolve(self) -> Latencies:
        """The distribution, cut at `max`."""
        if self.fixed is not None:
            return _cut(((self.fixed, 1.0),), self.max)
        return _cut(self.histogram if self.histogram is not None else self._lognormal(), self.max)

    def _lognormal(self) -> tuple[tuple[float, float], ...]:
        """Equally likely parts, each at the quantile of its middle."""
        assert self.p99 is not None
        sigma = self._sigma()
        median = self.p99 / math.exp(_P99 * sigma)
        middles = ((i + 0.5) / _NUM_PARTS for i in range(_NUM_PARTS))
        return tuple((median * math.exp(sigma * NormalDist().inv_cdf(q)), 1.0 / _NUM_PARTS) for q in middles)

    def _sigma(self) -> float:
        """The deviation of the logarithm, from p99 / median = exp(z s) or p99 / mean = exp(z s - s^2 / 2), of whose two
        answers the smaller; raises ValueError where there is none."""
        assert self.p99 is not None
        if self.median is not None:
            if self.p99 < self.median:
                raise ValueError(f"p99={self.p99:g} is less than median={self.median:g}; raise it")
            return math.log(self.p99 / self.median) / _P99
        assert self.mean is not None
        ratio, most = self.p99 / self.mean, math.exp(_P99**2 / 2)
        if not 1 <= ratio <= most:
            raise ValueError(
                f"p99={self.p99:g} is {ratio:.3g} times mean={self.mean:g}, and a log-normal has between 1 and "
                f"{most:.3g} times; change one, or give a histogram"
            )
        return _P99 - math.sqrt(max(_P99**2 - 2 * math.log(ratio), 0.0))


def _cut(pairs: tuple[tuple[float, float], ...], longest: float | None) -> Latencies:
    weights: dict[float, float] = {}
    for seconds, weight in pairs:
        if weight:
            at = seconds if longest is None else min(seconds, longest)
            weights[at] = weights.get(at, 0.0) + weight
    total = math.fsum(weights.values())
    kept = sorted((s, w / total) for s, w in weights.items())
    return Latencies(tuple(s for s, _ in kept), tuple(p for _, p in kept))
