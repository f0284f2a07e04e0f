"""Training from Python, and what is taken away from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright import api
from tests.runtime.command import exit_code


@pytest.fixture(scope="module")
def plan(job: Path) -> api.Plan:
    found = api.plan(api.resolve(api.read_job(job), job.parent), limits=api.Limits(gap=0.1))
    assert isinstance(found, api.Plan)
    return found


def test_scripts_are_those_of_the_command(job: Path, plan: api.Plan, tmp_path: Path) -> None:
    api.write_plan(tmp_path / "plan.json", plan)
    (found,) = api.export_scripts(str(tmp_path / "plan.json"), str(job), str(tmp_path / "mine"), to="slurm")
    arguments = ("export", tmp_path / "plan.json", job, "--to", "slurm", "-o", tmp_path / "command")
    assert exit_code(*arguments) == 0
    assert found.read_bytes() == (tmp_path / "command" / "run.sbatch").read_bytes()
    assert found.stat().st_mode & 0o111


def test_a_plan_for_lengths_that_were_seen_has_scripts_too(job: Path, plan: api.Plan, tmp_path: Path) -> None:
    facts = api.resolve(api.read_job(job), job.parent)
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"prompt_tokens": 8, "response_tokens": 9}\n' * 4)
    found = api.plan(facts, limits=api.Limits(gap=0.1), observed=api.observed_lengths(trace))
    assert isinstance(found, api.Plan)
    assert found.facts.workload != plan.facts.workload
    api.write_plan(tmp_path / "plan.json", found)
    assert len(api.export_scripts(tmp_path / "plan.json", job, tmp_path / "scripts", to="torchrun")) == 1


def test_scripts_for_what_is_not_known_are_refused(tmp_path: Path) -> None:
    with pytest.raises(api.BadInput, match=r"^there are no scripts for 'slurmm'; did you mean 'slurm'\?$"):
        api.export_scripts("plan.json", "job.yaml", tmp_path / "scripts", to="slurmm")


def test_nothing_is_trained_for_no_steps(job: Path, plan: api.Plan, tmp_path: Path) -> None:
    with pytest.raises(api.BadInput, match=r"^steps=0 is out of range; give 1 or more\.$"):
        api.run(plan, api.read_job(job), tmp_path / "run", steps=0, directory=job.parent)
    with pytest.raises(api.BadInput, match=r"^replan_every=-1 is out of range; give 0 or more\.$"):
        api.run(plan, api.read_job(job), tmp_path / "run", steps=1, directory=job.parent, replan_every=-1)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_what_was_trained_corrects_a_table_and_goes_home(job: Path, plan: api.Plan, tmp_path: Path) -> None:
    summary = api.run(plan, api.read_job(job), str(tmp_path / "run"), steps=3, directory=str(job.parent))
    assert isinstance(summary, api.RunSummary)
    assert summary.steps == 3
    assert {span.clock for span in api.read_run(tmp_path / "run", plan).spans} == {"measured"}
    calibration = api.calibrate(plan, str(tmp_path / "run"))
    assert calibration.table.corrections
    models = api.export_models(str(tmp_path / "run"), str(tmp_path / "models"))
    assert [path.name for path in models] == ["actor", "critic"]
    assert all((path / "config.json").exists() for path in models)
