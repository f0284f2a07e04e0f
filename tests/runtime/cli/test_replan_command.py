"""The replan command: a run says how it went, and the answer what is best from here and what moving there costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.planner.job.job import read_job, require_job
from meshwright.planner.plan.plan import read_plan
from tests.runtime.cli.test_calibrate_command import run_of
from tests.runtime.cli.test_trace_options import run_with_tokens
from tests.runtime.command import Call


def test_the_new_plan_is_written_and_what_it_costs_is_said(call: Call, plan: Path, tmp_path: Path) -> None:
    run, output = run_of(plan, tmp_path / "run"), tmp_path / "plan2.json"
    outcome = call("replan", plan, run, "-o", output)
    assert outcome.code == 0
    assert "with the current plan at the observed speeds" in outcome.out
    assert "switching takes" in outcome.out
    assert call("verify", output).code == 0


def test_the_new_plan_has_the_lengths_that_the_run_met_and_is_a_plan_of_the_job(
    call: Call, job: Path, plan: Path, tmp_path: Path
) -> None:
    run, output = run_with_tokens(plan, tmp_path / "run", response=5.0), tmp_path / "plan2.json"
    assert call("replan", plan, run, "-o", output).code == 0
    found = read_plan(output)
    assert found.facts.workload.response_lengths.mean == pytest.approx(5.0, rel=0.02)
    require_job(found.facts, read_job(job), job.parent, lengths_are_observed=found.lengths_are_observed)


def test_the_answer_is_json_where_that_is_asked(call: Call, plan: Path, tmp_path: Path) -> None:
    run = run_of(plan, tmp_path / "run")
    answer = json.loads(call("replan", plan, run, "--gap", "0.01", "--json").out)
    assert answer["period_seconds"] <= answer["old_plan_seconds"]
    assert answer["plan"]["solver"]["gap"] <= 0.01
    assert answer["moving_seconds"] == sum(one["seconds"] for one in answer["moving"])


def test_what_cannot_be_is_refused_in_a_sentence(call: Call, plan: Path, tmp_path: Path) -> None:
    run = run_of(plan, tmp_path / "run")
    outcome = call("replan", plan, run, "--lost-nodes", "1")
    assert outcome.code == 2
    assert "--lost-nodes 1 leaves none of 1 nodes; use a smaller number." in outcome.err
    missing = call("replan", plan, tmp_path / "none")
    assert missing.code == 2
    assert "is not a directory; give the --out of" in missing.err
    assert read_plan(plan) == read_plan(run / "plan.json")
