"""Runs of dynamic sampling: stopped and resumed, planned again from what they told, ended where nothing is learned."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.planner.analysis.wave_size import with_wave
from meshwright.planner.compile import compile_plan
from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.plan.plan import Plan, read_plan
from meshwright.profiles.stages import GENERATE
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.train import run_plan
from tests.runtime.command import Call
from tests.runtime.rewarded import lines, rewarded, stopped_and_resumed, write_rewarded
from tests.runtime.small_job import OF_TIME, edited_job

SHORT = {"name": "short", "function": "tests.runtime.rewarding:is_short"}
MODULE = ("--allow-module", "tests.runtime.rewarding")


ON_THEIR_OWN = ("actor_generate.pool=0:1", "actor_train.pool=1:1", "actor_logprob.pool=1:1")


def write_sampled(
    directory: Path, reward: dict[str, Any], changes: dict[str, Any] | None = None, /, **sampling: Any
) -> Path:
    path = write_rewarded(directory, reward, **(changes or {}))
    return edited_job(path, "workload", dynamic_sampling=sampling)


def learned(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics but for those that tell how fast a run was."""
    timed = {*OF_TIME, "reward_short_seconds"}
    return [{key: value for key, value in line.items() if key not in timed} for line in found]


@pytest.fixture
def asked(tmp_path: Path) -> RunRequest:
    path = write_sampled(tmp_path, SHORT, acceptance=0.6, num_prompts=3)
    return rewarded(path, tmp_path / "whole", "actor_generate.pool=0:2", steps=4)


@pytest.mark.slow
def test_a_run_that_is_resumed_deals_and_learns_as_if_it_had_not_been_stopped(asked: RunRequest) -> None:
    whole, resumed = stopped_and_resumed(asked)
    assert learned(resumed) == learned(whole)
    assert any(line["waves"] > 2 for line in whole[:2])  # a cursor that counts steps would deal others


@pytest.mark.check_all
def test_a_run_that_draws_a_step_ahead_is_resumed_with_the_groups_that_wait_to_be_trained_on(tmp_path: Path) -> None:
    job = write_sampled(tmp_path, SHORT, {"staleness": 1}, acceptance=0.6, num_prompts=3)
    asked = rewarded(job, tmp_path / "whole", *ON_THEIR_OWN, steps=4)
    assert asked.plan.placement(GENERATE).steps_ahead == 1
    whole, resumed = stopped_and_resumed(asked)
    assert learned(resumed) == learned(whole)
    assert {line["staleness"] for line in whole} == {0.0, 1.0}


@pytest.mark.check_all
def test_groups_that_wait_are_drawn_again_under_another_plan_and_none_is_left_out(tmp_path: Path) -> None:
    fixed = {"grpo": {"actor_learning_rate": 1e-12, "kl_coefficient": 0.0}, "staleness": 1}
    job = write_sampled(tmp_path, SHORT, fixed, acceptance=0.6, num_prompts=3)
    asked = rewarded(job, tmp_path / "whole", *ON_THEIR_OWN, steps=4)
    run_plan(replace(asked, steps=4, checkpoint_every=2))
    shutil.rmtree(asked.out / "checkpoints" / "step-000004")
    whole = lines(asked.out)
    other = rewarded(job, asked.out, "actor_generate.pool=0:2", "actor_train.pool=0:2", steps=4, resume=True)
    assert other.plan.facts.workload == asked.plan.facts.workload
    run_plan(other)
    for one, found in zip(whole, lines(asked.out), strict=True):
        for key in ("response_tokens", "score", "waves", "groups_with_signal", "sampled_tokens", "sampled_score"):
            assert found[key] == one[key]


@pytest.mark.check_all
def test_a_run_that_is_resumed_under_other_waves_is_dealt_the_prompts_that_follow(asked: RunRequest) -> None:
    run_plan(replace(asked, steps=2))
    facts = with_wave(asked.plan.facts, 6)
    plan = compile_plan(facts, cost_model_of(facts))
    assert isinstance(plan, Plan)
    shutil.copytree(asked.out, asked.out.with_name("same"))
    run_plan(replace(asked, out=asked.out.with_name("same"), steps=3, resume=True))
    workload = asked.job.workload.model_copy(update={"dynamic_sampling": facts.workload.dynamic_sampling})
    job = asked.job.model_copy(update={"workload": workload})
    run_plan(replace(asked, plan=plan, job=job, steps=3, resume=True))
    one, other = lines(asked.out.with_name("same"))[2], lines(asked.out)[2]
    assert other["sampled_prompts"] % 6 == 0
    assert other["response_tokens"] == one["response_tokens"]  # the first groups are the same in dealt order
    assert other["actor_grad_norm"] == pytest.approx(one["actor_grad_norm"], rel=1e-4)


@pytest.mark.check_all
def test_a_plan_chooses_its_waves_runs_and_is_planned_again_from_what_the_run_has_told(
    tmp_path: Path, call: Call
) -> None:
    job = write_sampled(tmp_path, SHORT, acceptance=0.5)
    plan, again, out = tmp_path / "plan.json", tmp_path / "again.json", tmp_path / "run"
    assert call("plan", job, "-o", plan).code == 0
    assert call("run", plan, job, "--steps", 3, "--out", out, *MODULE).code == 0
    told = [line["groups_with_signal"] for line in lines(out)]
    assert min(told) < 1
    assert call("plan", job, "--from-trace", out, "-o", again).code == 0
    found = read_plan(again).facts.workload
    assert found.dynamic_sampling is not None
    assert [share for share, _ in found.dynamic_sampling.histogram or ()] == told
    drawn = [line["sampled_tokens"] for line in lines(out)]
    assert found.response_lengths.mean == pytest.approx(sum(drawn) / len(drawn), rel=0.25)
    assert call("run", again, job, "--steps", 1, "--out", tmp_path / "next", *MODULE).code == 0
    refused = call("calibrate", plan, out, "-o", tmp_path / "table.json")
    assert refused.code == 2
    assert "which a correction cannot tell from slow stages" in refused.err


@pytest.mark.slow
def test_a_run_whose_groups_have_no_signal_fails_in_one_sentence(tmp_path: Path, call: Call) -> None:
    alike = {"name": "alike", "function": "tests.runtime.rewarding:indifferent"}
    job, plan = write_sampled(tmp_path, alike, acceptance=0.5, num_prompts=100), tmp_path / "plan.json"
    assert call("plan", job, "-o", plan).code == 0
    found = call("run", plan, job, "--steps", 1, "--out", tmp_path / "run", *MODULE)
    assert found.code == 4
    assert "step 0: 0 of 400 groups have a signal, where a batch needs 4" in found.err
