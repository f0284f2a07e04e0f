"""What a student learns is what on-policy distillation says, in many layouts, by `tests.reference.distillation`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.planner.plan import layout_and_schedule_rules
from meshwright.profiles.schedule import Schedule
from meshwright.runtime.execution.request import RunRequest
from tests.reference.distillation import DistilledReference
from tests.reference.ppo import weights_of
from tests.runtime.checkpoints import write_checkpoint
from tests.runtime.compared import judged, settings_of
from tests.runtime.observed import Observed
from tests.runtime.plans_by_hand import Where
from tests.runtime.refereed import Runs, request_of, requests_of
from tests.runtime.small_job import VOCAB_SIZE, write_job

STEPS, BATCH, GROUP = 4, 16, 2
TOLERANCE = 1e-4
SETTINGS: dict[str, Any] = {
    "actor_learning_rate": 3e-4,
    "adam_beta2": 0.98,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "entropy_coefficient": 0.01,
    "temperature": 0.8,
    "top_k": 24,
    "seed": 3,
}


@dataclass(frozen=True)
class Case:
    """A plan on so many ranks, the directories of the teachers, and what the job says more; `rewarded`: beside the
    teachers, a reward model pays."""

    num_ranks: int
    where: Mapping[str, Where]
    teachers: tuple[str, ...] = ("large",)
    steps_ahead: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    rewarded: bool = False


def rows(number: int, **more: int) -> Schedule:
    return Schedule(micro_batch_size=number, **more)


CASES = {
    "one rank": Case(1, {"other": Where("0:1", schedule=rows(4))}),
    "tp2, a teacher on pp2": Case(
        2,
        {
            "actor_generate": Where("0:2", "tp2"),
            "teacher_logprob": Where("0:2", "pp2", rows(2)),
            "other": Where("0:2", "tp2,sp", rows(8)),
        },
    ),
    "dp2, two teachers": Case(
        2, {"other": Where("0:2", "dp2", rows(4))}, ("large", "ref"), settings={"teacher_weights": [3.0, 1.0]}
    ),
    "a teacher that streams from elsewhere": Case(
        2,
        {
            "teacher_logprob": Where("1:1", schedule=rows(4, chunk_tokens=4)),
            "actor_generate": Where("0:1"),
            "other": Where("0:1", schedule=rows(4)),
        },
    ),
    "two teachers, one step ahead": Case(
        2,
        {"actor_generate": Where("0:1"), "teacher_logprob": Where("0:1"), "other": Where("1:1", schedule=rows(8))},
        ("large", "ref"),
        steps_ahead=1,
    ),
    "top 5, one rank": Case(1, {"other": Where("0:1", schedule=rows(4))}, settings={"teacher_top_k": 5}),
    "top 5, tp2, a teacher on pp2": Case(
        2,
        {
            "actor_generate": Where("0:2", "tp2"),
            "teacher_logprob": Where("0:2", "pp2", rows(2)),
            "other": Where("0:2", "tp2,sp", rows(8)),
        },
        settings={"teacher_top_k": 5},
    ),
    "top 5, cp2": Case(
        2,
        {"actor_generate": Where("0:2", "dp2"), "other": Where("0:2", "cp2", rows(1))},
        settings={"teacher_top_k": 5},
    ),
    "forward, two teachers on tp2, a student on pp2, one ahead": Case(
        2,
        {
            "actor_generate": Where("0:2", "tp2"),
            "teacher_logprob": Where("0:2", "tp2", rows(2)),
            "teacher_2_logprob": Where("0:2", "dp2", rows(4)),
            "other": Where("0:2", "pp2", rows(2)),
        },
        ("large", "ref"),
        steps_ahead=1,
        settings={"teacher_top_k": 3, "divergence": "forward", "teacher_weights": [3.0, 1.0]},
    ),
    "top 5 beside a reward model, dp2": Case(
        2,
        {"other": Where("0:2", "dp2", rows(4))},
        settings={"teacher_top_k": 5, "distillation_weight": 0.5},
        rewarded=True,
    ),
    "sampled tokens beside a reward model, tp2": Case(
        2,
        {"other": Where("0:2", "tp2", rows(4))},
        settings={"distillation_weight": 0.5, "normalise_by_std": False},
        rewarded=True,
    ),
}


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunRequest]:
    """Of every case; the large teacher is deeper and wider than the student."""
    directory = tmp_path_factory.mktemp("job")
    shape = {"vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4}
    write_checkpoint(directory / "large", "Qwen2", seed=7, tie_word_embeddings=True, **shape)
    with pytest.MonkeyPatch.context() as patch:  # a plan would not shard sequences as short as these
        patch.setattr(layout_and_schedule_rules, "MIN_CONTEXT_TOKENS", 1)
        return requests_of(directory, CASES, _request)


def _request(directory: Path, name: str, case: Case) -> RunRequest:
    job = yaml.safe_load(write_job(directory, num_ranks=case.num_ranks).read_text())
    del job["ppo"]
    paths = dict(zip(("actor", "teacher", "teacher_2"), ("policy", *case.teachers), strict=False))
    job["models"] = {role: {"path": path} for role, path in paths.items()}
    if case.rewarded:
        job["models"]["reward"] = {"path": "scores"}
    job["workload"] |= {"response": {"max": 12, "fixed": 8}, "batch_size": BATCH, "num_epochs": 2, "group_size": GROUP}
    job |= {"algorithm": "distill", "distill": {**SETTINGS, **case.settings}, "staleness": case.steps_ahead}
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
    teachers = [asked.directory / path for path in CASES[name].teachers]
    reward = asked.directory / "scores" if CASES[name].rewarded else None
    judge = DistilledReference(asked.directory / "policy", teachers, settings_of(asked), reward)
    found = judged(run, judge, num_steps=STEPS, batch_size=BATCH, group_size=GROUP)
    found.add_all("weights", run.weights("actor"), weights_of(judge.actor))
    assert found.beyond(TOLERANCE) == {}
    cut = CASES[name].settings.get("teacher_top_k") is not None
    assert {"teacher_logprobs", "policy_loss"} <= found.worst.keys()
    assert ("advantages" in found.worst) == (not cut or CASES[name].rewarded)
    assert ({"teacher_top_logprobs", "distillation_loss"} <= found.worst.keys()) == cut
