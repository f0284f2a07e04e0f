"""Length distributions that match what a row states: a mean, and a longest."""

from __future__ import annotations

from functools import cache

from meshwright.profiles.lengths import LengthSpec, lognormal_bins

_STEPS = 40


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
        found = LengthSpec(max=longest, histogram=lognormal_bins(median, tail * median))
        low, high = (median, high) if found.resolve().mean < mean else (low, median)
    return found
