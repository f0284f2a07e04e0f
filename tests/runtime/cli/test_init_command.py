"""The init command: a job that can be planned as it is, in a new file."""

from __future__ import annotations

import shutil
from pathlib import Path

from meshwright.planner.job.job import read_job
from tests.runtime.command import Call

MODEL = Path(__file__).parents[3] / "examples/models/llama-2-7b"
NUMBERS = ("--device", "h100-sxm", "--batch", 64, "--prompt", 128, "--response", 128)


def test_a_first_job_is_planned_as_it_is(call: Call, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    outcome = call("init", MODEL, *NUMBERS, "-o", job)
    assert outcome.code == 0
    assert f"meshwright plan {job}" in outcome.out
    assert call("plan", job, "--gap", 0.5, "-o", tmp_path / "plan.json").code == 0


def test_a_price_goes_to_the_command_that_plans_the_job(call: Call, tmp_path: Path) -> None:
    job, plan = tmp_path / "job.yaml", tmp_path / "plan.json"
    outcome = call("init", MODEL, *NUMBERS, "--price", 2.5, "-o", job)
    assert outcome.out == f"{job}; next: meshwright plan {job} -o {plan} --price 2.5\n"
    outcome = call("init", MODEL, *NUMBERS, "--price", -1, "-o", tmp_path / "other.yaml")
    assert (outcome.code, list(tmp_path.iterdir())) == (2, [job])
    assert "--price -1 is out of range" in outcome.err


def test_nothing_is_overwritten(call: Call, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("mine")
    outcome = call("init", MODEL, *NUMBERS, "-o", job)
    assert (outcome.code, job.read_text()) == (2, "mine")
    assert "overwrites nothing" in outcome.err


def test_a_job_that_cannot_be_is_not_written(call: Call, tmp_path: Path) -> None:
    outcome = call("init", MODEL, *NUMBERS, "--gpus", 12, "-o", tmp_path / "job.yaml")
    assert outcome.code == 2
    assert "12 devices are not whole nodes of 8" in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_weights_of_a_language_model_give_a_reward_model_its_shape(call: Call, tmp_path: Path) -> None:
    shutil.copy(MODEL / "config.json", tmp_path / "config.json")
    (tmp_path / "model.safetensors").touch()  # as in a downloaded directory
    job = tmp_path / "job.yaml"
    assert call("init", tmp_path, *NUMBERS, "-o", job).code == 0
    written = read_job(job)
    assert written.models.reward is not None
    assert (written.models.actor.path, written.models.reward.path) == (".", "config.json")
    assert "`meshwright run` needs a model with a scalar head" in job.read_text()
