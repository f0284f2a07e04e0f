"""The calibrate command: a run corrects a table by what it measured, and nothing that is there is written over."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from meshwright.planner.plan.plan import read_plan
from meshwright.profiles.table import read_table
from meshwright.profiles.trace import Span, write_spans
from tests.runtime.command import Call


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
