"""Dynamic sampling: groups with zero reward variance are replaced by groups of further prompts until a batch is full
(DAPO, arXiv:2503.14476, section 3.2).

Prompts are sampled in waves of equal size. Let a be the acceptance, the probability that a group is kept, equal for all
groups of a step. The number of groups kept of n prompts is Binomial(n, a), so a batch of P groups is not full after w
waves of G prompts with probability P(Binomial(w G, a) < P). The expected number of waves of a step is the sum of these
probabilities over w >= 0.

A step trains on the first P groups kept, in the order of their prompts, which is fixed before anything is sampled;
later ones are dropped. The first P successes of independent trials are independent samples of the distribution of a
success, however many trials they took. So the estimator is the unbiased mean gradient over groups with non-zero
variance. The other groups have a gradient of zero, so this is 1 / a times the mean over all groups. The P groups that
finish first would be a biased choice, because short responses finish first.
"""

from __future__ import annotations

import math
from typing import Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from meshwright.profiles.documents import Document

_NEGLIGIBLE = 1e-6
"""Probability of another wave below which it is neglected."""

_ACCEPTANCE = "share of groups with non-zero reward variance, the mean over steps"
_HISTOGRAM = "pairs of that share and weight, over steps, in place of the mean"
_NUM_PROMPTS = "prompts of a wave; chosen by the plan if not given"

MIN_ACCEPTANCE = 0.01


class DynamicSampling(Document):
    """Share of groups that are kept, and number of prompts that are sampled at once."""

    acceptance: float | None = Field(default=None, ge=MIN_ACCEPTANCE, le=1, description=_ACCEPTANCE)
    histogram: tuple[tuple[float, float], ...] | None = Field(default=None, min_length=1, description=_HISTOGRAM)
    num_prompts: int | None = Field(default=None, gt=0, description=_NUM_PROMPTS)

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.acceptance is None) == (self.histogram is None):
            raise ValueError("give one of: acceptance or histogram")
        if any(not MIN_ACCEPTANCE <= a <= 1 or w < 0 for a, w in self.histogram or ()):
            raise ValueError(f"a histogram needs shares from {MIN_ACCEPTANCE:g} to 1 and weights of 0 or more")
        if self.histogram is not None and not any(w > 0 for _, w in self.histogram):
            raise ValueError("a histogram needs a weight that is not 0")
        return self

    def completed_by_plan(self, planned: DynamicSampling, *, shares_are_observed: bool) -> DynamicSampling:
        """Return the job's settings completed by its plan.

        The plan sets the size of a wave if the job leaves it open, and the shares if they were observed in a trace.
        """
        update: dict[str, object] = {"num_prompts": self.num_prompts or planned.num_prompts}
        if shares_are_observed:
            update |= {"acceptance": planned.acceptance, "histogram": planned.histogram}
        return self.model_copy(update=update)

    @property
    def shares(self) -> tuple[tuple[float, float], ...]:
        """Pairs of the share of groups that are kept and the probability that a step has this share."""
        if self.histogram is None:
            assert self.acceptance is not None
            return ((self.acceptance, 1.0),)
        total = math.fsum(weight for _, weight in self.histogram)
        return tuple((share, weight / total) for share, weight in self.histogram)

    @property
    def mean(self) -> float:
        return math.fsum(share * p for share, p in self.shares)

    def wave_size(self, num_groups: int) -> int:
        """Return the prompts of a wave: `num_prompts`, or as many as fill a batch of `num_groups` on average."""
        return self.num_prompts or math.ceil(num_groups / self.mean)

    def max_waves(self, num_groups: int) -> int:
        """Return the maximum waves of a step: as many as fill a batch on average at the lowest valid acceptance."""
        return math.ceil(num_groups / (MIN_ACCEPTANCE * self.wave_size(num_groups)))

    def expected_waves(self, num_groups: int) -> float:
        """Return the expected number of waves of a step that trains on `num_groups` groups."""
        size = self.wave_size(num_groups)
        return math.fsum(p * _expected_waves(num_groups, size, share) for share, p in self.shares)


def _expected_waves(num_groups: int, size: int, share: float) -> float:
    """Sum of the probabilities that a batch is not full after 0, 1, 2, ... waves."""
    expected, num_waves = 1.0, 1
    while (probability := _binomial_below(num_groups, num_waves * size, share)) > _NEGLIGIBLE:
        expected += probability
        num_waves += 1
    return expected


def _binomial_below(count: int, trials: int, share: float) -> float:
    """The probability P(Binomial(trials, share) < count)."""
    if trials < count:
        return 1.0
    if share == 1.0:
        return 0.0
    kept = np.arange(count)
    factorials = _log_factorials(trials)
    logs = factorials[trials] - factorials[kept] - factorials[trials - kept]
    logs += kept * math.log(share) + (trials - kept) * math.log1p(-share)
    return min(1.0, float(np.exp(logs).sum()))


def _log_factorials(largest: int) -> NDArray[np.float64]:
    """Natural logarithms of the factorials of 0 to `largest`."""
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, largest + 1)))])
