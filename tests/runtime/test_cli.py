"""The command line: what a user gets wrong is answered with one sentence and the right exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.profiles.trace import Span, write_spans
from tests.runtime.command import Call


def edited_plan(plan: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    document = json.loads(plan.read_text())
    edit(document)
    path = plan.with_name("edited.json")
    path.write_text(json.dumps(document))
    return path


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
