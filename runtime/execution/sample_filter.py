"""Best-of-n sampling: the batch of a step is filled with the best-scored samples of each prompt.

A step is one wave of all its prompts. Every rank that sees the wave has all scores and selects the same rows: for each
prompt the samples with the highest reward, the earlier one where rewards are equal; NaN is below all numbers. Selected
rows keep their order. A rank fills in those fields of the selected rows that it has sampled or received.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshwright.planner.plan.job import Job
from meshwright.planner.plan.plan import Plan
from meshwright.runtime.execution.filling import SampleReward, put_rows
from meshwright.runtime.messages.step_experience import StepExperience


@dataclass(frozen=True, kw_only=True)
class SampleFilter:
    """Selection of the best `num_kept` of `num_drawn` samples for each of `num_prompts` prompts, by reward (`paid`)."""

    num_prompts: int
    num_sampled: int
    num_kept: int
    reward: SampleReward = field(default_factory=SampleReward)

    @classmethod
    def of(cls, plan: Plan, job: Job) -> SampleFilter | None:
        """Return the filter of a job; None where it trains on every sample or uses dynamic sampling."""
        workload = plan.facts.workload
        if not workload.best_of:
            return None
        return cls(
            num_prompts=workload.num_prompts,
            num_sampled=workload.best_of,
            num_kept=workload.group_size,
            reward=SampleReward.of(plan, job),
        )

    def filling(self, step: int) -> FilterFilling:
        """Return the filling of a step, still without samples."""
        return FilterFilling(self, step)


@dataclass
class FilterFilling:
    """The batch of one step on one rank, full after its one wave."""

    samples: SampleFilter
    step: int
    _wave: StepExperience | None = None
    _kept: list[int] = field(default_factory=list)
    """Selected rows of the wave."""
    _scores: list[float] = field(default_factory=list)
    """Scores of all samples, selected or not."""
    _num_tied: int = 0
    """Prompts with a dropped sample whose reward equals that of a selected one."""

    @property
    def is_full(self) -> bool:
        return self._wave is not None

    def next_wave(self) -> StepExperience:
        """Return the empty wave."""
        rows = range(self.samples.num_prompts * self.samples.num_sampled)
        return StepExperience(step=self.step, rows=rows, is_wave=True)

    def take(self, wave: StepExperience) -> None:
        """Select from the wave, which has all its scores. Raises RunFailed for a reward that failed."""
        self._wave, self._scores = wave, self.samples.reward.scores(wave)
        size, amounts = self.samples.num_sampled, self.samples.reward.rewards(wave).amounts.tolist()
        for first in range(0, len(wave.rows), size):
            rewards = amounts[first : first + size]
            chosen = best(rewards, self.samples.num_kept)
            self._kept += [wave.rows[first + index] for index in chosen]
            dropped = (reward for index, reward in enumerate(rewards) if index not in chosen)
            self._num_tied += max(dropped) == min(rewards[index] for index in chosen)

    def fill(self, batch: StepExperience) -> None:
        """Put this rank's fields of the selected rows into the rows of the batch, prompt by prompt."""
        assert self._wave is not None
        put_rows(batch, [(self._wave, row) for row in self._kept])

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of all samples, selected or not."""
        return {
            "drawn_samples": float(len(self._scores)),
            "trained_samples": float(len(self._kept)),
            "dropped_samples": float(len(self._scores) - len(self._kept)),
            "tied_prompts": self._num_tied / self.samples.num_prompts,
            "drawn_score": sum(self._scores) / len(self._scores),
        }


def best(scores: Sequence[float], number: int) -> tuple[int, ...]:
    """Return the ascending indices of the `number` highest scores; of equal scores the lower index is taken first."""
    order = sorted(range(len(scores)), key=lambda index: (math.isnan(scores[index]), -scores[index], index))
    return tuple(sorted(order[:number]))
