"""The simulate command: a labelled simulation of a sound plan, beside other clocks."""

from __future__ import annotations

import json
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


def test_a_simulation_is_labelled_and_near_the_plan(call: Call, plan: Path) -> None:
    outcome = call("simulate", plan, "--steps", "5", "--seed", "3")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("SIMULATED 5 steps with sampled durations")
    answer = json.loads(call("simulate", plan, "--durations", "planned", "--json").out)
    assert answer["steps"]["mean"] == pytest.approx(json.loads(plan.read_text())["period_seconds"])
    assert answer["caches"] == []


def test_json_tells_how_much_of_the_planned_cache_is_used(call: Call, plan: Path) -> None:
    (use,) = json.loads(call("simulate", plan, "--steps", "2", "--json").out)["caches"]
    assert use["stage"] == "actor_generate"
    assert 0 < use["mean_share"] <= use["peak_share"]
    assert use["blocks"] > 0


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
