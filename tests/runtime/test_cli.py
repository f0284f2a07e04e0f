"""The command line: what a user gets wrong is answered with one sentence and the right exit code."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.planner.plan.plan import read_plan
from meshwright.profiles.table import read_table
from meshwright.profiles.trace import Span, write_spans
from tests.runtime.command import Call, exit_code


@pytest.fixture(scope="module")
def plan(job: Path) -> Path:
    path = job.with_name("plan.json")
    assert exit_code("plan", job, "-o", path) == 0
    return path


def edited_job(job: Path, section: str, **changes: object) -> Path:
    document = yaml.safe_load(job.read_text())
    document[section] = {**document[section], **changes}
    path = job.with_name("edited.yaml")
    path.write_text(yaml.safe_dump(document))
    return path


def edited_plan(plan: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    document = json.loads(plan.read_text())
    edit(document)
    path = plan.with_name("edited.json")
    path.write_text(json.dumps(document))
    return path


def test_the_same_job_gives_the_same_bytes(call: Call, job: Path, plan: Path) -> None:
    assert call("plan", job, "-o", job.with_name("again.json")).code == 0
    assert (job.with_name("again.json")).read_bytes() == plan.read_bytes()


def test_what_is_forbidden_is_not_planned_and_the_plan_says_so(call: Call, job: Path, plan: Path) -> None:
    layout = str(read_plan(plan).placement("actor_train").layout)
    path = job.with_name("other.json")
    assert call("plan", job, "-o", path, "--forbid", f"actor_train.layout={layout}").code == 0
    assert str(read_plan(path).placement("actor_train").layout) != layout
    assert read_plan(path).pins == (f"actor_train.layout!={layout}",)
    assert call("verify", path).code == 0


def test_a_value_that_no_choice_has_cannot_be_forbidden(call: Call, job: Path) -> None:
    outcome = call("plan", job, "-o", job.with_name("x.json"), "--forbid", "actor_train.layout=tp3")
    assert outcome.code == 2
    assert "forbid 'actor_train.layout=tp3,pp1,dp1': tp=3 does not divide" in outcome.err


def test_the_best_structures_are_written_side_by_side_and_ranked(call: Call, job: Path) -> None:
    path = job.with_name("ranked.json")
    outcome = call("plan", job, "-o", path, "--top", 2, "--json")
    assert outcome.code == 0
    rows = json.loads(outcome.out)
    assert [row["path"] for row in rows] == [str(path), str(job.with_name("ranked.2.json"))]
    assert rows[0]["simulated_seconds"] <= rows[1]["simulated_seconds"]
    one, other = (read_plan(Path(row["path"])) for row in rows)
    assert [p.layout for p in one.placements] != [p.layout for p in other.placements]
    assert call("verify", path).code == call("verify", rows[1]["path"]).code == 0


def test_an_explanation_has_what_binds_what_matters_and_other_sizes(call: Call, plan: Path) -> None:
    outcome = call("explain", plan, "--sizes", "1,2", "--price", 2.5, "--json")
    assert outcome.code == 0
    found = json.loads(outcome.out)
    assert [point["num_ranks"] for point in found["sizes"]] == [1, 2]
    assert {"compute peak", "batch size"} <= {one["name"] for one in found["sensitivities"]}
    assert found["explanation"]["critical_path"][0]["because"] == "starts the turn"
    assert call("explain", plan).code == 0
    assert call("explain", plan, "--sizes", "two").code == 2


def test_verify_says_nothing_of_a_compiled_plan(call: Call, plan: Path) -> None:
    outcome = call("verify", plan)
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "")


def test_a_plan_edited_to_tp_3_is_told_the_stage_the_rule_and_the_nearest_value(call: Call, plan: Path) -> None:
    def edit(document: dict[str, Any]) -> None:
        placement = next(p for p in document["placements"] if p["stage"] == "actor_train")
        placement["layout"] = {"tp": 3, "pp": 1, "dp": 1, "sp": False}

    outcome = call("verify", edited_plan(plan, edit))
    assert outcome.code == 2
    assert outcome.err.splitlines() == ["actor_train: tp=3 does not divide the 4 attention heads of actor; use tp=2."]


def test_a_plan_of_another_schema_version_is_refused(call: Call, plan: Path) -> None:
    outcome = call("verify", edited_plan(plan, lambda document: document.update(schema_version=99)))
    assert outcome.code == 2
    assert "schema_version=99" in outcome.err


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("missing.yaml", None, "does not exist"),
        ("bad.yaml", "models: [unclosed", "is not YAML"),
        ("list.yaml", "- 1\n", "should be an object"),
    ],
)
def test_a_job_that_cannot_be_read_gets_a_sentence(
    call: Call, tmp_path: Path, name: str, text: str | None, said: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    outcome = call("plan", tmp_path / name, "-o", tmp_path / "plan.json")
    assert outcome.code == 2
    assert said in outcome.err
    assert not (tmp_path / "plan.json").exists()


def test_an_unknown_key_gets_the_nearest_one(call: Call, job: Path) -> None:
    outcome = call("plan", edited_job(job, "workload", batch_sise=8), "-o", job.with_name("x.json"))
    assert outcome.code == 2
    assert "workload.batch_sise" in outcome.err
    assert "did you mean 'batch_size'?" in outcome.err


def test_a_wrong_type_names_its_path_and_value(call: Call, job: Path) -> None:
    outcome = call("plan", edited_job(job, "workload", batch_size="many"), "-o", job.with_name("x.json"))
    assert outcome.code == 2
    assert "workload.batch_size is 'many'" in outcome.err


def test_a_job_that_cannot_fit_exits_3_with_the_binding_limit(call: Call, job: Path) -> None:
    device = {
        "name": "thimble",
        "kind": "cpu",
        "memory_bytes": 100_000,
        "memory_bytes_per_second": 1e10,
        "flops_per_second": {"fp32": 1e10},
        "launch_seconds": 1e-5,
        "source": "made up",
    }
    outcome = call("plan", edited_job(job, "cluster", device=device), "-o", job.with_name("x.json"))
    assert outcome.code == 3
    assert "actor_train needs" in outcome.err
    assert "that the device can use" in outcome.err


def test_more_ranks_than_the_cluster_has_are_refused(call: Call, job: Path) -> None:
    outcome = call("plan", job, "--pin", "actor_train.pool=0:8", "-o", job.with_name("x.json"))
    assert outcome.code == 2
    assert "8" in outcome.err
    assert "2 ranks" in outcome.err


def run_of(plan: Path, directory: Path, **changes: str) -> Path:
    """What a run of three steps would leave behind, every stage taking what was planned."""
    directory.mkdir()
    shutil.copy(plan, directory / "plan.json")
    document = read_plan(plan)
    fields: dict[str, Any] = {"kind": "stage", "start_seconds": 0.0, "clock": "measured", **changes}
    for step in range(3):
        for p in document.placements:
            for rank in list(document.pool(p.pool).ranks)[: p.layout.num_ranks]:
                span = Span(step=step, instruction=p.stage, rank=rank, end_seconds=p.cost.total, **fields)
                write_spans(directory / "trace.jsonl", [span])
    return directory


def test_a_run_that_went_as_planned_corrects_nothing(call: Call, plan: Path, tmp_path: Path) -> None:
    run = run_of(plan, tmp_path / "run")
    outcome = call("calibrate", plan, run, "-o", tmp_path / "table.json", "--json")
    assert outcome.code == 0
    answer = json.loads(outcome.out)
    assert answer["num_steps"] == 2
    assert {row["after_seconds"] == row["measured_seconds"] for row in answer["rows"][:-1]} == {True}
    table = read_table(tmp_path / "table.json")
    assert {correction.factor for correction in table.corrections} == {1.0}
    again = call("calibrate", plan, run, "--profile", tmp_path / "table.json", "-o", tmp_path / "table2.json")
    assert again.code == 0
    assert "planned   before   measured   after" in again.out
    assert len(read_table(tmp_path / "table2.json").corrections) == 2 * len(table.corrections)


def test_a_calibration_overwrites_no_file(call: Call, plan: Path, tmp_path: Path) -> None:
    run = run_of(plan, tmp_path / "run")
    (tmp_path / "table.json").write_text("mine")
    outcome = call("calibrate", plan, run, "-o", tmp_path / "table.json")
    assert outcome.code == 2
    assert "overwrites nothing" in outcome.err
    assert (tmp_path / "table.json").read_text() == "mine"


def test_a_rehearsed_run_calibrates_nothing_and_nothing_is_written(call: Call, plan: Path, tmp_path: Path) -> None:
    run = run_of(plan, tmp_path / "run", clock="rehearsed")
    outcome = call("calibrate", plan, run, "-o", tmp_path / "table.json")
    assert outcome.code == 2
    assert "the trace is rehearsed and not measured" in outcome.err
    assert not (tmp_path / "table.json").exists()


@pytest.mark.slow
def test_a_model_without_weights_is_refused_by_run(call: Call, job: Path, plan: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(job.parent, tmp_path / "job")
    for path in bare.glob("*/model.safetensors"):
        path.unlink()
    outcome = call("run", plan, bare / job.name, "--steps", "1", "--out", tmp_path / "out")
    assert outcome.code == 2
    assert "holds no weights" in outcome.err


@pytest.mark.slow
def test_a_port_in_use_is_refused_by_run(call: Call, job: Path, plan: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        outcome = call("run", plan, job, "--steps", "1", "--out", tmp_path / "out", "--rendezvous", place)
    assert outcome.code == 2
    assert f"{place} cannot be used" in outcome.err


def test_a_plan_for_other_devices_is_refused_by_run(call: Call, job: Path, plan: Path, tmp_path: Path) -> None:
    path = tmp_path / "cuda.json"
    larger = edited_job(job, "cluster", device="a100-80gb")
    assert call("plan", larger, "-o", path).code == 0
    refused = call("run", path, job, "--steps", "1", "--out", tmp_path / "out")
    assert (refused.code, refused.out) == (2, "")
    assert "it is for a cuda cluster and the job's cluster is cpu" in refused.err
    outcome = call("run", path, larger, "--steps", "1", "--out", tmp_path / "out")
    assert outcome.code == 2
    assert "CUDA devices per node and this machine has 0" in outcome.err


def test_a_simulation_is_labelled_and_near_the_plan(call: Call, plan: Path) -> None:
    outcome = call("simulate", plan, "--steps", "5", "--seed", "3")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("SIMULATED 5 steps with sampled durations")
    answer = json.loads(call("simulate", plan, "--durations", "planned", "--json").out)
    assert answer["steps"]["mean"] == pytest.approx(json.loads(plan.read_text())["period_seconds"])


def test_several_clocks_are_shown_side_by_side(call: Call, plan: Path, tmp_path: Path) -> None:
    measured = Span(
        step=0,
        instruction="actor_train",
        kind="stage",
        rank=0,
        start_seconds=0.0,
        end_seconds=1.0,
        clock="measured",
    )
    write_spans(tmp_path / "trace.jsonl", [measured])
    timeline = tmp_path / "timeline.json"
    outcome = call("simulate", plan, "--steps", "2", "--trace", timeline, "--beside", tmp_path / "trace.jsonl")
    assert outcome.code == 0
    events = json.loads(timeline.read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [
        "SIMULATED",
        f"measured {tmp_path.name}",
    ]


def test_a_trace_that_was_cut_short_is_refused(call: Call, plan: Path, tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text('{"step": 1, "inst')
    outcome = call("simulate", plan, "--beside", tmp_path / "trace.jsonl")
    assert outcome.code == 2
    assert "line 1 is not a span" in outcome.err


def test_a_plan_that_breaks_a_rule_is_not_simulated(call: Call, plan: Path) -> None:
    outcome = call("simulate", edited_plan(plan, lambda document: document.update(period_seconds=1e6)))
    assert outcome.code == 2
    assert "period_seconds is 1e+06" in outcome.err


def test_a_what_if_is_a_difference_against_the_plan(call: Call, plan: Path) -> None:
    answer = json.loads(call("whatif", plan, "--set", "workload.response.p99=12,24", "--price", "3", "--json").out)
    shorter, same = answer["answers"]
    assert shorter["difference"]["step_seconds"] < 0
    assert shorter["outlook"]["money"] == pytest.approx(3 * shorter["outlook"]["gpu_hours"])
    assert same["difference"]["step_seconds"] == 0
    shown = call("whatif", plan, "--set", "workload.response.p99=12")
    assert shown.code == 0
    assert "the same placements costed again" in shown.out


def test_a_what_if_of_an_unknown_field_exits_2_with_the_nearest_name(call: Call, plan: Path) -> None:
    outcome = call("whatif", plan, "--set", "cluster.node=4")
    assert outcome.code == 2
    assert "did you mean cluster.nodes" in outcome.err


@pytest.mark.slow
def test_a_rehearsal_says_so_and_shows_the_simulated_clock_beside(call: Call, plan: Path, tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json"
    outcome = call("rehearse", plan, "--steps", "1", "--speed", "0.5", "--trace", timeline)
    assert outcome.code == 0
    assert outcome.out.startswith("REHEARSAL of 1 steps with planned durations at speed 0.5: 2 processes")
    events = json.loads(timeline.read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["SIMULATED", "REHEARSED"]


def test_the_command_line_starts_without_torch_and_without_a_solver() -> None:
    script = "import sys, meshwright.runtime.cli; sys.exit('torch' in sys.modules or 'ortools' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_help_of_every_command_ends_with_an_example(call: Call) -> None:
    commands = "profile plan verify explain simulate whatif rehearse run calibrate report export schema"
    for command in commands.split():
        outcome = call(command, "--help")
        assert outcome.code == 0
        assert "Example: meshwright" in outcome.out


def test_the_schema_of_each_document_is_json(call: Call) -> None:
    for document in ("job", "plan", "table"):
        outcome = call("schema", document)
        assert json.loads(outcome.out)["type"] == "object"


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


def test_a_plan_for_one_node_is_not_run_on_two_nor_as_its_second(
    call: Call, job: Path, plan: Path, tmp_path: Path
) -> None:
    outcome = call("run", plan, job, "--steps", "1", "--out", tmp_path / "out", "--nodes", "2")
    assert outcome.code == 2
    assert "--nodes 2 does not match the 1 nodes of the plan's cluster" in outcome.err
    outcome = call("run", plan, job, "--steps", "1", "--out", tmp_path / "out", "--node-rank", "1")
    assert outcome.code == 2
    assert "--node-rank 1 is not one of the plan's 1 nodes; they count from 0" in outcome.err
