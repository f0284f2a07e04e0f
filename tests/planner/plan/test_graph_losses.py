"""What a job's own graph computes is known before it runs, or the job is refused in one sentence."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from meshwright.planner.job.graph_losses import StageLoss, own_functions, own_graph_violations, stage_loss
from meshwright.planner.job.job import Job, read_job
from meshwright.profiles.errors import BadInput
from tests.planner.plan.test_own_graph import JOB, MATHS, alike

Stages = Sequence[Mapping[str, Any]]

GENERATE = {
    "name": "actor_generate",
    "kind": "generation",
    "role": "actor",
    "writes": ["tokens", "prompt_lengths", "truncated", "behaviour_logprobs", "versions"],
}


def inference(role: str, field: str) -> dict[str, Any]:
    return {"name": f"{role}_pass", "kind": "inference", "role": role, "reads": ["tokens"], "writes": [field]}


def training(role: str, *reads: str, **stated: str) -> dict[str, Any]:
    fields = ["tokens", "proximal_logprobs", *reads]
    return {"name": f"{role}_train", "kind": "training", "role": role, "reads": fields, **stated}


ACTOR_PASS = inference("actor", "proximal_logprobs")
SCORE = inference("reward", "scores")
VALUE = inference("critic", "values")
TEACHER = inference("teacher", "teacher_logprobs")
ACTOR = training("actor", "scores")
CRITIC = training("critic", "scores", "values")
HOSTED = {
    "name": "environment_score",
    "kind": "environment",
    "reads": ["tokens", "prompt_lengths"],
    "writes": ["environment_scores", "environment_seconds", "environment_error"],
}


def job_of(stages: Stages, settings: str = "grpo", **changes: Any) -> Job:
    roles = {stage["role"] for stage in stages if "role" in stage}
    return alike({"stages": stages}, models={role: {"path": role} for role in roles}, **{settings: {}}, **changes)


RUNNABLE: Mapping[str, tuple[Stages, str]] = {
    "two trained roles": (
        (GENERATE, SCORE, ACTOR_PASS, ACTOR, training("critic", "scores", loss="own:regressed")),
        "grpo",
    ),
    "rewards beside a teacher": (
        (GENERATE, SCORE, TEACHER, ACTOR_PASS, training("actor", "scores", "teacher_logprobs")),
        "distill",
    ),
    "PPO without a reference": (
        (GENERATE, SCORE, VALUE, ACTOR_PASS, training("actor", "scores", "values"), CRITIC),
        "ppo",
    ),
    "a second student": (
        (
            *(GENERATE, SCORE, TEACHER, inference("teacher_2", "teacher_2_logprobs"), ACTOR_PASS, ACTOR),
            training("teacher_2", "scores", "teacher_logprobs", "teacher_2_logprobs", loss="distill"),
        ),
        "rloo",
    ),
    "a reward model that learns": (
        (GENERATE, SCORE, ACTOR_PASS, ACTOR, training("reward", "scores", loss="own:preferences")),
        "reinforce",
    ),
}


@pytest.mark.parametrize("name", RUNNABLE)
def test_a_graph_of_no_preset_runs_with_the_settings_of_one(name: str) -> None:
    stages, settings = RUNNABLE[name]
    job = job_of(stages, settings)
    assert job.preset is None
    assert tuple(own_graph_violations(job)) == ()


def test_a_stage_says_how_it_learns() -> None:
    stages, settings = RUNNABLE["a second student"]
    own = (*stages[:-2], training("actor", "scores", advantages="own:mean", loss="own:ratio"), stages[-1])
    job = job_of(own, settings)
    graph = job.algorithm.graph() if not isinstance(job.algorithm, str) else None
    assert graph is not None
    assert stage_loss(job, graph.by_name["actor_train"]) == StageLoss(advantages="own:mean", function="own:ratio")
    second = StageLoss(old_logprobs="teacher_2_logprobs", is_distillation=True)
    assert stage_loss(job, graph.by_name["teacher_2_train"]) == second
    assert own_functions(job) == (("actor_train", "own:mean"), ("actor_train", "own:ratio"))


@pytest.mark.parametrize(
    ("stages", "settings", "sentence"),
    [
        (
            ({**GENERATE, "writes": ["tokens", "prompt_lengths"]}, SCORE, ACTOR_PASS, ACTOR),
            "grpo",
            "actor_generate writes tokens, prompt_lengths; run needs exactly tokens, prompt_lengths, truncated, beha",
        ),
        (
            (GENERATE, inference("reward", "marks"), ACTOR_PASS, training("actor", "marks")),
            "grpo",
            "reward_pass writes marks; an inference of the reward computes one field: let it write scores.",
        ),
        ((GENERATE, ACTOR_PASS, training("actor")), "grpo", "no stage scores the samples, and the job's settings are"),
        ((GENERATE, SCORE, ACTOR_PASS, ACTOR), "distill", "no stage has a teacher's log-probabilities; add an"),
        ((GENERATE, ACTOR_PASS, training("actor")), "distill", "no stage has a teacher's log-probabilities; add an"),
        (
            (GENERATE, SCORE, {**ACTOR, "reads": ["tokens", "scores"]}),
            "grpo",
            "actor_train must read proximal_logprobs, which an inference of the actor writes; add it",
        ),
        (
            (GENERATE, SCORE, ACTOR_PASS, training("actor", loss="own:loss"), training("critic", "scores")),
            "grpo",
            "actor_train must read scores, from which its rewards are computed; add it",
        ),
        (
            (GENERATE, SCORE, ACTOR_PASS, ACTOR, training("critic", "scores")),
            "grpo",
            "critic_train must read values, near which its loss clips the new ones; add it",
        ),
        (
            (GENERATE, SCORE, VALUE, ACTOR_PASS, ACTOR, CRITIC),
            "grpo",
            "critic_train has the value loss of PPO, and the job's settings are grpo; give ppo: .*, or a loss",
        ),
        (
            (GENERATE, SCORE, ACTOR_PASS, ACTOR, training("critic", "scores", loss="policy")),
            "grpo",
            "critic_train trains the critic, which predicts no tokens, with loss=policy; use value or module:function",
        ),
        (
            (GENERATE, SCORE, ACTOR_PASS, training("actor", "scores", loss="value")),
            "grpo",
            "actor_train trains the actor, which predicts tokens, with loss=value; use policy, distill or module",
        ),
        (
            (GENERATE, SCORE, ACTOR_PASS, ACTOR, training("reward", "scores")),
            "grpo",
            "reward_train trains the reward with loss=value, which is a critic's; give it a loss of your own",
        ),
        (
            (GENERATE, SCORE, ACTOR_PASS, training("actor", "scores", loss="distill")),
            "grpo",
            "actor_train learns from teachers and reads the log-probabilities of none; add teacher_logprobs",
        ),
        (
            (GENERATE, SCORE, VALUE, ACTOR_PASS, ACTOR, CRITIC),
            "ppo",
            "actor_train has the advantages of PPO and does not read values; add it to its reads, or give advantages",
        ),
        (
            (
                GENERATE,
                TEACHER,
                ACTOR_PASS,
                training("actor", "teacher_logprobs"),
                training("teacher", "teacher_logprobs"),
            ),
            "distill",
            "teacher_train trains the teacher, and the job's settings are distill, whose teachers stay as they are",
        ),
        (
            (
                *(GENERATE, TEACHER, ACTOR_PASS, training("actor", "teacher_logprobs")),
                training("critic", loss="own:loss"),
            ),
            "distill",
            "critic_train must read teacher_logprobs, from which samples are scored; add it",
        ),
        (
            (GENERATE, SCORE, ACTOR_PASS, training("actor", "scores", loss="own:loss")),
            "rloo",
            "workload.group_size=1: rloo compares the samples of a prompt",
        ),
    ],
)
def test_a_graph_that_run_cannot_execute_is_refused_in_one_sentence(
    stages: Stages, settings: str, sentence: str
) -> None:
    single = {"workload": {**JOB["workload"], "group_size": 1}} if "group_size" in sentence else {}
    found = next(own_graph_violations(job_of(stages, settings, **single)))
    assert re.search(sentence, found), found
    assert "\n" not in found


def test_an_environment_writes_what_every_environment_does() -> None:
    actor = training("actor", "environment_scores")
    assert not tuple(own_graph_violations(job_of((GENERATE, HOSTED, ACTOR_PASS, actor), rewards=[MATHS])))
    odd = {**HOSTED, "writes": ["environment_scores"]}
    sentence = "environment_score writes environment_scores; run needs exactly environment_scores, environment_seconds"
    job = job_of((GENERATE, odd, ACTOR_PASS, {**actor, "loss": "own:loss"}), rewards=[MATHS])
    assert next(own_graph_violations(job)).startswith(sentence)
    odd = {**HOSTED, "reads": ["tokens"]}
    job = job_of((GENERATE, odd, ACTOR_PASS, {**actor, "loss": "own:loss"}), rewards=[MATHS])
    assert next(own_graph_violations(job)).startswith("environment_score must read tokens and prompt_lengths")


def test_groups_are_sampled_until_they_have_a_signal_where_it_is_all_that_they_teach() -> None:
    waves = {"workload": {**JOB["workload"], "dynamic_sampling": {"acceptance": 0.5}}}
    last = {**ACTOR_PASS, "reads": ["tokens", "scores"]}
    stages = (GENERATE, SCORE, last, training("actor", "scores", loss="own:loss"))
    assert tuple(own_graph_violations(job_of(stages, **waves))) == ()
    sentence = "the job's settings are reinforce, which learns from these too; give the settings of grpo or rloo"
    assert sentence in next(own_graph_violations(job_of(stages, "reinforce", **waves)))
    with pytest.raises(
        BadInput, match="actor_pass does not read scores, and it works on the groups that are selected by"
    ):
        job_of((GENERATE, SCORE, ACTOR_PASS, ACTOR), **waves)
    with pytest.raises(
        BadInput, match="no stage of the job's own graph scores the samples; add an inference of an untr"
    ):
        job_of((GENERATE, SCORE, last, ACTOR, training("reward", "scores", loss="own:loss")), **waves)


def test_the_example_is_trained_by_its_own_advantages() -> None:
    job = read_job(Path(__file__).parents[3] / "examples" / "own-graph-16xh100" / "job.yaml")
    assert job.preset is None
    assert tuple(own_graph_violations(job)) == ()
    assert own_functions(job) == (("actor_train", "taught_and_paid:advantages"),)
