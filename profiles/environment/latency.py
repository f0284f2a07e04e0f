"""Latency distributions of one call of a reward or a tool, in seconds, given by a job or measured by timed calls."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from meshwright.profiles.documents import Document

_NUM_PARTS = 512
"""Equally likely parts of a log-normal; if p99 is 10 times the mean, their mean comes out 1 % low."""

_P99 = NormalDist().inv_cdf(0.99)


@dataclass(frozen=True)
class Latencies:
    """A discrete distribution: `seconds` ascending, `probabilities` summing to 1."""

    seconds: tuple[float, ...]
    probabilities: tuple[float, ...]

    @cached_property
    def mean(self) -> float:
        return math.fsum(s * p for s, p in zip(self.seconds, self.probabilities, strict=True))

    @property
    def longest(self) -> float:
        return self.seconds[-1]

    def cdf(self, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the cumulative probability at each of these times [...], in the same shape."""
        probabilities: NDArray[np.float64] = self._cumulative[np.searchsorted(self.seconds, seconds, side="right")]
        return probabilities

    @cached_property
    def _cumulative(self) -> NDArray[np.float64]:
        cumulative: NDArray[np.float64] = np.concatenate([[0.0], np.cumsum(self.probabilities)])
        return np.clip(cumulative, 0.0, 1.0)


class MeasuredCalls(Document):
    """The calls from which a distribution was measured, successful and failed."""

    num_calls: int = Field(gt=0, description="calls that were answered")
    num_failed: int = Field(default=0, ge=0, description="calls that failed and are not counted")
    date: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}$", description="day of the measurement, as YYYY-MM-DD")

    @property
    def description(self) -> str:
        """Description of the measurement for users."""
        failed = f", {self.num_failed} more failed" if self.num_failed else ""
        return f"the mean of {self.num_calls} on {self.date}{failed}"


class LatencySpec(Document):
    """Seconds of a call: `fixed`, log-normal by `p99` with `mean` or `median`, or a `histogram` of [seconds, weight].

    Longer calls count as `max`, in every form. `measured` belongs to a histogram that `profile` has recorded, `assumed`
    to a default that was neither given nor measured.
    """

    fixed: float | None = Field(default=None, ge=0, le=1e6, description="every call takes this")
    mean: float | None = Field(default=None, gt=0, le=1e6, description="mean of a log-normal distribution")
    median: float | None = Field(default=None, gt=0, le=1e6, description="median of a log-normal distribution")
    p99: float | None = Field(default=None, gt=0, le=1e6, description="99th percentile of a log-normal distribution")
    histogram: tuple[tuple[float, float], ...] | None = Field(default=None, description="pairs of seconds and weight")
    max: float | None = Field(default=None, gt=0, le=1e6, description="maximum latency; longer calls count as this")
    measured: MeasuredCalls | None = Field(default=None, description="the calls from which a histogram was measured")
    assumed: bool = Field(default=False, description="neither given nor measured")

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
            raise ValueError(f"measured.num_calls={self.measured.num_calls} is not the sum of the histogram's weights")
        if self.measured and self.assumed:
            raise ValueError("a measured latency is not assumed; leave one out")
        return self

    @property
    def description(self) -> str:
        """Mean latency and the calls from which it was measured, for users."""
        mean = f"{self.resolve().mean:.3g} s"
        return f"{mean} ({self.measured.description})" if self.measured else mean

    def resolve(self) -> Latencies:
        """Return the distribution, truncated at `max`."""
        if self.fixed is not None:
            return _truncated(((self.fixed, 1.0),), self.max)
        return _truncated(self.histogram if self.histogram is not None else self._lognormal(), self.max)

    def _lognormal(self) -> tuple[tuple[float, float], ...]:
        """Equally likely parts of the log-normal, each at the quantile of its middle."""
        assert self.p99 is not None
        sigma = self._sigma()
        median = self.p99 / math.exp(_P99 * sigma)
        middles = ((i + 0.5) / _NUM_PARTS for i in range(_NUM_PARTS))
        return tuple((median * math.exp(sigma * NormalDist().inv_cdf(q)), 1.0 / _NUM_PARTS) for q in middles)

    def _sigma(self) -> float:
        """The standard deviation s of the logarithm, from p99 / median = exp(z s) or p99 / mean = exp(z s - s^2 / 2).

        The latter has two solutions, of which the smaller is taken. Raises ValueError if there is none.
        """
        assert self.p99 is not None
        if self.median is not None:
            if self.p99 < self.median:
                raise ValueError(f"p99={self.p99:g} is less than median={self.median:g}; raise it")
            return math.log(self.p99 / self.median) / _P99
        assert self.mean is not None
        ratio, max_ratio = self.p99 / self.mean, math.exp(_P99**2 / 2)
        if not 1 <= ratio <= max_ratio:
            raise ValueError(
                f"p99={self.p99:g} is {ratio:.3g} times mean={self.mean:g}, and a log-normal has between 1 and "
                f"{max_ratio:.3g} times; change one, or give a histogram"
            )
        return _P99 - math.sqrt(max(_P99**2 - 2 * math.log(ratio), 0.0))


def _truncated(pairs: tuple[tuple[float, float], ...], longest: float | None) -> Latencies:
    weights: dict[float, float] = {}
    for seconds, weight in pairs:
        if weight:
            truncated = seconds if longest is None else min(seconds, longest)
            weights[truncated] = weights.get(truncated, 0.0) + weight
    total = math.fsum(weights.values())
    kept = sorted((s, w / total) for s, w in weights.items())
    return Latencies(tuple(s for s, _ in kept), tuple(p for _, p in kept))


CallKind: TypeAlias = Literal["reward", "tool"]


class CallKey(Document):
    """The key of timed calls: the callee and the samples per call, independent of the name that a job gives it."""

    kind: CallKind
    target: str = Field(min_length=1, description="a function, or the URL of a judge")
    batch_size: int = Field(default=1, gt=0)


class TimedCalls(Document):
    """Seconds of each successful call, ascending, and the number of failed calls."""

    called: CallKey
    seconds: tuple[float, ...] = Field(min_length=1, max_length=1024)
    num_failed: int = Field(default=0, ge=0)
    date: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}$")

    @field_validator("seconds")
    @classmethod
    def _ascending(cls, seconds: tuple[float, ...]) -> tuple[float, ...]:
        if min(seconds) < 0:
            raise ValueError("a call takes 0 seconds or more")
        return tuple(sorted(seconds))

    @property
    def latency(self) -> LatencySpec:
        """Empirical distribution of the calls, all equally likely."""
        weights = Counter(self.seconds)
        measured = MeasuredCalls(num_calls=len(self.seconds), num_failed=self.num_failed, date=self.date)
        return LatencySpec(histogram=tuple((s, float(n)) for s, n in sorted(weights.items())), measured=measured)
