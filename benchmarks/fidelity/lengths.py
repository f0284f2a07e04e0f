"""Length distributions that match what a row states: a mean, and a longest."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from statistics import NormalDist

from meshwright.profiles.lengths import LengthSpec

_STEPS = 40

_NUM_BINS, _NUM_TAIL_BINS = 64, 14
"""Equally likely bins, and the parts of the last of them, each half as likely as the one before. A step has thousands
of responses, of which a replica waits for the longest, so that the last 64th of a distribution is no single length."""


@cache
def cut_lognormal(mean: float, longest: int, tail: float) -> LengthSpec:
    """A log-normal cut at `longest` whose mean is `mean` after the cut; fixed at `longest` when it cannot be.

    `tail` is its 99th percentile over its median, before the cut.
    """
    if mean >= 0.99 * longest:
        return LengthSpec(max=longest, fixed=longest)
    low, high = 1.0, 50.0 * longest
    for _ in range(_STEPS):
        median = (low * high) ** 0.5
        found = LengthSpec(max=longest, histogram=tuple(_bins(median, tail)))
        low, high = (median, high) if found.resolve().mean < mean else (low, median)
    return found


def _bins(median: float, tail: float) -> Iterator[tuple[int, float]]:
    """The length and the probability of each bin, ascending, at the quantile of its middle."""
    sigma = math.log(tail) / NormalDist().inv_cdf(0.99)
    equal = [1 - i / _NUM_BINS for i in range(_NUM_BINS)]
    halved = [1 / _NUM_BINS / 2**part for part in range(_NUM_TAIL_BINS)]
    for above, below in pairwise((*equal, *halved[1:], 0.0)):
        quantile = median * math.exp(-sigma * NormalDist().inv_cdf((above + below) / 2))
        yield max(1, round(quantile)), above - below
