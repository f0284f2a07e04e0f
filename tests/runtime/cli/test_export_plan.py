"""export --to another trainer: files, what cannot be said and what that costs, on the terminal and as data."""

from __future__ import annotations

import json
from pathlib import Path

from tests.runtime.command import Call
from tests.runtime.small_job import edited_job


def test_a_plan_is_written_with_what_it_cannot_say(call: Call, job: Path, plan: Path, tmp_path: Path) -> None:
    outcome = call("export", plan, job, "--to", "verl", "-o", tmp_path / "out", "--json")
    assert outcome.code == 0
    found = json.loads(outcome.out)
    assert found["trainer"] == "verl 0.9.1"
    assert found == json.loads((tmp_path / "out" / "export.json").read_text())
    text = (tmp_path / "out" / "run.sh").read_text()
    assert f"actor_rollout_ref.model.path={job.parent / 'actor'}" in text


def test_a_job_may_be_left_out_and_another_one_is_refused(call: Call, job: Path, plan: Path, tmp_path: Path) -> None:
    assert call("export", plan, "--to", "verl", "-o", tmp_path / "alone").code == 0
    other = edited_job(job, "workload", batch_size=32)
    outcome = call("export", plan, other, "--to", "verl", "-o", tmp_path / "other")
    assert outcome.code == 2
    assert "made for another job" in outcome.err


def test_ranks_are_of_models_alone(call: Call, plan: Path, tmp_path: Path) -> None:
    outcome = call("export", plan, "--to", "slime", "--ranks", 2, "-o", tmp_path / "out")
    assert outcome.code == 2
    assert "is for hf alone" in outcome.err


def test_a_plan_for_a_trainer_is_exported_with_the_job_that_it_was_made_of(
    call: Call, job: Path, tmp_path: Path
) -> None:
    """The plan has the trainer's engine, and the job names none."""
    assert call("plan", job, "--for", "verl", "--gap", 0.5, "-o", tmp_path / "plan.json").code == 0
    outcome = call("export", tmp_path / "plan.json", job, "--to", "verl", "-o", tmp_path / "out", "--json")
    assert outcome.code == 0
    found = json.loads(outcome.out)
    assert (found["engine"], found["inexpressible"], found["lost_seconds"]) == ("vllm", [], 0.0)
