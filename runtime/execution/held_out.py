"""Evaluation on held-out prompts: the results of each rank, and the record made from the results of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from meshwright.planner.job.algorithm_settings import Distill
from meshwright.planner.job.evaluation import HELD_OUT
from meshwright.planner.job.graph_losses import PROXIMAL, old_logprobs_field
from meshwright.planner.job.job import Job
from meshwright.profiles.stages import REWARDS, TEACHER_LOGPROBS
from meshwright.runtime.messages.experience import StepExperience
from meshwright.runtime.records.record import EvaluationRecord
from meshwright.runtime.records.version_gap import Gap
from meshwright.runtime.training.versions import generator_gap


def evaluated_fields(job: Job, name: str) -> tuple[str, ...]:
    """Return the fields that an evaluation on a held-out set reads; it runs the stages that write them."""
    scores = ("scores",) if job.evaluation.scores_by_model(name) else ()
    return ("tokens", PROXIMAL, *(TEACHER_LOGPROBS.values() if _is_scored_by_teachers(job, name) else scores))


def _is_scored_by_teachers(job: Job, name: str) -> bool:
    return not (job.learns_from_rewards or job.evaluation.own_rewards(name))


@dataclass(frozen=True, kw_only=True)
class HeldOutPart:
    """Results of one rank, by row.

    `scores` are the reward model's, `rewards` the weighted sums of rewards on hosts, `logprobs` the mean
    log-probabilities of the sampled tokens for each field, `lengths` the response tokens.
    """

    scores: Mapping[int, float]
    rewards: Mapping[int, float]
    logprobs: Mapping[str, Mapping[int, float]]
    lengths: Mapping[int, int]
    gap: Gap

    @classmethod
    def of(cls, batch: StepExperience, job: Job) -> HeldOutPart:
        """Return the part that this rank holds of an evaluated batch."""
        experience, rewards = batch.experience, job.evaluation.own_rewards(batch.held_out) or job.rewards
        weights = torch.tensor([reward.weight for reward in rewards])
        is_scored_by_teachers = _is_scored_by_teachers(job, batch.held_out)
        fields = (old_logprobs_field(job), *TEACHER_LOGPROBS.values()) if is_scored_by_teachers else ()
        return cls(
            scores={row: float(experience.get("scores", row)) for row in experience.rows("scores")},
            rewards={row: float(experience.get(REWARDS, row) @ weights) for row in experience.rows(REWARDS)},
            logprobs={
                field: {row: float(batch.sampled_values(field, row).double().mean()) for row in experience.rows(field)}
                for field in fields
                if experience.rows(field)
            },
            lengths={row: batch.length(row) - batch.prompt_length(row) for row in experience.rows("tokens")},
            gap=generator_gap(batch, experience.rows(PROXIMAL), batch.step),
        )


def evaluation_of(parts: Sequence[HeldOutPart], step: int, job: Job, name: str = HELD_OUT) -> EvaluationRecord:
    """Return the record of an evaluation on a held-out set after `step` updates."""
    lengths = {row: length for part in parts for row, length in part.lengths.items()}
    gap = sum((part.gap for part in parts), start=Gap())
    if isinstance(job.settings, Distill) and _is_scored_by_teachers(job, name):
        scores = _by_teachers(parts, job.settings, old_logprobs_field(job))
        return EvaluationRecord.of(step, scores, lengths, gap, prompt_set=name, by_teachers=True)
    if job.evaluation.own_rewards(name):
        weight = job.evaluation.sets[name].reward_model_weight
    else:
        weight = job.reward_model_weight if job.rewards else 1.0
    return EvaluationRecord.of(step, _total_rewards(parts, weight), lengths, gap, prompt_set=name)


def _total_rewards(parts: Sequence[HeldOutPart], weight: float) -> dict[int, float]:
    """Return the total reward of each sequence: the reward-model score times its weight plus the rewards on hosts."""
    scores = {row: score for part in parts for row, score in part.scores.items()}
    rewards = {row: score for part in parts for row, score in part.rewards.items()}
    return {row: weight * scores.get(row, 0.0) + rewards.get(row, 0.0) for row in scores.keys() | rewards.keys()}


def _by_teachers(parts: Sequence[HeldOutPart], settings: Distill, student_field: str) -> dict[int, float]:
    """Return the mean of log p(teachers) - log p(student) per token in nats, by sequence."""
    logprobs: dict[str, dict[int, float]] = {}
    for part in parts:
        for field, rows in part.logprobs.items():
            logprobs.setdefault(field, {}).update(rows)
    student = logprobs.pop(student_field)
    shares = settings.shares(len(logprobs))
    teachers = [logprobs[field] for field in TEACHER_LOGPROBS.values() if field in logprobs]
    return {
        row: sum(share * (teacher[row] - student_logprob) for share, teacher in zip(shares, teachers, strict=True))
        for row, student_logprob in student.items()
    }
