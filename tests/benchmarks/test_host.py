"""The host benchmark: its runs differ from what is profiled, and its errors are what they are called."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from benchmarks.host.score import STEP, Row, median_error, median_rows, rows_of
from benchmarks.host.variations import VARIATIONS
from meshwright.planner.plan.pins import parse_pins
from meshwright.planner.simulation.simulate import simulate
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.trace import write_spans
from tests.planner.analysis.test_correct_table import SYNCHRONOUS, TABLE

TINY = Path(__file__).parents[2] / "examples" / "tiny" / "job.yaml"


def test_every_run_has_another_batch_or_lengths_and_a_layout_of_its_own() -> None:
    profiled = yaml.safe_load(TINY.read_text())["workload"]
    assert len(VARIATIONS) == 5
    for variation in VARIATIONS:
        assert variation.workload["response"] != profiled["response"]
        assert parse_pins(variation.pins, PPO_GRAPH)
    assert len({variation.pins for variation in VARIATIONS}) == 5


def test_a_run_that_went_as_predicted_has_no_error(tmp_path: Path) -> None:
    plan = SYNCHRONOUS[0]
    spans = simulate(plan, steps=4, traced=True).spans
    write_spans(tmp_path / "trace.jsonl", [replace(span, clock="measured") for span in spans])
    lines = [json.dumps({"seconds": plan.period_seconds}) for _ in range(4)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    rows = rows_of("run", plan, TABLE, tmp_path)
    assert [row.name for row in rows] == [*(p.stage for p in plan.placements), STEP]
    assert [row.error for row in rows] == pytest.approx([0.0] * len(rows), abs=1e-9)


def test_the_median_is_of_errors_without_their_sign() -> None:
    rows = [
        Row(run="r", name="s", layout="", predicted=predicted, measured=1.0, spread=0.0)
        for predicted in (0.5, 0.9, 1.2)
    ]
    assert median_error(rows) == pytest.approx(0.2)


def test_a_round_in_which_the_machine_was_disturbed_does_not_decide() -> None:
    def found(predicted: float) -> list[Row]:
        return [Row(run="r", name="s", layout="", predicted=predicted, measured=1.0, spread=0.0)]

    assert [row.predicted for row in median_rows([found(1.02), found(0.6), found(1.1)])] == [1.02]
    assert [row.predicted for row in median_rows([found(1.5), found(0.9)])] == [0.9]
