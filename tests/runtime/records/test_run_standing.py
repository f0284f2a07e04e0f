"""A run is watched by what it has written: medians of its last steps, and where their time went."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.planner.plan.plan import Plan, write_plan
from meshwright.profiles.errors import BadInput
from meshwright.profiles.run_logs import log_files
from meshwright.profiles.trace import read_spans, write_spans
from meshwright.runtime.records.run_directory import locked
from meshwright.runtime.records.run_status import RECENT, StatusReader
from tests.planner.plans import random_plan
from tests.runtime.records.written_run import write_run


@pytest.fixture(scope="module")
def plan() -> Plan:
    return random_plan(3)


def test_a_run_that_goes_as_planned_is_told_so(plan: Plan, tmp_path: Path) -> None:
    write_run(plan, tmp_path, steps=RECENT + 5)
    found = StatusReader(tmp_path).read()
    assert (found.updates, found.num_recent, found.is_running) == (RECENT + 5, RECENT, False)
    assert found.step_seconds == pytest.approx(plan.period_seconds)
    assert found.tokens_per_second == 100.0
    for row in found.comparisons:
        assert row.measured_seconds == pytest.approx(row.predicted_seconds)
    for use in found.uses:
        assert sum(one.share for one in (*use.busy, *use.waits)) == pytest.approx(1.0)


def test_what_was_learned_is_the_mean_of_the_last_steps(plan: Plan, tmp_path: Path) -> None:
    write_run(plan, tmp_path, steps=RECENT + 5)
    learned = StatusReader(tmp_path).read().training_metrics
    assert learned["score"] == pytest.approx(5 + (RECENT - 1) / 2)
    assert "step" not in learned


def test_looking_again_is_looking_anew(plan: Plan, tmp_path: Path) -> None:
    """Also where a resume has replaced what is there."""
    write_run(plan, tmp_path, steps=3)
    watching = StatusReader(tmp_path)
    assert watching.read().updates == 3
    for name in ("metrics.jsonl", "trace.jsonl"):
        (tmp_path / name).unlink()
    write_run(plan, tmp_path, steps=6)
    (tmp_path / "evaluations.jsonl").write_text(
        json.dumps({"step": 0, "mean_score": 0.5, "standard_error": 0.1, "scores": [1]}) + "\n"
    )
    again, anew = watching.read(), StatusReader(tmp_path).read()
    assert (again.updates, again.comparisons, again.uses) == (6, anew.comparisons, anew.uses)
    assert again.held_out == {"held_out": ({"step": 0, "mean_score": 0.5, "standard_error": 0.1},)}


def test_a_run_whose_trace_becomes_a_segment_between_two_looks_is_seen_as_one_that_was_not(
    plan: Plan, tmp_path: Path
) -> None:
    steps = RECENT + 30
    for name in ("one", "cut"):
        write_run(plan, tmp_path / name, steps=steps)
    spans = read_spans(tmp_path / "cut" / "trace.jsonl")
    trace = tmp_path / "cut" / "trace.jsonl"
    trace.unlink()
    watching = StatusReader(tmp_path / "cut")
    for begin in range(0, len(spans), 40):
        write_spans(trace, spans[begin : begin + 40], segment_bytes=20_000)
        if begin > len(spans) // 2:
            watching.read()
    assert len(log_files(trace)) > 3
    one, cut = StatusReader(tmp_path / "one").read(), watching.read()
    assert (cut.comparisons, cut.uses) == (one.comparisons, one.uses)
    assert StatusReader(tmp_path / "cut").read().comparisons == one.comparisons


def test_a_run_that_has_just_begun_has_no_step(plan: Plan, tmp_path: Path) -> None:
    write_plan(tmp_path / "plan.json", plan)
    with locked(tmp_path):
        found = StatusReader(tmp_path).read()
    assert (found.is_running, found.updates, found.step_seconds) == (True, 0, None)


def test_what_is_no_run_is_refused_in_a_sentence(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"holds no plan\.json; give the --out of `meshwright run`"):
        StatusReader(tmp_path)
    with pytest.raises(BadInput, match="is not a directory"):
        StatusReader(tmp_path / "none")
    write_plan(tmp_path / "plan.json", plan)
    for line in ("[1", "[1]", "{}", '{"step": 0}', '{"step": "x"}', "[" * 100_000):
        (tmp_path / "metrics.jsonl").write_text(f"{line}\n")
        with pytest.raises(BadInput, match="has lines that `meshwright run` does not write"):
            StatusReader(tmp_path).read()
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "evaluations.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(BadInput, match="has lines that `meshwright run` does not write"):
        StatusReader(tmp_path).read()
