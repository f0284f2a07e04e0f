"""Selection of the samples that a step trains on: dynamic sampling and best-of-n.

Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2) fills the batch, wave by wave, with the first groups, in prompt
order, whose samples differ in reward. Best-of-n takes the samples with the highest reward of each prompt from one wave:
of equal rewards the earlier sample, and NaN ranks below all numbers. With both, the best samples of each prompt are
its group, and a group has a signal if these differ in reward. Every rank that takes part has all scores and
selects the same rows. A rank fills in those fields of the selected rows that it has sampled or received.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from meshwright.planner.job.algorithm_settings import RewardedSettings
from meshwright.planner.job.job import Job
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.environment.dynamic_sampling import MIN_ACCEPTANCE
from meshwright.profiles.errors import RunFailed
from meshwright.profiles.stages import RESPONSE_LENGTHS, SAMPLED_LENGTHS
from meshwright.runtime.environment.environment import require_scores
from meshwright.runtime.messages.experience import StepExperience
from meshwright.runtime.training.advantages import ResponseRewards, compute_rewards, groups_that_differ


@dataclass(frozen=True)
class SampleReward:
    """Total reward of a sample, by which samples are selected.

    It is the weighted sum of the rewards that hosts compute and that of a reward model, after the scale, clip and
    penalties of the job's settings. `max_response` is the largest number of tokens of a response.
    """

    reward_weights: tuple[float, ...] = ()
    model_weight: float = 1.0
    settings: RewardedSettings = field(default_factory=RewardedSettings)
    max_response: int = 0

    @classmethod
    def of(cls, plan: Plan, job: Job) -> SampleReward:
        assert isinstance(job.settings, RewardedSettings), job.settings
        weights = tuple(job.reward_weights) if job.rewards else ()
        return cls(weights, job.reward_model_weight, job.settings, plan.facts.workload.max_response)

    def scores(self, wave: StepExperience) -> list[float]:
        """Compute and return the total score of every row of a wave; all scores of the wave must be there.

        Raises RunFailed for a reward that failed.
        """
        require_scores(wave.experience)
        wave.share_scores_of_duplicates()
        if self.reward_weights:
            wave.sum_rewards(self.reward_weights, self.model_weight)
        return [float(wave.score(row)) for row in wave.rows]

    def rewards(self, wave: StepExperience) -> ResponseRewards:
        """Return the reward of every row exactly as training will compute it; call `scores` first."""
        truncated, num_tokens = (
            torch.cat([wave.experience.get(name, row) for row in wave.rows]) for name in ("truncated", RESPONSE_LENGTHS)
        )
        return compute_rewards(
            torch.cat([wave.score(row) for row in wave.rows]),
            truncated,
            self.settings,
            sizes=torch.cat([wave.score_size(row) for row in wave.rows]),
            num_tokens=num_tokens,
            max_response=self.max_response,
        )


def put_rows(batch: StepExperience, chosen: Sequence[tuple[StepExperience, int]]) -> None:
    """Put this rank's fields of the chosen (wave, row) pairs into the rows of the batch, in order."""
    for place, (wave, row) in zip(batch.rows, chosen, strict=True):
        for name, rows in wave.experience.fields().items():
            if row in rows:
                batch.experience.put(name, place, rows[row])


@dataclass(frozen=True, kw_only=True)
class GroupSampling:
    """Dynamic sampling of a job: batches of `num_groups` groups of `group_size` samples.

    A wave has `num_prompts` prompts with `num_sampled` samples each, the best `group_size` of which are the group of
    the prompt. A step has at most `max_waves` waves. A group has a signal if the rewards (`reward`) of its samples
    differ.
    """

    num_groups: int
    group_size: int
    num_sampled: int
    num_prompts: int
    max_waves: int
    reward: SampleReward = field(default_factory=SampleReward)

    @classmethod
    def of(cls, plan: Plan, job: Job) -> GroupSampling | None:
        """Return the dynamic sampling of a job; None if it has none."""
        workload = plan.facts.workload
        if not (sampling := workload.dynamic_sampling):
            return None
        return cls(
            num_groups=workload.num_prompts,
            group_size=workload.group_size,
            num_sampled=workload.candidates.group_size,
            num_prompts=sampling.wave_size(workload.num_prompts),
            max_waves=sampling.max_waves(workload.num_prompts),
            reward=SampleReward.of(plan, job),
        )

    def filling(self, step: int) -> WaveFilling:
        """Return the batch of a step, still empty."""
        return WaveFilling(self, step)


@dataclass
class WaveFilling:
    """The batch of one step on one rank; call `next_wave` and `take` alternately until it is full."""

    sampling: GroupSampling
    step: int
    _kept: list[tuple[StepExperience, Sequence[int]]] = field(default_factory=list)
    """Groups with a signal in prompt order: the wave of each and its rows in it."""
    _scores: list[float] = field(default_factory=list)
    """Scores of all samples, kept or not."""
    _num_tokens: int = 0
    """Number of sampled tokens of all samples."""
    _num_tied: int = 0
    """Prompts with a sample outside the group whose reward equals that of a sample in it."""
    _num_waves: int = 0

    @property
    def is_full(self) -> bool:
        return len(self._kept) >= self.sampling.num_groups

    @property
    def _num_sampled_prompts(self) -> int:
        return self._num_waves * self.sampling.num_prompts

    def next_wave(self) -> StepExperience:
        """Return an empty wave; rows are numbered through all waves of the step, in prompt order.

        Raises RunFailed once `max_waves` waves have been used, because too few groups have a signal.
        """
        if self._num_waves == self.sampling.max_waves:
            raise RunFailed(
                f"step {self.step}: {len(self._kept)} of {self._num_sampled_prompts} groups have a signal, where "
                f"a batch needs {self.sampling.num_groups} and dynamic sampling a share of {MIN_ACCEPTANCE:g} or more; "
                "give prompts or rewards that distinguish samples, or plan the job without workload.dynamic_sampling"
            )
        size = self.sampling.num_prompts * self.sampling.num_sampled
        first = self._num_waves * size
        return StepExperience(step=self.step, rows=range(first, first + size), is_wave=True)

    def take(self, wave: StepExperience) -> None:
        """Keep the groups of the wave that have a signal; all scores of the wave must be there.

        Raises RunFailed for a reward that failed.
        """
        self._scores += self.sampling.reward.scores(wave)
        self._num_waves += 1
        self._num_tokens += _num_sampled_tokens(wave)
        rewards, size = self.sampling.reward.rewards(wave), self.sampling.group_size
        chosen = select_best(rewards, self.sampling.num_sampled, size)
        self._num_tied += chosen.num_tied
        indices = torch.tensor(chosen.indices)
        of_groups = ResponseRewards(*(values[indices] for values in rewards))
        for number, differs in enumerate(groups_that_differ(of_groups, size).tolist()):
            if differs:
                group = chosen.indices[number * size : (number + 1) * size]
                self._kept.append((wave, [wave.rows[index] for index in group]))

    def fill(self, batch: StepExperience) -> None:
        """Put this rank's fields of the first kept groups into the rows of the batch, in order."""
        put_rows(batch, [(wave, row) for wave, group in self._kept[: self.sampling.num_groups] for row in group])

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of all sampled prompts; `groups_with_signal` is the share of their groups that have a signal."""
        num_trained = self.sampling.num_groups * self.sampling.group_size
        is_filtered = self.sampling.num_sampled > self.sampling.group_size
        tied_share = self._num_tied / self._num_sampled_prompts
        return {
            "waves": float(self._num_waves),
            "sampled_prompts": float(self._num_sampled_prompts),
            "trained_prompts": float(self.sampling.num_groups),
            "dropped_prompts": float(self._num_sampled_prompts - self.sampling.num_groups),
            "groups_with_signal": len(self._kept) / self._num_sampled_prompts,
            **(_sample_metrics(self._scores, num_trained, tied_share) if is_filtered else {}),
            **_means_of_all(self._scores, self._num_tokens),
        }


@dataclass(frozen=True, kw_only=True)
class SampleFilter:
    """Selection of the best `num_kept` of `num_sampled` samples for each of `num_prompts` prompts, by reward
    (`reward`)."""

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
        """Return the batch of a step, still empty."""
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
    _num_tokens: int = 0
    """Number of sampled tokens of all samples."""
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
        self._num_tokens = _num_sampled_tokens(wave)
        chosen = select_best(self.samples.reward.rewards(wave), self.samples.num_sampled, self.samples.num_kept)
        self._kept, self._num_tied = [wave.rows[index] for index in chosen.indices], chosen.num_tied

    def fill(self, batch: StepExperience) -> None:
        """Put this rank's fields of the selected rows into the rows of the batch, prompt by prompt."""
        assert self._wave is not None
        put_rows(batch, [(self._wave, row) for row in self._kept])

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of all samples, selected or not."""
        return {
            **_sample_metrics(self._scores, len(self._kept), self._num_tied / self.samples.num_prompts),
            **_means_of_all(self._scores, self._num_tokens),
        }


def _sample_metrics(scores: Sequence[float], num_trained: int, tied_share: float) -> dict[str, float]:
    """The numbers of samples of a step with best-of-n."""
    return {
        "generated_samples": float(len(scores)),
        "trained_samples": float(num_trained),
        "dropped_samples": float(len(scores) - num_trained),
        "tied_prompts": tied_share,
    }


def _means_of_all(scores: Sequence[float], num_tokens: int) -> dict[str, float]:
    """The mean score and number of sampled tokens of all samples of a step, selected or not."""
    return {"sampled_score": sum(scores) / len(scores), "sampled_tokens": num_tokens / len(scores)}


def _num_sampled_tokens(wave: StepExperience) -> int:
    return sum(int(wave.experience.get(SAMPLED_LENGTHS, row)) for row in wave.rows)


class SelectedSamples(NamedTuple):
    """The selected samples of a wave: their ascending indices, prompt by prompt, and the number of prompts with a
    dropped sample whose reward equals that of a selected one."""

    indices: list[int]
    num_tied: int


def select_best(rewards: ResponseRewards, num_sampled: int, num_kept: int) -> SelectedSamples:
    """Select the best `num_kept` of every `num_sampled` consecutive samples by their rewards."""
    indices: list[int] = []
    num_tied, amounts = 0, rewards.amounts.tolist()
    for first in range(0, len(amounts), num_sampled):
        of_prompt = amounts[first : first + num_sampled]
        chosen = best(of_prompt, num_kept)
        indices += [first + index for index in chosen]
        dropped = [amount for index, amount in enumerate(of_prompt) if index not in chosen]
        num_tied += bool(dropped) and max(dropped) == min(of_prompt[index] for index in chosen)
    return SelectedSamples(indices, num_tied)


def best(scores: Sequence[float], number: int) -> tuple[int, ...]:
    """Return the ascending indices of the `number` highest scores; of equal scores the lower index is taken first."""
    order = sorted(range(len(scores)), key=lambda index: (math.isnan(scores[index]), -scores[index], index))
    return tuple(sorted(order[:number]))
