"""The section on predicted against simulated, rehearsed and measured seconds of every stage and of the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from markupsafe import Markup

from meshwright.planner.analysis.trace_analysis import Comparison, compare, step_seconds
from meshwright.planner.plan.plan import Plan
from meshwright.planner.report import formatting
from meshwright.planner.report.charts import Box, Label, lane_chart, linear
from meshwright.planner.report.contents import Contents, clock_label, run_label
from meshwright.planner.report.rendering import render
from meshwright.profiles.trace import Run

_BAR_HEIGHT = 13.0
"""Height of a bar in pixels: one line of text."""

_GAP_BARS = 1
"""Number of empty bars between two stages."""


def predicted_and_observed(contents: Contents) -> Markup:
    """Return the section: a pale bar for the prediction above a solid bar for each run, and a table with the errors."""
    plan = contents.plan
    simulated = Run(spans=contents.simulation.spans)
    runs = {run_label(run): _rows(plan, run) for run in (simulated, *contents.runs)}
    names = [row.name for row in next(iter(runs.values())).values()]
    boxes, labels = [], []
    size = 1 + len(runs) + _GAP_BARS
    for position, name in enumerate(names):
        predicted = next(iter(runs.values()))[name].predicted_seconds
        bars = [("predicted", predicted), *((run, rows[name].measured_seconds) for run, rows in runs.items())]
        boxes += [
            _seconds_bar(plan, position * size + lane, name, run, value) for lane, (run, value) in enumerate(bars)
        ]
        labels.append(Label(position * size, position * size + len(bars) - 1, name))
    longest = max(box.end for box in boxes)
    chart = lane_chart(
        boxes,
        axis=linear(0.0, longest),
        unit="s",
        num_lanes=len(names) * size,
        lane_height=_BAR_HEIGHT,
        labels=labels,
        describe="predicted seconds of the stages and those of every run",
    )
    return render(
        "compared.html",
        has_rehearsal=any(clock_label(run) == "REHEARSAL" for run in contents.runs),
        run_names=", then ".join(runs),
        chart=chart,
        headings=["", "predicted s", *(heading for run in runs for heading in (f"{run} s", "error"))],
        rows=_seconds_rows(names, runs),
    )


def _rows(plan: Plan, run: Run) -> dict[str, Comparison]:
    seconds = run.step_seconds or step_seconds(plan.graph, run.spans)
    return {row.name: row for row in compare(plan, run.spans, seconds)}


def _seconds_bar(plan: Plan, lane: int, name: str, run: str, seconds: float) -> Box:
    return Box(
        first=lane,
        last=lane,
        start=0.0,
        end=seconds,
        colour=formatting.colour(name, plan.graph),
        title=f"{name}, {run}: {formatting.seconds(seconds)}",
        look="faint" if run == "predicted" else "solid",
    )


def _seconds_rows(names: list[str], runs: Mapping[str, Mapping[str, Comparison]]) -> Iterator[tuple[str, ...]]:
    for name in names:
        cells = [f"{next(iter(runs.values()))[name].predicted_seconds:.3f}"]
        for comparisons in runs.values():
            measured = comparisons[name].measured_seconds
            cells += [f"{measured:.3f}", formatting.difference(comparisons[name].error) if measured else ""]
        yield name, *cells
