"""The export command: what starts a plan elsewhere, written into a new directory and for the plan's own job."""

from __future__ import annotations

import json
from pathlib import Path

from tests.runtime.command import Call
from tests.runtime.small_job import edited_job


def test_an_export_of_a_plan_for_another_job_or_into_a_directory_that_exists_is_refused(
    call: Call, job: Path, plan: Path, tmp_path: Path
) -> None:
    other = edited_job(job, "workload", batch_size=32)
    outcome = call("export", plan, other, "--to", "slurm", "-o", tmp_path / "scripts")
    assert (outcome.code, outcome.out) == (2, "")
    assert "made for another job: workload.batch_size is " in outcome.err
    outcome = call("export", plan, job, "--to", "slurm", "-o", tmp_path)
    assert outcome.code == 2
    assert "overwrites nothing" in outcome.err
    outcome = call("export", plan, job, "--to", "slurm", "-o", tmp_path / "scripts", "--json")
    assert json.loads(outcome.out) == {"scripts": [str(tmp_path / "scripts" / "run.sbatch")]}
    assert (tmp_path / "scripts" / "run.sbatch").stat().st_mode & 0o111


def test_a_target_takes_only_what_it_can_use(call: Call, job: Path, plan: Path, tmp_path: Path) -> None:
    """A run for hf, a plan and its job for scripts; ranks are of hf alone."""

    def said(*arguments: object) -> str:
        outcome = call("export", *arguments, "-o", tmp_path / "new")
        assert (outcome.code, outcome.out) == (2, "")
        assert not (tmp_path / "new").exists()
        return outcome.err

    assert "is not the directory of a run" in said(plan, "--to", "hf")
    assert "a run knows its job" in said(tmp_path, job, "--to", "hf")
    assert "needs the job too" in said(plan, "--to", "slurm")
    assert "is for hf alone" in said(plan, job, "--to", "slurm", "--ranks", 2)


def test_models_elsewhere_are_in_a_script_and_in_the_configuration_of_a_trainer(
    call: Call, job: Path, plan: Path, tmp_path: Path
) -> None:
    models = ("--model", "actor=/data/my actor")
    assert call("export", plan, job, "--to", "k8s", "-o", tmp_path / "scripts", *models).code == 0
    assert "MODELS=(--model 'actor=/data/my actor')" in (tmp_path / "scripts" / "jobset.sh").read_text()
    assert str(job.parent) not in (tmp_path / "scripts" / "jobset.sh").read_text()
    outcome = call("export", plan, job, "--to", "k8s", "-o", tmp_path / "more", "--model", "teacher=x")
    assert outcome.code == 2
    assert "the job has no teacher model; its models are actor, critic, ref, reward" in outcome.err
    outcome = call("export", plan, "--to", "verl", "-o", tmp_path / "verl", *models)
    assert outcome.code == 2
    assert "give the job too" in outcome.err
