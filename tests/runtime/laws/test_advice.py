"""What a refusal advises helps, and what is refused by one command is not answered by another."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
import yaml

from meshwright.planner.job.job import read_job, resolve
from meshwright.planner.plan.plan import read_plan, write_plan
from meshwright.planner.simulation.simulate import simulate
from meshwright.profiles.trace import write_spans
from tests.runtime.cli.test_report_command import small_plan
from tests.runtime.command import Call


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    write_plan(path, small_plan(1))
    return path


def edited(job: Path, folder: Path, **changes: object) -> Path:
    """The job, in a copy of its directory, with some parts replaced."""
    copied = shutil.copytree(job.parent, folder / "job") / job.name
    copied.write_text(yaml.safe_dump({**yaml.safe_load(copied.read_text()), **changes}))
    return copied


def test_a_cluster_may_be_the_name_of_a_device(job: Path, tmp_path: Path) -> None:
    path = edited(job, tmp_path, cluster="h100-sxm")
    other = edited(job, tmp_path / "spelled", cluster={"device": "h100-sxm"})
    assert resolve(read_job(path), path.parent) == resolve(read_job(other), other.parent)


def test_a_device_that_is_not_known_is_told_the_nearest(call: Call, job: Path, tmp_path: Path) -> None:
    outcome = call("plan", edited(job, tmp_path, cluster="h101"), "-o", tmp_path / "x.json")
    assert outcome.code == 2
    assert "device 'h101' is not known; did you mean" in outcome.err


def test_prompts_that_leave_no_room_are_not_told_to_shorten_responses_to_nothing(
    call: Call, job: Path, tmp_path: Path
) -> None:
    workload = {**yaml.safe_load(job.read_text())["workload"], "prompt": {"max": 100_000, "fixed": 6}}
    outcome = call("plan", edited(job, tmp_path, workload=workload), "-o", tmp_path / "x.json")
    assert outcome.code == 2
    assert "shorten prompt.max and response.max." in outcome.err


def test_a_new_search_keeps_the_rules_of_a_plan(call: Call, plan: Path) -> None:
    for again in ((), ("--replan",)):
        outcome = call("whatif", plan, "--set", "workload.response.max=100000", *again, "--json")
        (answer,) = json.loads(outcome.out)["answers"]
        assert not answer["fits"]
        assert "exceeds the 512 positions" in answer["violations"][0]


def test_a_trace_of_another_plan_is_not_shown_beside(call: Call, plan: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    trace = tmp_path / "run" / "trace.jsonl"
    write_spans(trace, simulate(read_plan(plan), steps=1, traced=True).spans)
    assert call("simulate", plan, "--steps", 1, "--beside", trace).code == 0
    write_plan(tmp_path / "run" / "plan.json", small_plan(2))
    outcome = call("simulate", plan, "--steps", 1, "--beside", trace)
    assert outcome.code == 2
    assert "belongs to another plan; simulate the plan.json beside it." in outcome.err


def test_an_empty_prompt_is_told_to_be_deleted(call: Call, job: Path, tmp_path: Path) -> None:
    copied = edited(job, tmp_path)
    path = tmp_path / "plan.json"
    assert call("plan", copied, "-o", path).code == 0
    (copied.parent / "prompts.jsonl").write_text('{"prompt": ""}\n')
    outcome = call("run", path, copied, "--steps", 1, "--out", tmp_path / "out")
    assert outcome.code == 2
    assert "line 1 has no tokens; give it a text, or take the row out." in outcome.err


def test_a_search_ends_in_its_time_and_says_so(call: Call, tmp_path: Path) -> None:
    job = Path(__file__).parents[3] / "examples" / "moe-16384" / "job.yaml"
    began = time.process_time()
    outcome = call("plan", job, "--time-limit", 0.5, "-o", tmp_path / "plan.json")
    assert time.process_time() - began < 4
    assert outcome.code == 3
    assert "no plan was found in 0.5 s; give more with --time-limit." in outcome.err
    assert not (tmp_path / "plan.json").exists()
