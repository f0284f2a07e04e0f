"""Runs that train on the best of several samples: stopped, resumed, planned again and corrected by what they told."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.planner.plan.plan import read_plan
from meshwright.profiles.stages import GENERATE
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.train import run_plan
from tests.runtime.command import Call
from tests.runtime.laws.test_sampled_runs import MODULE, ON_THEIR_OWN, SHORT, learned
from tests.runtime.rewarded import lines, rewarded, stopped_and_resumed, write_rewarded
from tests.runtime.small_job import edited_job


def write_best(directory: Path, best_of: int = 6) -> Path:
    return edited_job(write_rewarded(directory, SHORT), "workload", group_size=2, best_of=best_of)


@pytest.fixture
def asked(tmp_path: Path) -> RunRequest:
    return rewarded(write_best(tmp_path), tmp_path / "whole", "actor_generate.pool=0:2", steps=4)


@pytest.mark.slow
def test_a_run_that_is_resumed_keeps_and_learns_as_if_it_had_not_been_stopped(asked: RunRequest) -> None:
    whole, resumed = stopped_and_resumed(asked)
    assert learned(resumed) == learned(whole)
    assert any(line["tied_prompts"] for line in whole)


@pytest.mark.check_all
def test_a_run_that_is_resumed_under_another_plan_keeps_the_same_samples(asked: RunRequest) -> None:
    pins = ("actor_generate.pool=0:1", "actor_train.pool=1:1")
    other = rewarded(asked.directory / "edited.yaml", asked.out, *pins, steps=3, resume=True)
    assert other.plan != asked.plan
    run_plan(replace(asked, steps=2))
    shutil.copytree(asked.out, asked.out.with_name("same"))
    run_plan(replace(asked, out=asked.out.with_name("same"), steps=3, resume=True))
    run_plan(other)
    one, found = lines(asked.out.with_name("same"))[2], lines(asked.out)[2]
    for key in ("score", "sampled_score", "sampled_tokens", "response_tokens", "tied_prompts"):
        assert found[key] == one[key]
    assert found["actor_grad_norm"] == pytest.approx(one["actor_grad_norm"], rel=1e-4)


@pytest.mark.check_all
def test_a_run_corrects_a_table_and_lengths_and_goes_on_with_as_many_samples_alone(tmp_path: Path, call: Call) -> None:
    job, plan, out = write_best(tmp_path), tmp_path / "plan.json", tmp_path / "run"
    planned = call("plan", job, "-o", plan)
    assert planned.code == 0
    assert "6 samples of each of 8 prompts are generated and scored, and the best 2 are trained on" in planned.out
    assert call("run", plan, job, "--steps", 3, "--out", out, *MODULE).code == 0
    drawn = [line["sampled_tokens"] for line in lines(out)]
    assert call("plan", job, "--from-trace", out, "-o", tmp_path / "again.json").code == 0
    again = read_plan(tmp_path / "again.json").facts.workload
    assert again.best_of == 6
    assert again.response_lengths.mean == pytest.approx(sum(drawn) / len(drawn), rel=0.25)
    assert call("calibrate", plan, out, "-o", tmp_path / "table.json").code == 0
    more = edited_job(job, "workload", best_of=8)
    assert call("plan", more, "-o", tmp_path / "more.json").code == 0
    refused = call("run", tmp_path / "more.json", more, "--steps", 4, "--out", out, "--resume", *MODULE)
    assert refused.code == 2
    assert "workload.best_of is 6 in the run so far and 8 in the job, and cannot change" in refused.err


@pytest.mark.check_all
def test_a_run_that_draws_a_step_ahead_is_resumed_with_the_samples_that_wait_to_be_trained_on(tmp_path: Path) -> None:
    job = write_best(tmp_path)
    job.write_text(job.read_text() + "staleness: 1\n")
    asked = rewarded(job, tmp_path / "whole", *ON_THEIR_OWN, steps=4)
    assert asked.plan.placement(GENERATE).steps_ahead == 1
    whole, resumed = stopped_and_resumed(asked)
    assert learned(resumed) == learned(whole)
