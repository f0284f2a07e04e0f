"""The section on predicted against simulated, rehearsed and measured seconds of every stage and of the step."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.planner.analysis.trace_analysis import Comparison, compare, step_seconds
from meshwright.planner.plan.plan import Plan
from meshwright.planner.report import formatting
from meshwright.planner.report.charts import Box, Label, lane_chart, legend, linear
from meshwright.planner.report.contents import Contents, clock_label, run_label
from meshwright.planner.report.html import Html, note, section, table
from meshwright.profiles.trace import Run

_BAR_HEIGHT = 13.0
"""Height of a bar in pixels: one line of text."""

_GAP_BARS = 1
"""Number of empty bars between two stages."""


def predicted_and_observed(contents: Contents) -> Html:
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
    run_names = ", then ".join(runs)
    entries = (("c-other", "faint", "predicted"), ("c-other", "solid", f"below it: {run_names}"))
    notes = [
        "Seconds of the slowest rank of a stage, as the median over steps after the first. The error is (predicted - "
        "measured) / measured."
    ]
    if any(clock_label(run) == "REHEARSAL" for run in contents.runs):
        notes.append("A rehearsal waits where a device would compute: it shows scheduling and messages, not computing.")
    return section(
        "compared", "Predicted and observed", note(" ".join(notes)), legend(entries), chart, _seconds_table(names, runs)
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


def _seconds_table(names: list[str], runs: Mapping[str, Mapping[str, Comparison]]) -> Html:
    rows = []
    for name in names:
        cells = [f"{next(iter(runs.values()))[name].predicted_seconds:.3f}"]
        for comparisons in runs.values():
            measured = comparisons[name].measured_seconds
            cells += [f"{measured:.3f}", formatting.difference(comparisons[name].error) if measured else ""]
        rows.append((name, *cells))
    headings = ["", "predicted s"]
    for run in runs:
        headings += [f"{run} s", "error"]
    return table(headings, rows, numbers=range(1, len(headings)))
