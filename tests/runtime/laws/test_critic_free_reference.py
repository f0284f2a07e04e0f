"""What a run without a critic learns is what GRPO, RLOO and REINFORCE++ say, in many layouts, by `tests.reference`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import Role
from meshwright.runtime.execution.request import RunRequest
from tests.reference.critic_free import CriticFreeReference
from tests.reference.ppo import weights_of
from tests.runtime.compared import judged, settings_of
from tests.runtime.observed import Observed
from tests.runtime.plans_by_hand import Where
from tests.runtime.refereed import Runs, request_of, requests_of
from tests.runtime.small_job import write_job

STEPS, BATCH, GROUP, MAX_RESPONSE = 4, 16, 4, 12
TOLERANCE = 1e-4
KEYS = {"grpo": "grpo", "rloo": "rloo", "reinforce++": "reinforce"}

SETTINGS: dict[str, Any] = {
    "actor_learning_rate": 3e-4,
    "adam_beta2": 0.98,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "entropy_coefficient": 0.01,
    "temperature": 0.8,
    "top_k": 24,
    "top_p": 0.9,
    "seed": 3,
}
DAPO = {"loss_mean": "token", "clip_ratio_high": 0.28, "overlong_tokens": 6, "overlong_penalty": 0.5}
KEPT = {"kl_coefficient": 0.1}
DR_GRPO = {"loss_mean": "constant", "normalise_by_std": False}


@dataclass(frozen=True)
class Case:
    """A plan on so many ranks, and the settings that differ from the others'."""

    num_ranks: int
    where: Mapping[str, Where]
    algorithm: str = "grpo"
    steps_ahead: int = 0
    has_ref: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)


def rows(number: int) -> Schedule:
    return Schedule(micro_batch_size=number)


AHEAD = {"actor_generate": Where("0:1"), "reward_score": Where("0:1"), "other": Where("1:1", schedule=rows(8))}
TP2 = {"other": Where("0:2", "tp2,sp", rows(8)), "actor_generate": Where("0:2", "tp2")}
ONE = {"other": Where("0:1", schedule=rows(4))}
CASES = {
    "one rank": Case(1, {"other": Where("0:1", schedule=rows(4))}, settings={"kl_coefficient": 0.2}),
    "one rank, few slots": Case(
        1,
        {
            "other": Where("0:1", schedule=rows(4)),
            "actor_generate": Where("0:1", schedule=Schedule(generation_slots=4)),
        },
    ),
    "tp2, DAPO": Case(2, TP2, settings=DAPO),
    "pp2, Dr. GRPO": Case(2, {"other": Where("0:2", "pp2", rows(2))}, settings=DR_GRPO),
    "dp2": Case(2, {"other": Where("0:2", "dp2", rows(4))}, settings={"missing_end_penalty": 0.5}),
    "tp2 pp2": Case(4, {"other": Where("0:4", "tp2,pp2", rows(4))}),
    "dp4, without a reference": Case(4, {"other": Where("0:4", "dp4", rows(2))}, has_ref=False),
    "one step ahead": Case(2, AHEAD, steps_ahead=1),
    "RLOO, dp2": Case(2, {"other": Where("0:2", "dp2", rows(4))}, "rloo"),
    "REINFORCE++, pp2": Case(
        2, {"other": Where("0:2", "pp2", rows(4))}, "reinforce++", settings={"kl_coefficient": 0.1}
    ),
    "REINFORCE++ with a baseline": Case(
        1, {"other": Where("0:1", schedule=rows(4))}, "reinforce++", has_ref=False, settings={"group_baseline": True}
    ),
}


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunRequest]:
    """Of every case."""
    return requests_of(tmp_path_factory.mktemp("job"), CASES, _request)


def _request(directory: Path, name: str, case: Case) -> RunRequest:
    job = yaml.safe_load(write_job(directory, num_ranks=case.num_ranks).read_text())
    del job["ppo"]
    paths = {"actor": "policy", "reward": "scores", **({"ref": "ref"} if case.has_ref else {})}
    job["models"] = {role: {"path": path} for role, path in paths.items()}
    job["workload"] |= {"response": {"max": MAX_RESPONSE, "fixed": 8}, "batch_size": BATCH, "num_epochs": 2}
    job["workload"]["group_size"] = GROUP
    job |= {"algorithm": case.algorithm, KEYS[case.algorithm]: {**SETTINGS, **case.settings}}
    job["staleness"] = case.steps_ahead
    return request_of(job, directory, name, case.where, steps=STEPS, steps_ahead=case.steps_ahead)


@pytest.fixture(scope="module")
def runs(requests: dict[str, RunRequest]) -> dict[str, Observed]:
    return Runs(requests)


@pytest.mark.check_all
@pytest.mark.parametrize("name", CASES)
def test_a_run_draws_and_learns_what_the_reference_does(
    runs: dict[str, Observed], requests: dict[str, RunRequest], name: str
) -> None:
    run, asked = runs[name], requests[name]
    paths = {role: asked.directory / asked.job.models.source(role).path for role in asked.plan.graph.roles}
    judge = CriticFreeReference(paths[Role.ACTOR], paths.get(Role.REF), paths[Role.REWARD], settings_of(asked))
    found = judged(run, judge, num_steps=STEPS, batch_size=BATCH, group_size=GROUP)
    found.add_all("weights", run.weights("actor"), weights_of(judge.actor))
    assert found.beyond(TOLERANCE) == {}
