"""The import command: a job that can be planned, the plan as configured, and what would be faster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.planner.plan.plan import read_plan
from meshwright.planner.trainers.importer import Imported
from meshwright.runtime.cli.import_ import _as_json, _model_paths
from tests.planner.plans import random_plan
from tests.planner.trainers.written import plan_of, written
from tests.runtime.command import Call

ASKED = ("--from", "openrlhf", "--device", "l4", "--gap", 0.5)


@pytest.fixture
def configuration(tmp_path: Path) -> Path:
    return written("openrlhf", plan_of("openrlhf", 0), tmp_path)


def test_a_configuration_becomes_a_job_and_a_plan(call: Call, configuration: Path, tmp_path: Path) -> None:
    job, plan = tmp_path / "job.yaml", tmp_path / "configured.json"
    outcome = call("import", configuration, *ASKED, "-o", job, "--plan", plan)
    assert outcome.code == 0
    for told in ("ds.tensor_parallel_size", "as configured", "best within the settings of openrlhf", "best of all"):
        assert told in outcome.out
    assert call("verify", plan).code == 0
    assert call("plan", job, "--pins", plan, "--gap", 0.5, "-o", tmp_path / "again.json").code == 0
    assert read_plan(tmp_path / "again.json").period_seconds == pytest.approx(read_plan(plan).period_seconds, rel=1e-6)


def test_the_answer_is_data_too(call: Call, configuration: Path, tmp_path: Path) -> None:
    outcome = call("import", configuration, *ASKED, "-o", tmp_path / "job.yaml", "--json")
    found = json.loads(outcome.out)
    assert 0 < found["best_seconds"] <= found["step_seconds"]
    assert {"workload.batch_size", "actor_train.layout"} <= {one["what"] for one in found["deciding"]}


def test_a_time_limit_is_kept_and_the_job_is_written_all_the_same(
    call: Call, configuration: Path, tmp_path: Path
) -> None:
    outcome = call("import", configuration, *ASKED, "--time-limit", 0.1, "-o", tmp_path / "job.yaml")
    assert outcome.code == 0
    assert (tmp_path / "job.yaml").exists()


def test_mistakes_are_told_in_a_sentence(call: Call, configuration: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("mine")
    for arguments, sentence in (
        (("-o", tmp_path / "mine.yaml"), "overwrites no job"),
        (("-o", tmp_path / "job.yaml", "--model", "judge=x"), "there is no role 'judge'"),
        (
            ("-o", tmp_path / "job.yaml", "--model", "actor=x", "--model", "actor=y"),
            "--model actor=y: the actor model already has x; give one path.",
        ),
        (("-o", tmp_path / "job.yaml", "--model", "x", "--model", "y"), "models without a role already have x"),
        (
            ("-o", tmp_path / "job.yaml", "--set", "ds.tensor_paralel_size=2"),
            "has no such key; did you mean 'ds.tensor_parallel_size'?",
        ),
        (("-o", tmp_path / "job.yaml", "--device", "l400"), "device 'l400' is not known"),
        (
            ("-o", tmp_path / "job.yaml", "--set", "rollout.batch_size=0"),
            "workload.batch_size is 0: input should be greater than 0; workload.batch_size comes from "
            "rollout.batch_size and rollout.n_samples_per_prompt.",
        ),
        (
            ("-o", tmp_path / "job.yaml", "--set", f"rollout.batch_size={'y' * 5000}"),
            f"='{'y' * 56}... is not a whole number",
        ),
    ):
        outcome = call("import", configuration, *ASKED, *arguments)
        assert outcome.code == 2
        assert sentence in outcome.err
    outcome = call("import", tmp_path / "models/actor/config.json", *ASKED, "-o", tmp_path / "job.yaml")
    assert outcome.code == 2
    assert "has no key of openrlhf" in outcome.err


def test_the_best_plan_of_a_trainer_is_told_apart_from_the_best_of_all() -> None:
    as_it_is, within, best = (
        random_plan(1).model_copy(update={"period_seconds": seconds}) for seconds in (9.0, 7.0, 5.0)
    )
    found = _as_json(Imported(plan=as_it_is, best_in_trainer=within, best=best, deciding=(), notes=(), unread=()))
    assert (found["step_seconds"], found["within_seconds"], found["best_seconds"]) == (9.0, 7.0, 5.0)


def test_a_path_of_a_model_may_hold_an_equals_sign() -> None:
    assert _model_paths(["actor=a=b/config.json", "c/config.json"]) == {
        "actor": Path("a=b/config.json"),
        "": Path("c/config.json"),
    }
