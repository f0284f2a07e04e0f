"""A graph of no preset, with three trained roles and functions of its own, learns what a loop in float64 does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from meshwright.profiles.schedule import Schedule
from meshwright.runtime.execution.request import RunRequest, check
from meshwright.runtime.launch.rendezvous import Rendezvous
from tests.reference.own_graph import OwnGraphReference
from tests.reference.ppo import weights_of
from tests.runtime.compared import settings_of
from tests.runtime.observed import observe
from tests.runtime.plans_by_hand import Where
from tests.runtime.refereed import Distances, drawn_in, request_of, requests_of
from tests.runtime.small_job import write_job

STEPS, BATCH, GROUP, TOLERANCE = 3, 16, 4, 1e-4
MODULE = "tests.runtime.own_functions"

GENERATED = ["tokens", "prompt_lengths", "truncated", "behaviour_logprobs", "versions"]
STAGES: list[dict[str, Any]] = [
    {"name": "actor_generate", "kind": "generation", "role": "actor", "writes": GENERATED},
    {"name": "score", "kind": "inference", "role": "reward", "reads": ["tokens"], "writes": ["scores"]},
    {"name": "near", "kind": "inference", "role": "ref", "reads": ["tokens"], "writes": ["ref_logprobs"]},
    {"name": "taught", "kind": "inference", "role": "teacher", "reads": ["tokens"], "writes": ["teacher_logprobs"]},
    {"name": "second", "kind": "inference", "role": "teacher_2", "reads": ["tokens"], "writes": ["teacher_2_logprobs"]},
    {"name": "first", "kind": "inference", "role": "actor", "reads": ["tokens"], "writes": ["proximal_logprobs"]},
    {
        "name": "actor_train",
        "kind": "training",
        "role": "actor",
        "reads": ["tokens", "scores", "ref_logprobs", "proximal_logprobs"],
        "loss": f"{MODULE}:weighted_ratio",
        "advantages": f"{MODULE}:above_the_mean",
    },
    {
        "name": "second_train",
        "kind": "training",
        "role": "teacher_2",
        "reads": ["tokens", "scores", "teacher_logprobs", "teacher_2_logprobs", "proximal_logprobs"],
        "loss": "distill",
    },
    {
        "name": "critic_train",
        "kind": "training",
        "role": "critic",
        "reads": ["tokens", "scores", "proximal_logprobs"],
        "loss": f"{MODULE}:regressed_reward",
    },
]
MODELS = {
    "actor": "policy",
    "ref": "ref",
    "teacher": "ref",
    "teacher_2": "policy",
    "critic": "values",
    "reward": "scores",
}
SETTINGS = {
    "actor_learning_rate": 3e-4,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "temperature": 0.8,
    "loss_mean": "token",
    "kl_coefficient": 0.0,
    "seed": 3,
}


@dataclass(frozen=True)
class Case:
    """A plan on so many ranks."""

    num_ranks: int
    where: Mapping[str, Where]
    steps_ahead: int = 0


def rows(number: int) -> Schedule:
    return Schedule(micro_batch_size=number)


CASES = {
    "one rank": Case(1, {"other": Where("0:1", schedule=rows(4))}),
    "tp2": Case(2, {"other": Where("0:2", "tp2,sp", rows(8)), "actor_generate": Where("0:2", "tp2")}),
    "pools": Case(
        2,
        {
            "other": Where("1:1", schedule=rows(2)),
            "actor_generate": Where("0:1"),
            "first": Where("0:1", schedule=rows(8)),
            "actor_train": Where("0:1", schedule=rows(8)),
        },
    ),
    "one step ahead": Case(
        2,
        {"actor_generate": Where("0:1"), "score": Where("0:1"), "other": Where("1:1", schedule=rows(8))},
        steps_ahead=1,
    ),
    "dp2, pp2": Case(
        2,
        {
            "other": Where("0:2", "dp2", rows(4)),
            "actor_train": Where("0:2", "pp2", rows(2)),
            "critic_train": Where("0:2", "pp2", rows(8)),
        },
    ),
}


def own_run(directory: Path, name: str, case: Case) -> RunRequest:
    job = yaml.safe_load(write_job(directory, num_ranks=case.num_ranks).read_text())
    del job["ppo"]
    job["models"] = {role: {"path": path} for role, path in MODELS.items()}
    job["workload"] |= {"response": {"max": 12, "fixed": 8}, "batch_size": BATCH, "num_epochs": 2}
    job["workload"]["group_size"] = GROUP
    job |= {"algorithm": {"stages": STAGES}, "grpo": SETTINGS, "staleness": case.steps_ahead}
    asked = request_of(job, directory, name, case.where, steps=STEPS, steps_ahead=case.steps_ahead)
    return replace(asked, allowed_modules=(MODULE,))


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunRequest]:
    return requests_of(tmp_path_factory.mktemp("job"), CASES, own_run)


@pytest.mark.check_all
@pytest.mark.parametrize("name", CASES)
def test_every_role_learns_what_the_reference_does(requests: dict[str, RunRequest], name: str) -> None:
    asked = requests[name]
    [run] = observe(asked.plan.facts.cluster.num_ranks, [asked])
    directories = {role: asked.directory / path for role, path in MODELS.items()}
    judge = OwnGraphReference(directories, settings_of(asked))
    found = Distances()
    names = {"actor": "own_loss", "teacher_2": "policy_loss", "critic": "own_loss"}
    for step in range(STEPS):
        learnt = judge.step(step, drawn_in(run, step, BATCH))
        for role, stage in asked.plan.graph.train_stage.items():
            count = len(learnt.losses[role])
            updates = run.updates[stage][step * count : (step + 1) * count]
            said = torch.tensor([update.metrics[names[role]] for update in updates], dtype=torch.float64)
            found.add(f"{role} loss", said + 1e-3, torch.tensor(learnt.losses[role]).double() + 1e-3)
    for role in learnt.losses:
        found.add_all(role, run.weights(role), weights_of(judge.trained[role]))
    assert found.beyond(TOLERANCE) == {}


@pytest.mark.check_all
def test_the_metrics_of_each_trained_role_have_its_name(requests: dict[str, RunRequest]) -> None:
    out = requests["one rank"].out
    if not (out / "metrics.jsonl").exists():
        observe(1, [requests["one rank"]])
    line = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    assert {"own_loss", "teacher_2_policy_loss", "teacher_2_approx_kl", "critic_own_loss", "score"} <= line.keys()
    assert {"teacher_2_grad_norm", "actor_grad_norm", "critic_grad_norm"} <= line.keys()
    assert "policy_loss" not in line


def test_a_graph_whose_functions_were_not_allowed_is_refused(requests: dict[str, RunRequest]) -> None:
    asked = replace(requests["one rank"], allowed_modules=(), out=requests["one rank"].out / "other")
    with pytest.raises(Exception, match=f"actor_train: {MODULE}:above_the_mean would run code of the module {MODULE}"):
        check(asked, Rendezvous())
