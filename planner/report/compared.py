"""Predicted beside simulated, rehearsed and measured seconds of every stage and of the step."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.planner.analysis.compare import Comparison, compare, step_seconds
from meshwright.planner.plan.plan import Plan
from meshwright.planner.report import words
from meshwright.planner.report.axis import linear
from meshwright.planner.report.contents import Contents, clock, named
from meshwright.planner.report.html import Html, note, section, table
from meshwright.planner.report.lanes import Box, Label, legend, picture
from meshwright.profiles.trace import Run

_BAR = 13.0
"""Pixels of the height of a bar: one line of text."""

_GAP = 1
"""Empty bars between two stages."""


def compared(contents: Contents) -> Html:
    """A pale bar for what was predicted above a full one for each clock, and a table with the differences."""
    plan = contents.plan
    simulated = Run(spans=contents.simulation.spans)
    runs = {named(run): _rows(plan, run) for run in (simulated, *contents.runs)}
    names = [row.name for row in next(iter(runs.values())).values()]
    boxes, labels = [], []
    size = 1 + len(runs) + _GAP
    for place, name in enumerate(names):
        predicted = next(iter(runs.values()))[name].predicted_seconds
        bars = [("predicted", predicted), *((told, rows[name].measured_seconds) for told, rows in runs.items())]
        boxes += [_bar(plan, place * size + lane, name, told, value) for lane, (told, value) in enumerate(bars)]
        labels.append(Label(place * size, place * size + len(bars) - 1, name))
    longest = max(box.end for box in boxes)
    drawn = picture(
        boxes,
        axis=linear(0.0, longest),
        unit="s",
        num_lanes=len(names) * size,
        lane_height=_BAR,
        labels=labels,
        describe="predicted seconds of the stages beside those of every clock",
    )
    told = ", then ".join(runs)
    entries = (("c-other", "faint", "predicted"), ("c-other", "solid", f"below it: {told}"))
    said = [
        "Of a stage the slowest rank, of many steps the median, the first left out. The error is what was predicted "
        "less what was measured, in parts of the latter."
    ]
    if any(clock(run) == "REHEARSAL" for run in contents.runs):
        said.append("A rehearsal waits where a device would compute: it shows scheduling and messages, not computing.")
    return section(
        "compared", "Predicted and observed", note(" ".join(said)), legend(entries), drawn, _table(names, runs)
    )


def _rows(plan: Plan, run: Run) -> dict[str, Comparison]:
    seconds = run.step_seconds or step_seconds(plan.graph, run.spans)
    return {row.name: row for row in compare(plan, run.spans, seconds)}


def _bar(plan: Plan, lane: int, name: str, told: str, seconds: float) -> Box:
    return Box(
        first=lane,
        last=lane,
        start=0.0,
        end=seconds,
        colour=words.colour(name, plan.graph),
        title=f"{name}, {told}: {words.seconds(seconds)}",
        look="faint" if told == "predicted" else "solid",
    )


def _table(names: list[str], runs: Mapping[str, Mapping[str, Comparison]]) -> Html:
    rows = []
    for name in names:
        cells = [f"{next(iter(runs.values()))[name].predicted_seconds:.3f}"]
        for found in runs.values():
            measured = found[name].measured_seconds
            cells += [f"{measured:.3f}", words.difference(found[name].error) if measured else ""]
        rows.append((name, *cells))
    headings = ["", "predicted s"]
    for told in runs:
        headings += [f"{told} s", "error"]
    return table(headings, rows, numbers=range(1, len(headings)))
