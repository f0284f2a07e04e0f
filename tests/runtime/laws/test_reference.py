"""What a run learns is what PPO says: runs in many layouts against `tests.reference.ppo`, which knows none of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from meshwright.profiles.schedule import Schedule
from meshwright.runtime.execution.request import RunRequest
from tests.reference import ppo
from tests.reference.ppo import Learnt, Reference, Row, Settings
from tests.runtime.observed import Observed
from tests.runtime.plans_by_hand import Where
from tests.runtime.refereed import END_TOKENS, Distances, Runs, drawn_in, request_of, requests_of
from tests.runtime.small_job import write_job

STEPS, BATCH, MAX_RESPONSE = 10, 16, 12
TOLERANCE = 1e-4

PPO: dict[str, Any] = {
    "actor_learning_rate": 3e-4,
    "critic_learning_rate": 1e-3,
    "actor_schedule": {"warmup_steps": 3, "decay": "cosine", "decay_steps": 24},
    "adam_beta2": 0.98,
    "reward_scale": 1.5,
    "reward_clip": 0.8,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "kl_coefficient": 0.2,
    "gamma": 0.98,
    "entropy_coefficient": 0.01,
    "temperature": 0.8,
    "top_k": 24,
    "top_p": 0.9,
    "seed": 3,
}
BOOTSTRAP = {"truncation": "bootstrap"}


@dataclass(frozen=True)
class Case:
    """A plan on so many ranks, and the settings that differ from the others'."""

    num_ranks: int
    where: Mapping[str, Where]
    steps_ahead: int = 0
    staleness: int = 0
    ppo: Mapping[str, Any] = field(default_factory=dict)


def rows(number: int) -> Schedule:
    return Schedule(micro_batch_size=number)


CASES = {
    "one rank": Case(1, {"other": Where("0:1", schedule=rows(4))}),
    "tp2": Case(2, {"other": Where("0:2", "tp2,sp", rows(8)), "actor_generate": Where("0:2", "tp2")}, ppo=BOOTSTRAP),
    "pp2": Case(2, {"other": Where("0:2", "pp2", rows(2))}),
    "pp2, the critic alone for two steps": Case(
        2, {"other": Where("0:2", "pp2", rows(2))}, ppo={"critic_warmup_steps": 2}
    ),
    "dp2": Case(2, {"other": Where("0:2", "dp2", rows(4))}, ppo=BOOTSTRAP),
    "tp2 pp2": Case(4, {"other": Where("0:4", "tp2,pp2", rows(4))}, ppo={"missing_end_penalty": 0.5}),
    "one step ahead": Case(
        2,
        {"actor_generate": Where("0:1"), "reward_score": Where("0:1"), "other": Where("1:1", schedule=rows(8))},
        steps_ahead=1,
        staleness=1,
    ),
    "one step ahead, two batches in flight": Case(
        4,
        {
            "actor_generate": Where("0:2", "dp2", Schedule(generation_slots=8, batches_in_flight=2)),
            "reward_score": Where("0:2", "tp2", rows(8)),
            "actor_train": Where("2:2", "tp2", rows(4)),
            "other": Where("2:2", "dp2", rows(4)),
        },
        steps_ahead=1,
        staleness=2,
        ppo={**BOOTSTRAP, "importance_cap": 1.1},
    ),
}


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunRequest]:
    """Of every case; four models that all differ."""
    return requests_of(tmp_path_factory.mktemp("job"), CASES, _request)


def _request(directory: Path, name: str, case: Case) -> RunRequest:
    job = yaml.safe_load(write_job(directory, num_ranks=case.num_ranks, **{**PPO, **case.ppo}).read_text())
    paths = {"actor": "policy", "critic": "values", "ref": "ref", "reward": "scores"}
    job["models"] = {role: {"path": path} for role, path in paths.items()}
    job["workload"] |= {"response": {"max": MAX_RESPONSE, "fixed": 8}, "batch_size": BATCH, "num_epochs": 2}
    job["staleness"] = case.staleness
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
    models = (asked.directory / asked.job.models.source(role).path for role in asked.job.models.roles)
    judge = Reference(*models, settings_of_ppo(asked))
    found = Distances()
    for step in range(STEPS):
        drawn = drawn_in(run, step, BATCH)
        learnt = judge.step(step, drawn)
        compare_experience_of_ppo(found, run, step, drawn, learnt)
        warmup_steps = judge.settings.critic_warmup_steps
        compare_updates_of_ppo(found, run, step, drawn, learnt, warmup_steps=warmup_steps)
    for role, model in (("actor", judge.actor), ("critic", judge.critic)):
        found.add_all(f"{role} weights", run.weights(role), ppo.weights_of(model))
    assert found.beyond(TOLERANCE) == {}


PER_TOKEN = {
    "behaviour_logprobs": "behaviour",
    "proximal_logprobs": "proximal",
    "ref_logprobs": "ref",
    "values": "values",
}
"""Fields of the experience, and what the reference calls them."""


def compare_experience_of_ppo(
    found: Distances, run: Observed, step: int, drawn: Sequence[Row], learnt: Learnt, *, recomputes: bool = True
) -> None:
    """Notes how far the experience of a step is from the reference's; the actor `recomputes` its log-probabilities
    unless the job takes them from elsewhere."""
    held = run.steps[step]
    assert [bool(held["truncated"][row]) for row in range(len(drawn))] == learnt.cut
    assert learnt.draws_explained > 0.99
    if "scores" in held:  # what hosts score is in no field: see the advantages
        found.add("scores", torch.cat([held["scores"][row] for row in range(len(drawn))]), torch.stack(learnt.scores))
    assert ("proximal_logprobs" in held) == recomputes
    for name, known in PER_TOKEN.items():
        if name == "proximal_logprobs" and not recomputes:
            continue
        of_responses = [held[name][index][row.num_prompt - 1 : -1] for index, row in enumerate(drawn)]
        found.add(name, torch.cat(of_responses), torch.cat(getattr(learnt, known)))


def compare_updates_of_ppo(
    found: Distances, run: Observed, step: int, drawn: Sequence[Row], learnt: Learnt, *, warmup_steps: int = 0
) -> None:
    """In so many steps to warm the critic up the actor has no updates."""
    count = len(learnt.minibatches)
    for stage, expected in (("actor_train", learnt.actor_updates), ("critic_train", learnt.critic_updates)):
        if not expected:
            continue
        first = (step - (warmup_steps if stage == "actor_train" else 0)) * count
        updates = run.updates[stage][first : first + count]
        for metric in expected[0]:
            # In fp32 approx_kl, a difference of numbers near 1, is known to some 1e-8 however small it is; and with one
            # update of whitened advantages the loss is 0.
            floor = 1e-3 if metric in ("approx_kl", "policy_loss") else 0.0
            of_step = torch.tensor([known[metric] for known in expected], dtype=torch.float64) + floor
            said = torch.tensor([update.metrics[metric] for update in updates], dtype=torch.float64) + floor
            found.add(f"{stage} {metric}", said, of_step)
        for update, chosen in zip(updates, learnt.minibatches, strict=True):
            given = [update.given[tuple(drawn[index].ids.tolist())] for index in chosen]
            assert len(update.given) == len(chosen)
            for name in {"advantages", "returns", "weights"} & given[0].keys():
                found.add(
                    name, torch.cat([of_row[name] for of_row in given]), ppo.picked(getattr(learnt, name), chosen)
                )


def settings_of_ppo(asked: RunRequest) -> Settings:
    workload, own = asked.job.workload, asked.job.settings
    return Settings(
        **{name: getattr(own, name) for name in Settings.__annotations__ if hasattr(own, name)},
        warmup_steps=own.actor_schedule.warmup_steps,
        cosine_steps=own.actor_schedule.decay_steps,
        num_minibatches=workload.num_minibatches,
        num_epochs=workload.num_epochs,
        max_response=workload.response.max,
        end_tokens=frozenset(END_TOKENS),
        decoupled=asked.plan.staleness > 0,
        old_logprobs=asked.plan.facts.old_logprobs,
        kept_tokens=workload.kept_tokens,
    )


@pytest.mark.check_all
def test_the_runs_met_all_that_they_are_compared_in(runs: dict[str, Observed]) -> None:
    for name, run in runs.items():
        drawn = [drawn_in(run, step, BATCH) for step in range(STEPS)]
        ends = [
            int(row.ids[-1]) for of_step in drawn for row in of_step if len(row.ids) - row.num_prompt < MAX_RESPONSE
        ]
        assert set(ends) == set(END_TOKENS)
        assert 0.2 < 1 - len(ends) / (STEPS * BATCH) < 0.8
        ages = {step - version for step, of_step in enumerate(drawn) for row in of_step for version in row.versions}
        assert ages == set(range(CASES[name].staleness + 1))
        weights = [
            of["weights"] for update in run.updates["actor_train"] for of in update.given.values() if "weights" in of
        ]
        assert bool(weights) == (CASES[name].staleness > 0)
        assert not weights or torch.cat(weights).std() > 0.001
