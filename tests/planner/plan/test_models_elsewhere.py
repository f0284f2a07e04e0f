"""A plan is held to shapes, the tokenizer, the chat template and the end tokens, and never to where models are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from meshwright.planner.job.job import Job, PPOJob, require_job, resolve
from meshwright.planner.job.model_paths import parse_model_paths, with_model_paths, without_model_paths
from meshwright.planner.job.sections import Data, Models, ModelSource
from meshwright.profiles.documents import canonical_json, parse
from meshwright.profiles.errors import BadInput
from meshwright.profiles.workload import Workload
from tests.planner.plan.test_job import CONFIG, LENGTHS

TOKENS = {"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}, "truncation": None}


def write_json(path: Path, content: Mapping[str, Any], **changes: object) -> None:
    path.write_text(json.dumps({**content, **changes}))


@pytest.fixture
def laptop(tmp_path: Path) -> Path:
    """The directory of a job: an actor with a tokenizer and a chat template, and a reward model."""
    for name in ("actor", "reward"):
        (tmp_path / "laptop" / name).mkdir(parents=True)
        write_json(tmp_path / "laptop" / name / "config.json", CONFIG, eos_token_id=1)
    write_json(tmp_path / "laptop" / "actor" / "tokenizer.json", TOKENS)
    (tmp_path / "laptop" / "actor" / "chat_template.jinja").write_text("{{ messages }}")
    return tmp_path / "laptop"


@pytest.fixture
def job() -> Job:
    actor, reward = ModelSource(path="actor"), ModelSource(path="reward")
    return PPOJob(
        models=Models(actor=actor, ref=actor, reward=reward, critic=reward),
        workload=Workload(batch_size=8, prompt=LENGTHS, response=LENGTHS),
        data=Data(prompts="prompts.jsonl", tokenizer="actor"),
    )


@pytest.fixture
def cluster(laptop: Path, tmp_path: Path) -> Path:
    """The directory of the same models under other names."""
    shutil.copytree(laptop / "actor", tmp_path / "cluster" / "policy-v2")
    shutil.copytree(laptop / "reward", tmp_path / "cluster" / "rm")
    return tmp_path / "cluster"


def test_a_plan_is_of_its_job_wherever_the_models_are(job: Job, laptop: Path, cluster: Path, tmp_path: Path) -> None:
    facts = resolve(job, laptop)
    shutil.rmtree(laptop)
    moved = with_model_paths(job, {"actor": cluster / "policy-v2", "reward": cluster / "rm"}, laptop)
    require_job(facts, moved, laptop)
    assert moved.models.ref == moved.models.actor, "the reference is in the same directory and moves along"
    assert moved.models.critic == moved.models.reward
    assert moved.data is not None
    assert moved.data.tokenizer == str(cluster / "policy-v2")
    assert moved.data.prompts == "prompts.jsonl"


def test_a_model_with_a_path_of_its_own_does_not_move_along(job: Job, laptop: Path, cluster: Path) -> None:
    moved = with_model_paths(job, {"actor": cluster / "policy-v2", "ref": laptop / "actor"}, laptop)
    assert moved.models.ref is not None
    assert moved.models.ref.path == str(laptop / "actor")
    assert moved.models.reward == job.models.reward


def test_machines_that_keep_models_in_different_directories_have_the_same_job(
    job: Job, laptop: Path, cluster: Path
) -> None:
    one, other = (with_model_paths(job, {"actor": path}, laptop) for path in (cluster / "policy-v2", cluster / "rm"))
    assert one != other
    assert without_model_paths(one) == without_model_paths(other) == without_model_paths(job)


def change_shape(actor: Path) -> None:
    write_json(actor / "config.json", CONFIG, eos_token_id=1, num_hidden_layers=2)


def change_end(actor: Path) -> None:
    write_json(actor / "config.json", CONFIG, eos_token_id=[0, 1])


def change_tokenizer(actor: Path) -> None:
    write_json(actor / "tokenizer.json", TOKENS, normalizer={"type": "Lowercase"})


def change_template(actor: Path) -> None:
    (actor / "chat_template.jinja").write_text("{{ messages[0] }}")


def remove_template(actor: Path) -> None:
    (actor / "chat_template.jinja").unlink()


def remove_tokenizer(actor: Path) -> None:
    (actor / "tokenizer.json").unlink()


DIFFERENCES = [
    (
        change_shape,
        "models.actor.num_layers is 4 in the plan and 2 in {actor}; give the directory of the planned model",
    ),
    (change_end, "eos_token_id is 1 in the plan and 0 and 1 in the actor's {actor}; give the directory of the planned"),
    (change_tokenizer, "the tokenizer {actor} is not the plan's; give the one that the job was planned with, or plan"),
    (change_template, "the tokenizer {actor} has another chat template than the plan's; give the chat_template.jinja"),
    (remove_template, "the tokenizer {actor} has no chat template, unlike the plan's; give the chat_template.jinja"),
    (remove_tokenizer, "the tokenizer {actor} has no tokenizer.json, and the plan's has; give the one that"),
]


@pytest.mark.parametrize(("change", "sentence"), DIFFERENCES)
def test_each_difference_that_decides_is_said(
    change: Callable[[Path], None], sentence: str, job: Job, laptop: Path
) -> None:
    facts = resolve(job, laptop)
    change(laptop / "actor")
    with pytest.raises(BadInput) as caught:
        require_job(facts, job, laptop)
    assert sentence.format(actor=laptop / "actor") in str(caught.value)


def test_all_differences_are_said_at_once(job: Job, laptop: Path) -> None:
    facts = resolve(job, laptop)
    for change in (change_shape, change_tokenizer, change_template):
        change(laptop / "actor")
    with pytest.raises(BadInput) as caught:
        require_job(facts, job, laptop)
    assert str(caught.value).count("plan this job again.") == 3, "the shape of one directory, and two files"


def test_how_a_tokenizer_pads_and_where_its_template_is_decide_nothing(job: Job, laptop: Path) -> None:
    facts = resolve(job, laptop)
    write_json(laptop / "actor" / "tokenizer.json", TOKENS, truncation={"max_length": 8}, padding={"pad_id": 0})
    (laptop / "actor" / "chat_template.jinja").unlink()
    write_json(laptop / "actor" / "tokenizer_config.json", {"chat_template": "{{ messages }}"})
    require_job(facts, job, laptop)


def test_a_plan_from_a_bare_config_is_of_the_job_with_the_whole_model(job: Job, laptop: Path, tmp_path: Path) -> None:
    """What was absent when the job was planned is not compared; nor is it in a plan of an earlier version."""
    whole = laptop / "actor"
    for name in ("tokenizer.json", "chat_template.jinja"):
        (whole / name).rename(tmp_path / name)
    write_json(whole / "config.json", CONFIG)
    facts = resolve(job, laptop)
    assert facts.tokenizer is None
    assert '"tokenizer"' not in canonical_json(facts)
    for name in ("tokenizer.json", "chat_template.jinja"):
        (tmp_path / name).rename(whole / name)
    write_json(whole / "config.json", CONFIG, eos_token_id=1)
    require_job(facts, job, laptop)


def test_what_a_plan_records_is_read_as_it_was_written(job: Job, laptop: Path) -> None:
    facts = resolve(job, laptop)
    assert facts.tokenizer is not None
    assert facts.tokenizer.end_tokens == (1,)
    assert parse(type(facts), canonical_json(facts), "facts") == facts


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        (["/data/actor"], "--model /data/actor is not role=DIR; write it like actor=/data/models/actor."),
        (["actor="], "--model actor= is not role=DIR; write it like actor=/data/models/actor."),
        (["acter=x"], "--model acter=x: there is no role 'acter'; did you mean 'actor'?"),
        (["actor=x", "actor=y"], "--model actor=y: the actor model already has x; give one path."),
        (["teacher=x"], "--model teacher=x: the job has no teacher model; its models are actor, critic, ref, reward."),
    ],
)
def test_a_model_path_that_means_nothing_is_refused(texts: list[str], sentence: str, job: Job, laptop: Path) -> None:
    with pytest.raises(BadInput) as caught:
        with_model_paths(job, parse_model_paths(texts), laptop)
    assert str(caught.value) == sentence
