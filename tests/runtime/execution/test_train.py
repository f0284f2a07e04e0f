"""A run: the plan changes nothing but time, and a run that was stopped goes on as if it had not been."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.planner.job.job import read_job, resolve
from meshwright.profiles.errors import BadInput
from meshwright.profiles.schedule import Offload, Schedule
from meshwright.profiles.trace import read_spans
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.run import RankRun
from meshwright.runtime.execution.train import run_plan
from tests.runtime.checkpoints import edit_config, name_end_tokens
from tests.runtime.plans_by_hand import Where, plan_by_hand
from tests.runtime.ranks import run_on_ranks
from tests.runtime.small_job import OF_TIME, VOCAB_SIZE, request, write_job

pytestmark = pytest.mark.slow

STEPS = 3
TOLERANCE = 1e-4
FIELDS = ("tokens", "behaviour_logprobs", "proximal_logprobs", "ref_logprobs", "values", "scores")
FOUR_RANKS = (
    "actor_train.layout=tp2,dp2",
    "actor_generate.layout=tp1,pp2,dp2",
    "actor_logprob.layout=tp2,pp2",
    "ref_logprob.layout=tp2,sp",
    "critic_train.layout=pp2,dp2",
    "critic_train.recompute=full",
    "critic_value.layout=tp2,sp",
    "reward_score.layout=dp4",
)

Held = dict[str, dict[int, Tensor]]


def experience_of_steps(asked: RunRequest) -> list[Held]:
    """Per step, what this rank holds of the experience."""
    run = RankRun(asked)
    run.recorder.open(0)
    held = []
    for turn in run.periods:
        experience = run.run_period(turn).experience
        if turn in run.steps:
            rows = {field: {row: experience.get(field, row) for row in experience.rows(field)} for field in FIELDS}
            held.append(rows)
    run.finish()
    run.close()
    return held


def run_steps(asked: RunRequest) -> tuple[list[Held], list[dict[str, Any]]]:
    """Per step, the experience of all ranks together and the metrics."""
    asked.out.mkdir(parents=True)
    of_ranks = run_on_ranks(asked.plan.facts.cluster.num_ranks, experience_of_steps, asked, timeout=300)
    steps: list[Held] = [{field: {} for field in FIELDS} for _ in range(asked.steps)]
    for held in of_ranks:
        for step, fields in enumerate(held):
            for field, rows in fields.items():
                steps[step][field] |= rows
    return steps, read_lines(asked.out / "metrics.jsonl")


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("job")


@pytest.fixture(scope="module")
def one_rank(directory: Path) -> tuple[list[Held], list[dict[str, Any]]]:
    return run_steps(request(write_job(directory, num_ranks=1), directory / "one", steps=STEPS))


@pytest.fixture(scope="module")
def four_ranks(directory: Path) -> tuple[list[Held], list[dict[str, Any]]]:
    return run_steps(request(write_job(directory, num_ranks=4), directory / "four", *FOUR_RANKS, steps=STEPS))


@pytest.mark.check_all
def test_four_ranks_in_six_layouts_hold_the_experience_of_one_rank(
    one_rank: tuple[list[Held], Any], four_ranks: tuple[list[Held], Any]
) -> None:
    for one, four in zip(one_rank[0], four_ranks[0], strict=True):
        for field in FIELDS:
            assert sorted(one[field]) == sorted(four[field]) == list(range(16))
            for row in range(16):
                torch.testing.assert_close(four[field][row], one[field][row], atol=TOLERANCE, rtol=0)


@pytest.mark.check_all
def test_four_ranks_in_six_layouts_have_the_losses_of_one_rank(
    one_rank: tuple[Any, list[dict[str, Any]]], four_ranks: tuple[Any, list[dict[str, Any]]]
) -> None:
    assert len(one_rank[1]) == len(four_ranks[1]) == STEPS
    for one, four in zip(one_rank[1], four_ranks[1], strict=True):
        for name in one.keys() - OF_TIME:
            assert four[name] == pytest.approx(one[name], abs=TOLERANCE), name


@pytest.mark.check_all
def test_the_weights_move_so_that_agreement_means_something(one_rank: tuple[list[Held], Any]) -> None:
    first, last = one_rank[0][0], one_rank[0][-1]
    apart = [(last["proximal_logprobs"][r] - last["ref_logprobs"][r]).abs().max() for r in range(16)]
    together = [(first["proximal_logprobs"][r] - first["ref_logprobs"][r]).abs().max() for r in range(16)]
    assert max(together) < 1e-5
    assert max(apart) > 100 * TOLERANCE


@pytest.mark.check_all
def test_the_first_update_starts_from_the_policy_that_sampled(
    one_rank: tuple[list[Held], list[dict[str, Any]]],
) -> None:
    for step in one_rank[0]:
        for row in range(16):
            response = step["behaviour_logprobs"][row] != 0
            gap = (step["behaviour_logprobs"][row] - step["proximal_logprobs"][row])[response]
            assert float(gap.abs().max()) < 1e-4


def test_a_resumed_run_equals_one_that_was_never_stopped(directory: Path) -> None:
    path = write_job(directory, num_ranks=2)
    job = read_job(path)
    away = Schedule(micro_batch_size=4, offload=Offload.OPTIMIZER)
    where = {
        "other": Where("0:2", "dp2"),
        "actor_train": Where("0:2", "dp2", away),
        "critic_train": Where("1:1", schedule=away),
        "ref_logprob": Where("0:1", schedule=replace(away, offload=Offload.WEIGHTS)),
    }
    plan = plan_by_hand(resolve(job, directory), where)
    whole = RunRequest(plan=plan, job=job, directory=directory, out=directory / "whole", steps=3)
    parts = replace(whole, out=directory / "parts", steps=2)
    run_plan(whole)
    run_plan(parts)
    summary = run_plan(replace(parts, steps=3, resume=True))
    assert {s.instruction for s in read_spans(whole.out / "trace.jsonl") if "reload_seconds" in s.facts} == {
        "actor_train",
        "critic_train",
        "ref_logprob",
    }
    for one, other in zip(
        read_lines(whole.out / "metrics.jsonl"), read_lines(parts.out / "metrics.jsonl"), strict=True
    ):
        for name in one.keys() - OF_TIME:
            assert other[name] == pytest.approx(one[name], abs=1e-6), name
    assert summary is not None
    assert [evaluation.step for evaluation in summary.evaluations] == [0, 2, 3]
    spans = read_spans(parts.out / "trace.jsonl")
    ends = [max(s.end_seconds for s in spans if s.step == step and s.kind == "stage") for step in range(3)]
    assert ends == sorted(ends)


def moved_by_a_step(asked: RunRequest) -> dict[str, float]:
    """How far a step moves the weights of each trainer."""
    run = RankRun(asked)
    run.recorder.open(run.steps.start)
    trained = {name: copy.trainer.model for name, copy in run.copies.items() if copy.trainer is not None}
    before = {name: [p.detach().clone() for p in model.parameters()] for name, model in trained.items()}
    for turn in run.periods:
        run.run_period(turn)
    run.finish()
    run.close()
    return {
        name: max(float((p.detach() - b).abs().max()) for p, b in zip(model.parameters(), before[name], strict=True))
        for name, model in trained.items()
    }


def test_a_resumed_run_trains_as_its_job_says_now(directory: Path, tmp_path: Path) -> None:
    asked = request(write_job(directory, num_ranks=1), tmp_path / "out", steps=1)
    run_plan(asked)
    ppo = asked.job.settings.model_copy(update={"actor_learning_rate": 1e-9})
    changed = replace(asked, job=asked.job.model_copy(update={"ppo": ppo}), steps=2, resume=True)
    [moved] = run_on_ranks(1, moved_by_a_step, changed)
    assert 0 < moved["actor_train"] < 1e-7
    assert moved["critic_train"] > 1e-4
    other_seed = changed.job.model_copy(update={"ppo": ppo.model_copy(update={"seed": 1})})
    with pytest.raises(
        BadInput, match=r"--resume: ppo\.seed is 0 in the run so far and 1 in the job, and cannot change"
    ):
        run_plan(replace(changed, job=other_seed))


def test_a_run_samples_and_stops_as_its_job_says(tmp_path: Path) -> None:
    """Only the likeliest token is drawn, which is no less likely than the mean one, and the first word ends a response
    that is then not cut off."""
    job = write_job(tmp_path, num_ranks=1, top_k=1, stop=["w"])
    held, lines = run_steps(request(job, tmp_path / "run", steps=1))
    assert all(values.min() >= -math.log(VOCAB_SIZE) for values in held[0]["behaviour_logprobs"].values())
    assert lines[0]["response_tokens"] <= 2
    assert lines[0]["truncated_fraction"] == 0


def test_every_end_token_that_the_actor_names_ends_a_response(tmp_path: Path) -> None:
    """Half of the vocabulary is named in one file, half in the other."""
    job = write_job(tmp_path, num_ranks=1)
    name_end_tokens(tmp_path / "actor", *range(VOCAB_SIZE // 2))
    edit_config(tmp_path / "actor", eos_token_id=list(range(VOCAB_SIZE // 2, VOCAB_SIZE)))
    _, lines = run_steps(request(job, tmp_path / "run", steps=1))
    assert lines[0]["response_tokens"] == 1
    assert lines[0]["truncated_fraction"] == 0
    ends = json.loads((tmp_path / "run" / "summary.json").read_text())["ends"]
    assert len(ends["tokens"]) == VOCAB_SIZE
    assert ends["tokens"]["1"] == "<eos>"
