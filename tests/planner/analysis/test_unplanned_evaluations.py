"""Evaluations on held-out prompts are in no step of a plan, and `plan` says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.planner.analysis.optional_features import unplanned_evaluations
from meshwright.planner.job.evaluation import Evaluation, EvaluationSet
from meshwright.planner.job.job import read_job
from tests.planner.plans import random_plan

JOB = read_job(Path(__file__).parents[3] / "examples" / "tiny" / "job.yaml")


def test_a_job_without_held_out_prompts_has_no_evaluations() -> None:
    assert unplanned_evaluations(random_plan(0), JOB.model_copy(update={"data": None})) is None


def test_every_set_has_its_interval_and_generation_and_scoring_are_the_measure() -> None:
    plan = random_plan(0)
    hard = EvaluationSet(prompts="hard.jsonl", every_steps=5)
    evaluation = Evaluation(sets={"hard": hard, "each": hard.model_copy(update={"every_steps": 1})})
    found = unplanned_evaluations(plan, JOB.model_copy(update={"evaluation": evaluation}))
    assert found
    assert found.steps_between == {"held_out": 0, "hard": 5, "each": 1}
    timed = (plan.placement(stage).cost.total for stage in ("actor_generate", "reward_score"))
    assert found.seconds == pytest.approx(sum(timed))
    assert found.sentence.startswith(
        "evaluations are not in the step: held_out (before the first step and after the last), hard (every 5 steps), "
        "each (every step), one response for each prompt; this plan generates and scores the "
    )
