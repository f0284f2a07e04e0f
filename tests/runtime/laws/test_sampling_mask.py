"""A run that keeps sampling masks learns what the float64 references say of the distributions over the kept sets."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from meshwright.planner.plan import layout_and_schedule_rules
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import KEPT_COUNTS, KEPT_TOKENS, Role
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.train import run_plan
from tests.reference.critic_free import CriticFreeReference
from tests.reference.distillation import DistilledReference
from tests.reference.ppo import Reference, weights_of
from tests.runtime.compared import judged, settings_of
from tests.runtime.laws.test_reference import compare_experience_of_ppo, compare_updates_of_ppo, settings_of_ppo
from tests.runtime.laws.test_tool_turns import THIRD, written
from tests.runtime.observed import Observed
from tests.runtime.plans_by_hand import Where
from tests.runtime.refereed import Distances, Runs, drawn_in, request_of, requests_of
from tests.runtime.rewarded import lines, rewarded, stopped_and_resumed, write_rewarded
from tests.runtime.small_job import edited_job, write_job
from tests.seeds import cases

STEPS, BATCH, GROUP, MAX_RESPONSE, KEPT = 3, 16, 4, 12, 16
TOLERANCE = 1e-4

SETTINGS: dict[str, Any] = {
    "actor_learning_rate": 3e-4,
    "adam_beta2": 0.98,
    "max_grad_norm": 0.5,
    "entropy_coefficient": 0.01,
    "temperature": 0.8,
    "top_k": 12,
    "top_p": 0.8,
    "seed": 3,
}
"""The filters leave a few of the 32 tokens, so that distributions over sets differ much from those over all tokens."""

PPO: dict[str, Any] = {
    "critic_learning_rate": 1e-3,
    "actor_schedule": {"warmup_steps": 2, "decay": "cosine", "decay_steps": 24},
    "reward_clip": 0.8,
    "kl_coefficient": 0.2,
}


@dataclass(frozen=True)
class Case:
    """A plan on so many ranks, an algorithm and its settings that differ from the others'."""

    num_ranks: int
    where: Mapping[str, Where]
    algorithm: str = "grpo"
    steps_ahead: int = 0
    staleness: int = 0
    old_logprobs: str = "recompute"
    settings: Mapping[str, Any] = field(default_factory=dict)


def rows(number: int) -> Schedule:
    return Schedule(micro_batch_size=number)


ONE_RANK = {"other": Where("0:1", schedule=rows(4))}
DP2 = {"other": Where("0:2", "dp2", rows(4))}
PP2 = {"other": Where("0:2", "pp2", rows(2))}
TP2 = {"other": Where("0:2", "tp2,sp", rows(8)), "actor_generate": Where("0:2", "tp2")}
CP2 = {"other": Where("0:2", "cp2", rows(1)), "actor_generate": Where("0:2", "dp2"), "reward_score": DP2["other"]}
AHEAD = {"actor_generate": Where("0:1"), "reward_score": Where("0:1"), "other": Where("1:1", schedule=rows(8))}
IN_FLIGHT = {
    **AHEAD,
    "actor_generate": Where("0:1", schedule=Schedule(generation_slots=8, batches_in_flight=2)),
}
KL = {"kl_coefficient": 0.2}
CASES = {
    "tp2": Case(2, TP2, settings=KL),
    "one rank": Case(1, ONE_RANK, settings=KL),
    "pp2": Case(2, PP2, settings=KL),
    "dp2": Case(2, DP2, settings=KL),
    "tp2 pp2": Case(4, {"other": Where("0:4", "tp2,pp2", rows(4))}, settings=KL),
    "PPO, tp2": Case(2, TP2, "ppo", settings=PPO),
    "PPO, pp2, log-probabilities of the generator": Case(2, PP2, "ppo", old_logprobs="generator", settings=PPO),
    "RLOO, dp2": Case(2, DP2, "rloo", settings=KL),
    "distillation": Case(1, ONE_RANK, "distill"),
    "one step ahead": Case(2, AHEAD, steps_ahead=1, staleness=1, settings=KL),
    "two batches in flight": Case(2, IN_FLIGHT, steps_ahead=1, staleness=2, settings=KL),
    "cp2": Case(2, CP2, settings=KL),
    "log-probabilities of the training pass": Case(2, TP2, old_logprobs="training", settings=KL),
}
MODELS = {
    "grpo": {"actor": "policy", "ref": "ref", "reward": "scores"},
    "rloo": {"actor": "policy", "ref": "ref", "reward": "scores"},
    "ppo": {"actor": "policy", "critic": "values", "ref": "ref", "reward": "scores"},
    "distill": {"actor": "policy", "teacher": "ref"},
}


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunRequest]:
    """The request of every case."""
    with pytest.MonkeyPatch.context() as patch:  # a plan would not cut sequences as short as these
        patch.setattr(layout_and_schedule_rules, "MIN_CONTEXT_TOKENS", 1)
        return requests_of(tmp_path_factory.mktemp("job"), CASES, _request)


def _request(directory: Path, name: str, case: Case) -> RunRequest:
    job = yaml.safe_load(write_job(directory, num_ranks=case.num_ranks).read_text())
    del job["ppo"]
    job["models"] = {role: {"path": path} for role, path in MODELS[case.algorithm].items()}
    job["workload"] |= {
        "response": {"max": MAX_RESPONSE, "fixed": 8},
        "batch_size": BATCH,
        "group_size": 1 if case.algorithm == "ppo" else GROUP,
        "num_minibatches": 1 if case.old_logprobs == "training" else 2,
        "kept_tokens": KEPT,
    }
    job |= {
        "algorithm": case.algorithm,
        case.algorithm: {**SETTINGS, **case.settings},
        "staleness": case.staleness,
        "old_logprobs": case.old_logprobs,
    }
    return request_of(job, directory, name, case.where, steps=STEPS, steps_ahead=case.steps_ahead)


@pytest.fixture(scope="module")
def runs(requests: dict[str, RunRequest]) -> dict[str, Observed]:
    return Runs(requests)


@cases("name", CASES, few=1)
def test_a_run_learns_what_the_reference_does_over_the_kept_sets(
    runs: dict[str, Observed], requests: dict[str, RunRequest], name: str
) -> None:
    run, asked, case = runs[name], requests[name], CASES[name]
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


def _judged_ppo(run: Observed, asked: RunRequest, paths: Mapping[Role, Path]) -> tuple[Distances, torch.nn.Module]:
    judge, found = Reference(*(paths[role] for role in asked.job.models.roles), settings_of_ppo(asked)), Distances()
    recomputes = asked.plan.facts.old_logprobs == "recompute"
    for step in range(STEPS):
        drawn = drawn_in(run, step, BATCH)
        learnt = judge.step(step, drawn)
        compare_experience_of_ppo(found, run, step, drawn, learnt, recomputes=recomputes)
        compare_updates_of_ppo(found, run, step, drawn, learnt)
    found.add_all("critic weights", run.weights("critic"), weights_of(judge.critic))
    return found, judge.actor


@cases("name", CASES, few=1)
def test_every_sampled_token_is_in_its_set_and_no_set_is_larger_than_top_k(
    runs: dict[str, Observed], name: str
) -> None:
    fields, sizes = runs[name].steps[0], []
    for row in range(BATCH):
        tokens, counts = fields["tokens"][row], fields[KEPT_COUNTS][row].tolist()
        num_prompt = int(fields["prompt_lengths"][row])
        sets = fields[KEPT_TOKENS][row].split(counts)
        assert counts[: num_prompt - 1] == [0] * (num_prompt - 1)
        assert counts[-1] == 0  # the last position predicts no token
        for position in range(num_prompt - 1, len(tokens) - 1):
            assert int(tokens[position + 1]) in sets[position].tolist()
            sizes.append(counts[position])
    assert min(sizes) >= 1
    assert max(sizes) <= SETTINGS["top_k"]
    assert len(set(sizes)) > 2  # top_p leaves sets of several sizes


MASKED = {"grpo": {"actor_learning_rate": 3e-3, "kl_coefficient": 0.0, "top_k": KEPT, "top_p": 0.8}}
APART = ("actor_generate.pool=0:1", "actor_train.pool=1:1")


@pytest.mark.check_all
@pytest.mark.parametrize("has_turns", [False, True])
def test_a_run_with_batches_in_flight_goes_on_with_the_sets_that_it_had_sampled_from(
    tmp_path: Path, has_turns: bool
) -> None:
    """But for the last bits of sums; with turns, sequences wait for tools when the run is stopped."""
    if has_turns:
        path = written(tmp_path, staleness=1, workload={"kept_tokens": KEPT}, **MASKED)
    else:
        path = edited_job(write_rewarded(tmp_path, THIRD, staleness=2, **MASKED), "workload", kept_tokens=KEPT)
    pins = *APART, "actor_generate.layout=tp1,pp1,dp1", "actor_generate.batches_in_flight=2"
    whole, resumed = stopped_and_resumed(rewarded(path, tmp_path / "whole", *pins, steps=4))
    for key in ("score", "actor_grad_norm", "ratio"):
        assert [line[key] for line in whole] == pytest.approx([line[key] for line in resumed], rel=1e-5)


@pytest.mark.check_all
def test_sets_move_to_another_plan_with_their_samples(tmp_path: Path) -> None:
    """A run that sampled one step ahead goes on on one rank after another, and learns the same."""
    path = edited_job(write_rewarded(tmp_path, THIRD, staleness=1, **MASKED), "workload", kept_tokens=KEPT)
    first = replace(rewarded(path, tmp_path / "first", *APART, steps=4), checkpoint_every=2, keep=4)
    run_plan(first)
    out = tmp_path / "then"
    shutil.copytree(first.out, out)
    shutil.rmtree(out / "checkpoints" / "step-000004")
    pins = "actor_generate.pool=1:1", "actor_train.pool=0:1"
    run_plan(replace(rewarded(path, out, *pins, steps=4), resume=True))
    for line, known in zip(lines(out), lines(first.out), strict=True):
        for key in ("score", "actor_grad_norm", "ratio"):
            assert line[key] == pytest.approx(known[key], abs=TOLERANCE)
