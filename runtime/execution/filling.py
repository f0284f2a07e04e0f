"""Fills the batch of a step with groups that have a signal, wave by wave (DAPO, arXiv:2503.14476, section 3.2).

Every rank that sees waves has all scores and chooses alike: the first groups with a signal in the order in which
prompts are dealt, as `profiles.environment.dynamic_sampling` has it. Of what it chose, a rank has the rows it drew or
was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from meshwright.planner.plan.job import Job
from meshwright.planner.plan.learning_settings import PaidSettings
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.environment.dynamic_sampling import LEAST_ACCEPTANCE
from meshwright.profiles.errors import RunFailed
from meshwright.profiles.stages import RESPONSE_LENGTHS
from meshwright.runtime.environment.environment import require_scores
from meshwright.runtime.messages.step_experience import StepExperience
from meshwright.runtime.training.payments import Paid, groups_that_differ, pay


@dataclass(frozen=True)
class PaidBy:
    """What a sample is paid of rewards on hosts, where there are weights of them, and of a reward model, after scale,
    clip and penalties of the job's settings; `max_response` is the most tokens of a response."""

    reward_weights: tuple[float, ...] = ()
    model_weight: float = 1.0
    settings: PaidSettings = field(default_factory=PaidSettings)
    max_response: int = 0

    @classmethod
    def of(cls, plan: Plan, job: Job) -> PaidBy:
        assert isinstance(job.settings, PaidSettings), job.settings
        weights = tuple(job.reward_weights) if job.rewards else ()
        return cls(weights, job.reward_model_weight, job.settings, plan.facts.workload.max_response)

    def scores(self, wave: StepExperience) -> list[float]:
        """The score of every row of a wave whose scores are all here, as they are added up. Raises RunFailed for a
        reward that failed."""
        require_scores(wave.experience)
        wave.score_alike()
        if self.reward_weights:
            wave.add_up(self.reward_weights, self.model_weight)
        return [float(wave.score(row)) for row in wave.rows]

    def paid(self, wave: StepExperience) -> Paid:
        """What every row is paid for its score, as it will be where it is trained on. Its `scores` are read first."""
        truncated, num_tokens = (
            torch.cat([wave.experience.get(name, row) for row in wave.rows]) for name in ("truncated", RESPONSE_LENGTHS)
        )
        return pay(
            torch.cat([wave.score(row) for row in wave.rows]),
            truncated,
            self.settings,
            sizes=torch.cat([wave.score_size(row) for row in wave.rows]),
            num_tokens=num_tokens,
            max_response=self.max_response,
        )


def put_rows(batch: StepExperience, chosen: Sequence[tuple[StepExperience, int]]) -> None:
    """Puts what this rank holds of rows of waves into the rows of the batch, one behind the other."""
    for place, (wave, row) in zip(batch.rows, chosen, strict=True):
        for name, rows in wave.experience.fields().items():
            if row in rows:
                batch.experience.put(name, place, rows[row])


@dataclass(frozen=True, kw_only=True)
class GroupSampling:
    """What a step is filled from: groups of `group_size` samples, `num_groups` of them to a batch, in waves of
    `num_prompts`, of which a step may take `most_waves`; what a sample is `paid` says whether its group has a signal.
    """

    num_groups: int
    group_size: int
    num_prompts: int
    most_waves: int
    paid: PaidBy = field(default_factory=PaidBy)

    @classmethod
    def of(cls, plan: Plan, job: Job) -> GroupSampling | None:
        """None without dynamic sampling."""
        workload = plan.facts.workload
        if not (sampling := workload.dynamic_sampling):
            return None
        return cls(
            num_groups=workload.num_prompts,
            group_size=workload.group_size,
            num_prompts=sampling.wave(workload.num_prompts),
            most_waves=sampling.most_waves(workload.num_prompts),
            paid=PaidBy.of(plan, job),
        )

    def filling(self, step: int) -> WaveFilling:
        """That of a step, of which nothing is drawn yet."""
        return WaveFilling(self, step)


@dataclass
class WaveFilling:
    """The batch of one step on one rank. Waves are asked for and taken in turn until it is full."""

    sampling: GroupSampling
    step: int
    _kept: list[tuple[StepExperience, Sequence[int]]] = field(default_factory=list)
    """Groups with a signal in dealt order: the wave of each, and its rows there."""
    _scores: list[float] = field(default_factory=list)
    """Those of every sample that was drawn."""
    _num_waves: int = 0

    @property
    def is_full(self) -> bool:
        return len(self._kept) >= self.sampling.num_groups

    @property
    def _num_drawn(self) -> int:
        """Prompts so far."""
        return self._num_waves * self.sampling.num_prompts

    def next_wave(self) -> StepExperience:
        """An empty wave; rows are numbered through all waves of the step, in dealt order.

        Raises RunFailed where fewer groups have a signal than the least share that a job may expect.
        """
        if self._num_waves == self.sampling.most_waves:
            raise RunFailed(
                f"step {self.step}: {len(self._kept)} of {self._num_drawn} groups have a signal, where a batch needs "
                f"{self.sampling.num_groups} and dynamic sampling a share of {LEAST_ACCEPTANCE:g} or more; give "
                "prompts or rewards that tell samples apart, or plan the job without workload.dynamic_sampling"
            )
        size = self.sampling.num_prompts * self.sampling.group_size
        first = self._num_waves * size
        return StepExperience(step=self.step, rows=range(first, first + size), is_wave=True)

    def take(self, wave: StepExperience) -> None:
        """Takes a wave whose scores are all here. Raises RunFailed for a reward that failed."""
        self._scores += self.sampling.paid.scores(wave)
        size = self.sampling.group_size
        self._num_waves += 1
        for number, differs in enumerate(groups_that_differ(self.sampling.paid.paid(wave), size).tolist()):
            if differs:
                self._kept.append((wave, wave.rows[number * size : (number + 1) * size]))

    def fill(self, batch: StepExperience) -> None:
        """Puts what this rank holds of the first groups kept into the rows of the batch, one behind the other."""
        put_rows(batch, [(wave, row) for wave, group in self._kept[: self.sampling.num_groups] for row in group])

    @property
    def metrics(self) -> dict[str, float]:
        """What is reported of all that was drawn: `groups_with_signal` is the share of its groups."""
        return {
            "waves": float(self._num_waves),
            "drawn_prompts": float(self._num_drawn),
            "trained_prompts": float(self.sampling.num_groups),
            "dropped_prompts": float(self._num_drawn - self.sampling.num_groups),
            "groups_with_signal": len(self._kept) / self._num_drawn,
            "drawn_score": sum(self._scores) / len(self._scores),
        }
