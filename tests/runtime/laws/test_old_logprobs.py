"""A run without a pass of its own for the old log-probabilities learns what the float64 references say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import Role
from meshwright.runtime.execution.request import RunRequest
from tests.reference.critic_free import CriticFreeReference
from tests.reference.distillation import DistilledReference
from tests.reference.ppo import Reference, weights_of
from tests.runtime.compared import judged, settings_of
from tests.runtime.laws.test_reference import compare_experience_of_ppo, compare_updates_of_ppo, settings_of_ppo
from tests.runtime.observed import Observed
from tests.runtime.plans_by_hand import Where
from tests.runtime.refereed import Distances, Runs, drawn_in, request_of, requests_of
from tests.runtime.small_job import write_job
from tests.seeds import cases

STEPS, BATCH, GROUP, MAX_RESPONSE = 3, 16, 4, 12
TOLERANCE = 1e-4

SETTINGS: dict[str, Any] = {
    "actor_learning_rate": 3e-4,
    "adam_beta2": 0.98,
    "max_grad_norm": 0.5,
    "entropy_coefficient": 0.01,
    "temperature": 0.8,
    "top_k": 24,
    "seed": 3,
}
PPO: dict[str, Any] = {
    "critic_learning_rate": 1e-3,
    "actor_schedule": {"warmup_steps": 2, "decay": "cosine", "decay_steps": 24},
    "reward_clip": 0.8,
    "kl_coefficient": 0.2,
    "importance_cap": 1.02,
}
"""The cap is so low that it truncates ratios."""


@dataclass(frozen=True)
class Case:
    """A plan, its number of ranks, the source of the old log-probabilities, and the number of updates of a step."""

    old_logprobs: str
    num_ranks: int
    where: Mapping[str, Where]
    algorithm: str = "grpo"
    num_minibatches: int = 1
    num_epochs: int = 1
    steps_ahead: int = 0
    staleness: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)


def rows(number: int) -> Schedule:
    return Schedule(micro_batch_size=number)


ONE_RANK = {"other": Where("0:1", schedule=rows(4))}
DP2 = {"other": Where("0:2", "dp2", rows(4))}
PP2 = {"other": Where("0:2", "pp2", rows(2))}
TP2 = {"other": Where("0:2", "tp2,sp", rows(8)), "actor_generate": Where("0:2", "tp2")}
AHEAD = {"actor_generate": Where("0:1"), "reward_score": Where("0:1"), "other": Where("1:1", schedule=rows(8))}
CASES = {
    "training, dp2": Case("training", 2, DP2, settings={"kl_coefficient": 0.2}),
    "generator, PPO, dp2": Case("generator", 2, DP2, "ppo", num_minibatches=2, num_epochs=2, settings=PPO),
    "training, one step ahead": Case("training", 2, AHEAD, steps_ahead=1, staleness=1),
    "training, tp2": Case("training", 2, TP2),
    "training, PPO, pp2": Case("training", 2, PP2, "ppo", settings={**PPO, "kl_coefficient": 0.0}),
    "training, RLOO": Case("training", 1, ONE_RANK, "rloo", settings={"kl_coefficient": 0.0}),
    "generator, tp2": Case("generator", 2, TP2, num_minibatches=2, num_epochs=2),
    "generator, one step ahead": Case("generator", 2, AHEAD, steps_ahead=1, staleness=1, num_minibatches=2),
    "generator, PPO, one step ahead": Case(
        "generator", 2, AHEAD, "ppo", steps_ahead=1, staleness=1, num_minibatches=2, settings=PPO
    ),
    "generator, distillation": Case("generator", 1, ONE_RANK, "distill", num_minibatches=2),
}
KEYS = {"grpo": "grpo", "rloo": "rloo", "ppo": "ppo", "distill": "distill"}
MODELS = {
    "grpo": {"actor": "policy", "ref": "ref", "reward": "scores"},
    "rloo": {"actor": "policy", "ref": "ref", "reward": "scores"},
    "ppo": {"actor": "policy", "critic": "values", "ref": "ref", "reward": "scores"},
    "distill": {"actor": "policy", "teacher": "ref"},
}


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunRequest]:
    """The request of every case."""
    return requests_of(tmp_path_factory.mktemp("job"), CASES, _request)


def _request(directory: Path, name: str, case: Case) -> RunRequest:
    job = yaml.safe_load(write_job(directory, num_ranks=case.num_ranks).read_text())
    del job["ppo"]
    job["models"] = {role: {"path": path} for role, path in MODELS[case.algorithm].items()}
    job["workload"] |= {
        "response": {"max": MAX_RESPONSE, "fixed": 8},
        "batch_size": BATCH,
        "group_size": 1 if case.algorithm == "ppo" else GROUP,
        "num_minibatches": case.num_minibatches,
        "num_epochs": case.num_epochs,
    }
    job |= {
        "algorithm": case.algorithm,
        KEYS[case.algorithm]: {**SETTINGS, **case.settings},
        "staleness": case.staleness,
        "old_logprobs": case.old_logprobs,
    }
    return request_of(job, directory, name, case.where, steps=STEPS, steps_ahead=case.steps_ahead)


@pytest.fixture(scope="module")
def runs(requests: dict[str, RunRequest]) -> dict[str, Observed]:
    return Runs(requests)


@cases("name", CASES, few=2)
def test_a_run_learns_what_the_reference_does(
    runs: dict[str, Observed], requests: dict[str, RunRequest], name: str
) -> None:
    run, asked, case = runs[name], requests[name], CASES[name]
    assert "actor_logprob" not in asked.plan.graph.by_name
    paths = {role: asked.directory / asked.job.models.source(role).path for role in asked.plan.graph.roles}
    if case.algorithm == "ppo":
        found, actor = _judged_ppo(run, asked, paths)
    else:
        judge = (
            DistilledReference(paths[Role.ACTOR], [paths[Role.TEACHER]], settings_of(asked))
            if case.algorithm == "distill"
            else CriticFreeReference(paths[Role.ACTOR], paths[Role.REF], paths[Role.REWARD], settings_of(asked))
        )
        found, actor = judged(run, judge, num_steps=STEPS, batch_size=BATCH, group_size=GROUP), judge.actor
    found.add_all("weights", run.weights("actor"), weights_of(actor))
    assert found.beyond(TOLERANCE) == {}
    ratios = torch.tensor([update.metrics["ratio"] for update in run.updates["actor_train"]])
    assert bool((ratios == 1).all()) == (case.old_logprobs == "training")


def _judged_ppo(run: Observed, asked: RunRequest, paths: Mapping[Role, Path]) -> tuple[Distances, torch.nn.Module]:
    judge, found = Reference(*(paths[role] for role in asked.job.models.roles), settings_of_ppo(asked)), Distances()
    for step in range(STEPS):
        drawn = drawn_in(run, step, BATCH)
        learnt = judge.step(step, drawn)
        compare_experience_of_ppo(found, run, step, drawn, learnt, recomputes=False)
        compare_updates_of_ppo(found, run, step, drawn, learnt)
    found.add_all("critic weights", run.weights("critic"), weights_of(judge.critic))
    return found, judge.actor


@cases("name", CASES, few=2)
def test_the_first_update_measures_the_gap_between_generator_and_trainer(runs: dict[str, Observed], name: str) -> None:
    """Both compute in fp32 with the same weights, so it is a rounding error; of staler tokens nothing is compared."""
    first = runs[name].updates["actor_train"][0].metrics
    assert first["gap.num_tokens"] > 0
    assert first["max_gap.largest"] < 1e-4
    assert first["gap.abs_difference_sum"] <= first["gap.num_tokens"] * first["max_gap.largest"]
