"""The section on costs: the terms of the predicted time of each task, their sources, and extrapolated costs."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.cost_models.cost import Source, Term
from meshwright.planner.plan.evaluate import Item, items, task_name_of
from meshwright.planner.plan.plan import Plan
from meshwright.planner.report import words
from meshwright.planner.report.axis import linear
from meshwright.planner.report.html import Html, note, section, table, tag
from meshwright.planner.report.lanes import Box, Label, lane_chart, legend

_TASK_LANE_HEIGHT = 30.0
"""Height of a bar in pixels, with room for its text."""

_OPACITIES = (1.0, 0.8, 0.62, 0.47, 0.35)
"""Opacities of the terms of a bar, the largest term first; further terms have the last opacity."""

_MIN_TERM_SHARE = 0.001
"""The smallest share of a cost with which a term is listed in the table."""


def terms(plan: Plan) -> Html:
    """Return the section: a bar for each task with its terms from the largest to the smallest; extrapolated terms are
    hatched."""
    shown = sorted((item for item in items(plan) if item.cost.total), key=lambda item: item.start_seconds)
    chart = lane_chart(
        [box for lane, item in enumerate(shown) for box in _task_bar(plan, lane, item)],
        axis=linear(0.0, max(item.cost.total for item in shown)),
        unit="s",
        num_lanes=len(shown),
        lane_height=_TASK_LANE_HEIGHT,
        labels=[Label(lane, lane, task_name_of(item)) for lane, item in enumerate(shown)],
        describe="the terms of the cost of each task",
    )
    rows = [(task_name_of(item), f"{item.cost.total:.3f}", _terms_text(item), item.cost.source.value) for item in shown]
    headings = ("task", "seconds", "terms", "least trusted source")
    extrapolated_tasks = [task_name_of(item) for item in shown if item.cost.source is Source.EXTRAPOLATED]
    warning = f"Extrapolated beyond the measurements: {', '.join(extrapolated_tasks)}." if extrapolated_tasks else ""
    entries = (("c-other", "solid", "a term, the largest first"), ("c-other", "hatched", "extrapolated"))
    return section(
        "terms",
        "Costs",
        note("Every predicted time is a sum of named terms. ", tag("span", warning, class_="alarm")),
        legend(entries),
        chart,
        table(headings, rows, numbers=(1,)),
    )


def _largest_first(item: Item) -> Sequence[Term]:
    return sorted(item.cost.merged().terms, key=lambda term: -term.amount)


def _task_bar(plan: Plan, lane: int, item: Item) -> list[Box]:
    boxes, start = [], 0.0
    for place, term in enumerate(_largest_first(item)):
        extrapolated = term.source is Source.EXTRAPOLATED
        boxes.append(
            Box(
                first=lane,
                last=lane,
                start=start,
                end=start + term.amount,
                colour=words.colour(task_name_of(item), plan.graph),
                title=f"{task_name_of(item)}: {term.name} {words.seconds(term.amount)}, {term.source}",
                lines=(f"{term.name} {words.seconds(term.amount)}",) if place < 2 or extrapolated else (),
                look="hatched" if extrapolated else "solid",
                opacity=_OPACITIES[min(place, len(_OPACITIES) - 1)],
            )
        )
        start += term.amount
    return boxes


def _terms_text(item: Item) -> str:
    """The terms with their seconds, and with their source where it differs from that of the whole cost."""
    source = item.cost.source
    return ", ".join(
        f"{term.name} {words.seconds(term.amount)}" + (f" ({term.source})" if term.source is not source else "")
        for term in _largest_first(item)
        if term.amount >= _MIN_TERM_SHARE * item.cost.total
    )
