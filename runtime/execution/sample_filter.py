"""Fills the batch of a step with the samples of each prompt that score best, of more that are drawn.

A step is one wave of all its prompts. Every rank that sees it has all scores and chooses alike: of each prompt the
samples that are paid most, of equal ones those that were dealt first; a score that is no number is below all others.
What is kept stays in the order in which it was dealt. Of what it chose, a rank has the rows it drew or was given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshwright.planner.plan.job import Job
from meshwright.planner.plan.plan import Plan
from meshwright.runtime.execution.filling import PaidBy, put_rows
from meshwright.runtime.messages.step_experience import StepExperience


@dataclass(frozen=True, kw_only=True)
class SampleFilter:
    """Of each of `num_prompts` prompts so many samples are drawn, and so many kept; what a sample is `paid` is what it
    is compared by."""

    num_prompts: int
    num_drawn: int
    num_kept: int
    paid: PaidBy = field(default_factory=PaidBy)

    @classmethod
    def of(cls, plan: Plan, job: Job) -> SampleFilter | None:
        """None where all that is drawn is trained on, and with dynamic sampling."""
        workload = plan.facts.workload
        if not workload.best_of:
            return None
        return cls(
            num_prompts=workload.num_prompts,
            num_drawn=workload.best_of,
            num_kept=workload.group_size,
            paid=PaidBy.of(plan, job),
        )

    def filling(self, step: int) -> FilterFilling:
        """That of a step, of which nothing is drawn yet."""
        return FilterFilling(self, step)


@dataclass
class FilterFilling:
    """The batch of one step on one rank, full behind its one wave."""

    samples: SampleFilter
    step: int
    _wave: StepExperience | None = None
    _kept: list[int] = field(default_factory=list)
    """Rows of the wave."""
    _scores: list[float] = field(default_factory=list)
    """Those of every sample that was drawn."""
    _num_tied: int = 0
    """Prompts of which a sample was dropped that is paid as much as one that was kept."""

    @property
    def is_full(self) -> bool:
        return self._wave is not None

    def next_wave(self) -> StepExperience:
        """The empty one."""
        rows = range(self.samples.num_prompts * self.samples.num_drawn)
        return StepExperience(step=self.step, rows=rows, is_wave=True)

    def take(self, wave: StepExperience) -> None:
        """Takes the wave, whose scores are all here. Raises RunFailed for a reward that failed."""
        self._wave, self._scores = wave, self.samples.paid.scores(wave)
        size, amounts = self.samples.num_drawn, self.samples.paid.paid(wave).amounts.tolist()
        for first in range(0, len(wave.rows), size):
            paid = amounts[first : first + size]
            chosen = best(paid, self.samples.num_kept)
            self._kept += [wave.rows[first + index] for index in chosen]
            dropped = (score for index, score in enumerate(paid) if index not in chosen)
            self._num_tied += max(dropped) == min(paid[index] for index in chosen)

    def fill(self, batch: StepExperience) -> None:
        """Puts what this rank holds of what is kept into the rows of the batch, one prompt's behind the other's."""
        assert self._wave is not None
        put_rows(batch, [(self._wave, row) for row in self._kept])

    @property
    def metrics(self) -> dict[str, float]:
        """What is reported of all that was drawn."""
        return {
            "drawn_samples": float(len(self._scores)),
            "trained_samples": float(len(self._kept)),
            "dropped_samples": float(len(self._scores) - len(self._kept)),
            "tied_prompts": self._num_tied / self.samples.num_prompts,
            "drawn_score": sum(self._scores) / len(self._scores),
        }


def best(scores: Sequence[float], number: int) -> tuple[int, ...]:
    """The indices of so many of the highest scores, ascending; of equal ones the lower index is taken first."""
    order = sorted(range(len(scores)), key=lambda index: (math.isnan(scores[index]), -scores[index], index))
    return tuple(sorted(order[:number]))
