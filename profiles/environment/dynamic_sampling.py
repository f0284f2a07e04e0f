"""Dynamic sampling: groups whose samples are all scored alike are replaced by groups of further prompts until a batch
is full (DAPO, arXiv:2503.14476, section 3.2).

Prompts are drawn in waves of one size. With a the chance that a group is kept, the same for all groups of a step, the
groups kept of n prompts are Binomial(n, a), so that a batch of P is not full behind w waves of G with probability
P(Binomial(w G, a) < P), and a step needs sum over w >= 0 of that in waves.

What is trained on are the first P groups kept in the order in which prompts are dealt, which is fixed before anything
is drawn; kept groups behind them are dropped. The first P successes of independent trials are independent draws of the
law of a success, however many trials they took: the estimator is the mean gradient over groups with a signal, without
bias, and that of all groups times 1 / a. The first P to END would not be: short responses end first.
"""

from __future__ import annotations

import math
from typing import Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from meshwright.profiles.documents import Document

_NEGLIGIBLE = 1e-6
"""A chance of another wave that is counted as none."""

_ACCEPTANCE = "share of groups with non-zero reward variance, the mean over steps"
_HISTOGRAM = "pairs of that share and weight, over steps, in place of the mean"
_NUM_PROMPTS = "prompts of a wave; left out, the plan chooses"

LEAST_ACCEPTANCE = 0.01


class DynamicSampling(Document):
    """How many groups are kept, and how many prompts are drawn at once."""

    acceptance: float | None = Field(default=None, ge=LEAST_ACCEPTANCE, le=1, description=_ACCEPTANCE)
    histogram: tuple[tuple[float, float], ...] | None = Field(default=None, min_length=1, description=_HISTOGRAM)
    num_prompts: int | None = Field(default=None, gt=0, description=_NUM_PROMPTS)

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.acceptance is None) == (self.histogram is None):
            raise ValueError("give one of: acceptance or histogram")
        if any(not LEAST_ACCEPTANCE <= a <= 1 or w < 0 for a, w in self.histogram or ()):
            raise ValueError(f"a histogram needs shares from {LEAST_ACCEPTANCE:g} to 1 and weights of 0 or more")
        if self.histogram is not None and not any(w > 0 for _, w in self.histogram):
            raise ValueError("a histogram needs a weight that is not 0")
        return self

    def as_planned(self, planned: DynamicSampling, *, shares_are_seen: bool) -> DynamicSampling:
        """What a job says, with what a plan of it may choose: the size of a wave where the job leaves it open, and the
        shares where a trace has told them."""
        update: dict[str, object] = {"num_prompts": self.num_prompts or planned.num_prompts}
        if shares_are_seen:
            update |= {"acceptance": planned.acceptance, "histogram": planned.histogram}
        return self.model_copy(update=update)

    @property
    def shares(self) -> tuple[tuple[float, float], ...]:
        """Shares of groups that are kept, each with the probability that a step has it."""
        if self.histogram is None:
            assert self.acceptance is not None
            return ((self.acceptance, 1.0),)
        total = math.fsum(weight for _, weight in self.histogram)
        return tuple((share, weight / total) for share, weight in self.histogram)

    @property
    def mean(self) -> float:
        return math.fsum(share * p for share, p in self.shares)

    def wave(self, num_groups: int) -> int:
        """Prompts drawn at once for a batch of so many groups: as said, or as many as fill it on average."""
        return self.num_prompts or math.ceil(num_groups / self.mean)

    def most_waves(self, num_groups: int) -> int:
        """Of a step: as many as fill a batch on average with the least share that a job may expect."""
        return math.ceil(num_groups / (LEAST_ACCEPTANCE * self.wave(num_groups)))

    def expected_waves(self, num_groups: int) -> float:
        """Of a step that trains on so many groups."""
        size = self.wave(num_groups)
        return math.fsum(p * _expected_waves(num_groups, size, share) for share, p in self.shares)


def _expected_waves(num_groups: int, size: int, share: float) -> float:
    """Sum of the chances that a batch is not full behind 0, 1, 2, ... waves."""
    found, num_waves = 1.0, 1
    while (chance := _below(num_groups, num_waves * size, share)) > _NEGLIGIBLE:
        found += chance
        num_waves += 1
    return found


def _below(count: int, trials: int, share: float) -> float:
    """P(Binomial(trials, share) < count)."""
    if trials < count:
        return 1.0
    if share == 1.0:
        return 0.0
    kept = np.arange(count)
    factorials = _log_factorials(trials)
    logs = factorials[trials] - factorials[kept] - factorials[trials - kept]
    logs += kept * math.log(share) + (trials - kept) * math.log1p(-share)
    return min(1.0, float(np.exp(logs).sum()))


def _log_factorials(most: int) -> NDArray[np.float64]:
    """Of 0 to `most`."""
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, most + 1)))])
