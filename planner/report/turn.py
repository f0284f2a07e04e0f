"""The section on the period: the predicted timeline of its tasks, and the critical path."""

from __future__ import annotations

from meshwright.planner.analysis.explain import explain
from meshwright.planner.plan.evaluate import items, task_name_of
from meshwright.planner.plan.plan import Placement, Plan
from meshwright.planner.report import words
from meshwright.planner.report.axis import linear
from meshwright.planner.report.glance import works_ahead
from meshwright.planner.report.html import Html, note, section, table
from meshwright.planner.report.lanes import Box, Label, lane_chart

_PERIOD_LANE_HEIGHT = 24.0
"""Height of a task in pixels, with room for its text."""


def period_timeline(plan: Plan) -> Html:
    """Return the section: tasks in the order of their start, those off the critical path pale."""
    path = explain(plan).critical_path
    critical = {wait.task for wait in path}
    shown = sorted((i for i in items(plan) if i.cost.total), key=lambda i: (i.start_seconds, i.end_seconds))
    boxes = []
    for lane, item in enumerate(shown):
        name = task_name_of(item)
        step = f", {words.step(item.steps_ahead)}" if isinstance(item, Placement) and works_ahead(plan) else ""
        boxes.append(
            Box(
                first=lane,
                last=lane,
                start=item.start_seconds,
                end=item.end_seconds,
                colour=words.colour(name, plan.graph),
                title=f"{name}: {words.seconds(item.start_seconds)} to {words.seconds(item.end_seconds)}",
                lines=(f"{words.seconds(item.cost.total)}{step}",),
                look="solid" if name in critical else "faint",
            )
        )
    chart = lane_chart(
        boxes,
        axis=linear(0.0, plan.period_seconds),
        unit="s",
        num_lanes=len(shown),
        lane_height=_PERIOD_LANE_HEIGHT,
        labels=[Label(lane, lane, task_name_of(item)) for lane, item in enumerate(shown)],
        describe="when each task of a period runs, as predicted",
    )
    rows = [
        (
            f"{wait.start_seconds:.3f}",
            f"{wait.seconds:.3f}",
            wait.task,
            wait.because,
            ", ".join(f"{term.name} {words.seconds(term.amount)}" for term in wait.largest_terms),
        )
        for wait in path
    ]
    headings = ("start s", "seconds", "task", "because it", "mostly")
    caption = note("Predicted. Tasks on the critical path are in full colour, tasks with slack are pale.")
    return section("turn", "The period", caption, chart, table(headings, rows, numbers=(0, 1)))
