"""The status of a run, read from its directory while it continues. It needs neither the run's processes nor torch."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshwright.planner.analysis.trace_analysis import Comparison, compare, measured_use, step_ends
from meshwright.planner.job.evaluation import HELD_OUT
from meshwright.planner.plan.plan import read_run_plan
from meshwright.planner.simulation.simulate import TimeUse
from meshwright.profiles.errors import BadInput
from meshwright.profiles.trace import MAX_STEPS_AHEAD, Span, is_finite_number, parse_span, read_last_spans
from meshwright.runtime.records.run_directory import is_locked
from meshwright.runtime.records.run_lines import Tail

RECENT = 20
"""Number of most recent steps over which medians and shares are taken."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The status of a run. Medians, means and shares are over its last `num_recent` steps.

    `quiet_seconds` is the time since the last line of metrics.jsonl. `training_metrics` are the mean training metrics
    by their names in metrics.jsonl, `held_out` the evaluations on each set of held-out prompts by its name, and `uses`
    how all ranks, then those of each pool, spent the time.
    """

    directory: str
    is_running: bool
    updates: int
    num_recent: int = 0
    quiet_seconds: float | None = None
    plan_seconds: float
    step_seconds: float | None = None
    tokens_per_second: float | None = None  # response tokens
    staleness_bound: int
    training_metrics: Mapping[str, float]
    held_out: Mapping[str, tuple[Mapping[str, float], ...]] = field(default_factory=dict)
    comparisons: tuple[Comparison, ...] = ()
    uses: tuple[TimeUse, ...] = ()


class StatusReader:
    """Reads the status of a run repeatedly, each time only the new lines."""

    def __init__(self, directory: Path) -> None:
        """Raises BadInput for a directory that holds no plan of a run."""
        self._directory, self._plan = directory, read_run_plan(directory)
        self._metrics, self._trace = Tail(directory / "metrics.jsonl", RECENT), Tail(directory / "trace.jsonl")
        self._evaluations = Tail(directory / "evaluations.jsonl")
        self._lines: list[dict[str, Any]] = []
        self._spans: list[Span] = []
        self._held_out: list[dict[str, Any]] = []

    def read(self) -> RunStatus:
        """Return the present status of the run. Raises BadInput for a line that no run writes."""
        try:
            self._read()
            return self._status()
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError):
            raise BadInput(
                f"{self._directory} has lines that `meshwright run` does not write; give the --out of `meshwright run`."
            ) from None

    def _status(self) -> RunStatus:
        lines, plan = self._lines, self._plan
        recent = lines[-RECENT:]
        status = RunStatus(
            directory=str(self._directory),
            is_running=is_locked(self._directory),
            updates=lines[-1]["step"] + 1 if lines else 0,
            plan_seconds=plan.period_seconds,
            staleness_bound=plan.staleness,
            training_metrics=_means(recent),
            held_out=_by_set(self._held_out),
        )
        if not lines:
            return status
        ends = step_ends(plan.graph, self._spans)
        window = sorted(ends.values())[-RECENT - 1 :]
        start_seconds = window[0] if len(ends) > len(recent) else min(span.start_seconds for span in self._spans)
        seconds = {line["step"]: line["seconds"] for line in recent}
        comparisons = compare(plan, self._spans, seconds)
        return replace(
            status,
            num_recent=len(recent),
            quiet_seconds=max(0.0, time.time() - (self._directory / "metrics.jsonl").stat().st_mtime),
            step_seconds=comparisons[-1].measured_seconds,
            tokens_per_second=statistics.median(line["tokens_per_second"] for line in recent),
            comparisons=comparisons,
            uses=measured_use(plan, self._spans, start_seconds, window[-1]) if window[-1] > start_seconds else (),
        )

    def _read(self) -> None:
        is_replaced, lines = self._metrics.read()
        self._lines = [*([] if is_replaced else self._lines), *map(_line, lines)][-RECENT:]
        is_replaced, lines = self._evaluations.read()
        evaluations = [_line(line, "mean_score", "standard_error") for line in lines]
        self._held_out = [*([] if is_replaced else self._held_out), *evaluations]
        if self._trace.skip():
            self._spans = list(read_last_spans(self._directory / "trace.jsonl", RECENT + 2 * MAX_STEPS_AHEAD))
        _, lines = self._trace.read()
        spans = [*self._spans, *(parse_span(json.loads(line)) for line in lines)]
        oldest = max((span.step for span in spans), default=0) - RECENT - 2 * MAX_STEPS_AHEAD
        self._spans = [span for span in spans if span.step >= oldest]


def _line(text: str, *required: str) -> dict[str, Any]:
    """Parse a line with a step and the required numbers. Raises ValueError, TypeError or KeyError for any other."""
    line: dict[str, Any] = json.loads(text)
    if not isinstance(line["step"], int) or not all(is_finite_number(line[name]) for name in ("step", *required)):
        raise TypeError
    return line


def _by_set(lines: list[dict[str, Any]]) -> dict[str, tuple[Mapping[str, float], ...]]:
    """Return the numbers of evaluations by the set of prompts that they were made on."""
    names = dict.fromkeys(str(line.get("prompt_set", HELD_OUT)) for line in lines)
    return {name: tuple(_numbers(line) for line in lines if line.get("prompt_set", HELD_OUT) == name) for name in names}


def _means(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Return the mean of every number over the lines that have it."""
    names = {name: None for line in lines for name in _numbers(line) if name != "step"}
    return {name: statistics.fmean(line[name] for line in lines if name in _numbers(line)) for name in names}


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in line.items() if is_finite_number(value)}
