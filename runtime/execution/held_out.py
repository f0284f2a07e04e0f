"""What each rank holds of the responses to held-out prompts, and the record that comes of all parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from meshwright.planner.plan.distill_settings import Distill
from meshwright.planner.plan.job import Job
from meshwright.profiles.stages import REWARDS, TEACHER_LOGPROBS
from meshwright.runtime.messages.step_experience import StepExperience
from meshwright.runtime.records.record import EvaluationRecord
from meshwright.runtime.records.version_gap import Gap
from meshwright.runtime.training.versions import generator_gap

_STUDENT = "proximal_logprobs"

EVALUATED = ("tokens", "scores", _STUDENT, *TEACHER_LOGPROBS.values())
"""What the stages write that held-out prompts go through."""


@dataclass(frozen=True, kw_only=True)
class HeldOutPart:
    """Of one rank, by row: the reward model's score, the weighted sum of rewards on hosts, by field the mean
    log-probability of the tokens that were drawn, and how many tokens a response has."""

    scores: Mapping[int, float]
    rewards: Mapping[int, float]
    logprobs: Mapping[str, Mapping[int, float]]
    lengths: Mapping[int, int]
    gap: Gap

    @classmethod
    def of(cls, batch: StepExperience, job: Job) -> HeldOutPart:
        """What is here of a batch."""
        held, weights = batch.experience, torch.tensor(job.reward_weights)
        fields = (_STUDENT, *TEACHER_LOGPROBS.values()) if isinstance(job.settings, Distill) else ()
        return cls(
            scores={row: float(held.get("scores", row)) for row in held.rows("scores")},
            rewards={row: float(held.get(REWARDS, row) @ weights) for row in held.rows(REWARDS)},
            logprobs={
                field: {row: float(batch.drawn(field, row).double().mean()) for row in held.rows(field)}
                for field in fields
                if held.rows(field)
            },
            lengths={row: batch.length(row) - batch.prompt_length(row) for row in held.rows("tokens")},
            gap=generator_gap(batch, held.rows(_STUDENT), batch.step),
        )


def evaluation_of(parts: Sequence[HeldOutPart], step: int, job: Job) -> EvaluationRecord:
    """The record of an evaluation after `step` updates."""
    lengths = {row: length for part in parts for row, length in part.lengths.items()}
    gap = sum((part.gap for part in parts), start=Gap())
    if isinstance(job.settings, Distill):
        scores = _by_teachers(parts, job.settings)
        return EvaluationRecord.of(step, scores, lengths, gap, by_teachers=True)
    return EvaluationRecord.of(step, _paid(parts, job), lengths, gap)


def _paid(parts: Sequence[HeldOutPart], job: Job) -> dict[int, float]:
    """What sequences are paid, of which ranks have the reward model's score or the sum of the others."""
    scores = {row: score for part in parts for row, score in part.scores.items()}
    rewards = {row: score for part in parts for row, score in part.rewards.items()}
    weight = job.reward_model_weight if job.rewards else 1.0
    return {row: weight * scores.get(row, 0.0) + rewards.get(row, 0.0) for row in scores.keys() | rewards.keys()}


def _by_teachers(parts: Sequence[HeldOutPart], settings: Distill) -> dict[int, float]:
    """How much likelier a token is to the teachers than to the student, in nats, by sequence."""
    found: dict[str, dict[int, float]] = {}
    for part in parts:
        for field, of_rows in part.logprobs.items():
            found.setdefault(field, {}).update(of_rows)
    student = found.pop(_STUDENT)
    shares = settings.shares(len(found))
    ordered = [found[field] for field in TEACHER_LOGPROBS.values() if field in found]
    return {
        row: sum(share * (of_rows[row] - mine) for share, of_rows in zip(shares, ordered, strict=True))
        for row, mine in student.items()
    }
