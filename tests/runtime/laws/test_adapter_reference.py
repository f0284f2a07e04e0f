"""What a run learns that trains an adapter is what LoRA says, in many layouts, by `tests.reference.low_rank`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.profiles.model_parts.adapter import Adapter
from meshwright.profiles.schedule import Recompute, Schedule
from meshwright.profiles.stages import Role
from meshwright.runtime.execution.request import RunRequest
from tests.reference.low_rank import AdaptedPPO, AdaptedReference
from tests.runtime.adapting import compare_adapter, started
from tests.runtime.compared import judged, settings_of
from tests.runtime.laws.test_reference import (
    PPO,
    compare_experience_of_ppo,
    compare_updates_of_ppo,
    settings_of_ppo,
)
from tests.runtime.observed import Observed
from tests.runtime.plans_by_hand import Where
from tests.runtime.refereed import Distances, Runs, drawn_in, request_of, requests_of
from tests.runtime.small_job import write_job
from tests.seeds import cases

STEPS, BATCH, GROUP, MAX_RESPONSE = 4, 16, 4, 12
TOLERANCE = 1e-4
ALL, ATTENTION = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"), ("linear_qkv", "linear_proj")

SETTINGS: dict[str, Any] = {
    "actor_learning_rate": 3e-3,
    "adam_beta2": 0.98,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "entropy_coefficient": 0.01,
    "kl_coefficient": 0.1,
    "temperature": 0.8,
    "seed": 3,
}


@dataclass(frozen=True)
class Case:
    """A plan on so many ranks, and the linears with an adapter."""

    num_ranks: int
    where: Mapping[str, Where]
    targets: tuple[str, ...] = ALL
    steps_ahead: int = 0
    shares: bool = True
    """Whether the reference runs on a copy of the actor's."""
    more: Mapping[str, Any] = field(default_factory=dict)


def rows(number: int, recompute: Recompute = Recompute.NONE) -> Schedule:
    return Schedule(micro_batch_size=number, recompute=recompute)


def training(ranks: str, layout: str, schedule: Schedule) -> dict[str, Where]:
    """The training so, and all else plainly on the same ranks."""
    return {"actor_train": Where(ranks, layout, schedule), "other": Where(ranks, layout, rows(4))}


CASES = {
    "one rank": Case(1, training("0:1", "tp1", rows(4))),
    "tp2": Case(2, {**training("0:2", "tp2,sp", rows(8)), "actor_generate": Where("0:2", "tp2")}, more={"top_k": 24}),
    "tp2 without sp": Case(2, training("0:2", "tp2", rows(2, Recompute.FULL))),
    "pp2": Case(2, training("0:2", "pp2", rows(2, Recompute.FULL)), ATTENTION),
    "dp2": Case(2, training("0:2", "dp2", rows(4, Recompute.SELECTIVE)), ("linear_fc2",)),
    "tp2 pp2": Case(4, {**training("0:4", "tp2,pp2,sp", rows(4)), "actor_generate": Where("0:4", "tp2,pp2")}),
    "tp2 dp2, generation elsewhere": Case(
        4,
        {
            "actor_generate": Where("0:2", "pp2"),
            "ref_logprob": Where("0:2", "dp2", rows(4)),
            "reward_score": Where("0:2", "dp2", rows(4)),
            "other": Where("2:2", "tp2,sp", rows(4)),
        },
        steps_ahead=1,
        shares=False,
    ),
}


OF_PPO = {
    "PPO, dp2": Case(2, training("0:2", "dp2", rows(4))),
    "PPO, values tp2, critic dp2": Case(
        2,
        {
            "critic_train": Where("0:2", "dp2", rows(4, Recompute.FULL)),
            "critic_value": Where("0:2", "tp2", rows(4)),
            "other": Where("0:2", "tp2", rows(4)),
        },
    ),
    "PPO, pp2": Case(2, training("0:2", "pp2", rows(2)) | {"critic_train": Where("0:2", "pp2", rows(2))}, ATTENTION),
}


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunRequest]:
    """Of every case."""
    return requests_of(tmp_path_factory.mktemp("job"), CASES | OF_PPO, _request)


def _request(directory: Path, name: str, case: Case) -> RunRequest:
    job = yaml.safe_load(write_job(directory, num_ranks=case.num_ranks).read_text())
    del job["ppo"]
    adapter = {"rank": 4, "alpha": 6.0, "targets": list(case.targets)}
    job["models"] = {
        "actor": {"path": "policy", "adapter": adapter},
        "ref": {"path": "policy"},
        "reward": {"path": "scores"},
    }
    job["workload"] |= {"response": {"max": MAX_RESPONSE, "fixed": 8}, "batch_size": BATCH}
    if name in OF_PPO:
        job["models"]["critic"] = {"path": "values", "adapter": adapter}
        job |= {"algorithm": "ppo", "ppo": {**PPO, "actor_learning_rate": 3e-3, "critic_learning_rate": 3e-3}}
    else:
        job["workload"]["group_size"] = GROUP
        job |= {"algorithm": "grpo", "grpo": {**SETTINGS, **case.more}, "staleness": case.steps_ahead}
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
    adapter = asked.job.models.actor.adapter
    assert isinstance(adapter, Adapter)
    starts = started(asked)
    judge = AdaptedReference(
        asked.directory / "policy", asked.directory / "scores", settings_of(asked), starts, adapter.scale
    )
    found = judged(run, judge, num_steps=STEPS, batch_size=BATCH, group_size=GROUP)
    compare_adapter(found, run, asked.directory / "policy", judge.actor)
    assert found.beyond(TOLERANCE) == {}


@pytest.mark.slow
@cases("name", OF_PPO, few=1)
def test_adapters_of_actor_and_critic_and_a_scalar_head_learn_what_the_reference_does(
    runs: dict[str, Observed], requests: dict[str, RunRequest], name: str
) -> None:
    run, asked, found = runs[name], requests[name], Distances()
    adapter = asked.job.models.actor.adapter
    assert isinstance(adapter, Adapter)
    judge = AdaptedPPO(
        *(asked.directory / path for path in ("policy", "values", "scores")),
        settings_of_ppo(asked),
        starts={role: started(asked, role) for role in (Role.ACTOR, Role.CRITIC)},
        scale=adapter.scale,
    )
    for step in range(STEPS):
        drawn = drawn_in(run, step, BATCH)
        learnt = judge.step(step, drawn)
        compare_experience_of_ppo(found, run, step, drawn, learnt)
        compare_updates_of_ppo(found, run, step, drawn, learnt)
    compare_adapter(found, run, asked.directory / "policy", judge.actor)
    compare_adapter(found, run, asked.directory / "values", judge.critic, Role.CRITIC)
    assert found.beyond(TOLERANCE) == {}


@pytest.mark.parametrize("name", CASES)
def test_the_reference_has_a_copy_of_its_own_only_where_no_copy_of_the_actor_is(
    requests: dict[str, RunRequest], name: str
) -> None:
    plan = requests[name].plan
    assert (plan.copy_of("ref_logprob") != "ref_logprob") == CASES[name].shares
