"""The settings of algorithms without a critic, and those that are refused in one sentence."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshwright.planner.job.algorithm_settings import GRPO, PPO, RLOO, Reinforce
from meshwright.planner.job.job import Job
from meshwright.profiles.documents import canonical_json, parse
from meshwright.profiles.errors import BadInput

JOB: dict[str, Any] = {
    "algorithm": "grpo",
    "models": {role: {"path": role} for role in ("actor", "ref", "reward")},
    "workload": {
        "batch_size": 8,
        "group_size": 4,
        "prompt": {"max": 8, "fixed": 8},
        "response": {"max": 8, "fixed": 8},
    },
}


def job_of(**changes: Any) -> Job:
    return parse(Job, json.dumps({**JOB, **changes}), "job")


def test_a_ratio_is_held_as_far_above_one_as_below_unless_clip_higher_is_asked() -> None:
    assert GRPO(clip_ratio=0.2).clip_range == PPO(clip_ratio=0.2).clip_range == (0.8, 1.2)
    assert GRPO(clip_ratio=0.2, clip_ratio_high=0.28).clip_range == (0.8, 1.28)


def test_a_cut_response_is_paid() -> None:
    assert GRPO().rewards_truncated
    assert not PPO(truncation="bootstrap").rewards_truncated


def test_a_job_has_the_settings_of_its_algorithm() -> None:
    assert job_of().settings == GRPO()
    assert job_of(grpo={"kl_coefficient": 0.0}).settings == GRPO(kl_coefficient=0.0)
    assert job_of(algorithm="rloo").settings == RLOO()
    assert job_of(**WITHOUT_REF).settings == GRPO(kl_coefficient=0.0)
    assert job_of(algorithm="reinforce++", reinforce={"group_baseline": True}).settings == Reinforce(
        group_baseline=True
    )


WITHOUT_REF = {"models": {role: {"path": role} for role in ("actor", "reward")}}


@pytest.mark.parametrize(
    "changes", [{}, {"grpo": {"seed": 3}}, {"algorithm": "reinforce++"}, {**WITHOUT_REF, "grpo": {"seed": 3}}]
)
def test_a_job_is_read_as_it_was_written_and_has_no_word_of_ppo(changes: dict[str, Any]) -> None:
    job = job_of(**changes)
    text = canonical_json(job)
    assert parse(Job, text, "job") == job
    assert "ppo" not in text
    assert "critic" not in text


def test_a_job_is_written_with_the_settings_of_its_algorithm_only() -> None:
    models = {role: {"path": role} for role in ("actor", "critic", "ref", "reward")}
    written = json.loads(canonical_json(job_of(algorithm="ppo", models=models)))
    assert not {"grpo", "rloo", "reinforce", "distill"} & written.keys()
    assert "ppo" in written


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"ppo": {"gamma": 0.9}},
            "job: unknown key 'ppo'; it has the settings of algorithm=ppo, and this job has its settings under grpo; "
            "move them there or remove them.",
        ),
        (
            {"algorithm": "rloo", "reinforce": {}},
            "job: unknown key 'reinforce'; it has the settings of algorithm=reinforce++, and this job has its settings "
            "under rloo; move them there or remove them.",
        ),
        (
            {"models": {role: {"path": role} for role in ("actor", "reward")}, "grpo": {"kl_coefficient": 0.1}},
            "job: grpo.kl_coefficient=0.1 penalises the distance from a reference, and models.ref names none; name "
            "one, or use 0.",
        ),
        (
            {"grpo": {"gae_lambda": 0.9}},
            "job: unknown key 'grpo.gae_lambda'; it is a setting of algorithm=ppo; remove it.",
        ),
        (
            {"grpo": {"teacher_weights": [1.0]}},
            "job: unknown key 'grpo.teacher_weights'; it is a setting of algorithm=distill; remove it.",
        ),
        (
            {"algorithm": "grop", "grpo": {}},
            "job: algorithm is 'grop': input should be 'ppo', 'grpo', 'rloo', 'reinforce++' or 'distill'.",
        ),
        (
            {"grpo": {"normalize_by_std": False}},
            "job: unknown key 'grpo.normalize_by_std'; did you mean 'normalise_by_std'?",
        ),
        (
            {"grpo": {"loss_mean": "tokens"}},
            "job: grpo.loss_mean is 'tokens': input should be 'token', 'sequence' or 'constant'.",
        ),
        (
            {"models": {role: {"path": role} for role in ("actor", "critic", "ref", "reward")}},
            "job: models.critic: algorithm=grpo has no stage of that role; remove it.",
        ),
    ],
)
def test_what_an_algorithm_does_not_have_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput) as caught:
        job_of(**changes)
    assert str(caught.value) == sentence
