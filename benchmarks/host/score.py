"""Predicted beside measured, for the lengths that a run met."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.plan.plan import Plan
from meshwright.planner.search.re_evaluate import re_evaluate
from meshwright.profiles.observations import observe, observe_workload
from meshwright.profiles.table import Table
from meshwright.profiles.trace import read_spans


@dataclass(frozen=True, kw_only=True)
class Row:
    """Seconds of a stage or of the whole step, median over the steps after the first."""

    run: str
    name: str
    layout: str
    predicted: float
    measured: float
    spread: float  # interquartile range of the measured seconds over their median

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


STEP = "step"


def rows_of(name: str, plan: Plan, table: Table | None, directory: Path) -> tuple[Row, ...]:
    """Each stage of a run, and its step; predicted by equations alone where there is no table."""
    placements = {p.stage: p for p in plan.placements}
    spans = read_spans(directory / "trace.jsonl")
    seen = observe(spans, {s: p.layout for s, p in placements.items()}, plan.graph, plan.facts.workload.batch_size)
    facts = plan.facts.model_copy(update={"workload": observe_workload(plan.facts.workload, seen)})
    again = re_evaluate(plan, facts, cost_model_of(facts, table))
    stages = [
        Row(
            run=name,
            name=p.stage,
            layout=str(p.layout),
            predicted=p.cost.total,
            measured=seen.seconds[p.stage],
            spread=seen.spread[p.stage],
        )
        for p in again.placements
    ]
    seconds = [json.loads(line)["seconds"] for line in (directory / "metrics.jsonl").read_text().splitlines()][1:]
    quartiles = statistics.quantiles(seconds, n=4, method="inclusive")
    whole = Row(
        run=name,
        name=STEP,
        layout="",
        predicted=again.period_seconds,
        measured=quartiles[1],
        spread=(quartiles[2] - quartiles[0]) / quartiles[1],
    )
    return (*stages, whole)


def median_rows(rounds: Sequence[Sequence[Row]]) -> tuple[Row, ...]:
    """Of each row, as several rounds found it, the one whose signed error is the median; the lower of two."""
    return tuple(sorted(found, key=lambda row: row.error)[(len(found) - 1) // 2] for found in zip(*rounds, strict=True))


def median_error(rows: Sequence[Row]) -> float:
    """Median of the absolute errors."""
    return statistics.median(abs(row.error) for row in rows)
