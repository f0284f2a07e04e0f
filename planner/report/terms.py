"""What each task's predicted time is made of, where each part of it comes from, and what is a guess."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.cost_models.cost import Source, Term
from meshwright.planner.plan.evaluate import Item, items, name_of
from meshwright.planner.plan.plan import Plan
from meshwright.planner.report import words
from meshwright.planner.report.axis import linear
from meshwright.planner.report.html import Html, note, section, table, tag
from meshwright.planner.report.lanes import Box, Label, legend, picture

_LANE = 30.0
"""Pixels of the height of a bar, with room for its text."""

_OPACITIES = (1.0, 0.8, 0.62, 0.47, 0.35)
"""Of the terms of a bar, the largest first; further ones are as pale as the last."""

_LEAST_SHARE = 0.001
"""Of a cost, below which a term is not told in the table."""


def terms(plan: Plan) -> Html:
    """A bar for each task, its terms from the largest to the smallest; extrapolated ones are hatched."""
    shown = sorted((item for item in items(plan) if item.cost.total), key=lambda item: item.start_seconds)
    drawn = picture(
        [box for lane, item in enumerate(shown) for box in _bar(plan, lane, item)],
        axis=linear(0.0, max(item.cost.total for item in shown)),
        unit="s",
        num_lanes=len(shown),
        lane_height=_LANE,
        labels=[Label(lane, lane, name_of(item)) for lane, item in enumerate(shown)],
        describe="the terms of the cost of each task",
    )
    rows = [(name_of(item), f"{item.cost.total:.3f}", _told(item), item.cost.source.value) for item in shown]
    headings = ("task", "seconds", "terms", "least trusted source")
    guessed = [name_of(item) for item in shown if item.cost.source is Source.EXTRAPOLATED]
    said = f"Extrapolated, so a guess beyond what was measured: {', '.join(guessed)}." if guessed else ""
    entries = (("c-other", "solid", "a term, the largest first"), ("c-other", "hatched", "extrapolated"))
    return section(
        "terms",
        "Costs",
        note("Every predicted time is a sum of named terms. ", tag("span", said, class_="alarm")),
        legend(entries),
        drawn,
        table(headings, rows, numbers=(1,)),
    )


def _largest_first(item: Item) -> Sequence[Term]:
    return sorted(item.cost.merged().terms, key=lambda term: -term.amount)


def _bar(plan: Plan, lane: int, item: Item) -> list[Box]:
    boxes, start = [], 0.0
    for place, term in enumerate(_largest_first(item)):
        extrapolated = term.source is Source.EXTRAPOLATED
        boxes.append(
            Box(
                first=lane,
                last=lane,
                start=start,
                end=start + term.amount,
                colour=words.colour(name_of(item), plan.graph),
                title=f"{name_of(item)}: {term.name} {words.seconds(term.amount)}, {term.source}",
                lines=(f"{term.name} {words.seconds(term.amount)}",) if place < 2 or extrapolated else (),
                look="hatched" if extrapolated else "solid",
                opacity=_OPACITIES[min(place, len(_OPACITIES) - 1)],
            )
        )
        start += term.amount
    return boxes


def _told(item: Item) -> str:
    """The terms with their seconds, and their source where it is not that of the whole."""
    whole = item.cost.source
    return ", ".join(
        f"{term.name} {words.seconds(term.amount)}" + (f" ({term.source})" if term.source is not whole else "")
        for term in _largest_first(item)
        if term.amount >= _LEAST_SHARE * item.cost.total
    )
