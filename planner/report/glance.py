"""The plan at a glance: ranks from top to bottom, the turn from left to right, and what runs where."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.planner.plan.evaluate import items, name_of, ranks_of
from meshwright.planner.plan.plan import Placement, Plan, Refit
from meshwright.planner.report import words
from meshwright.planner.report.axis import linear
from meshwright.planner.report.html import Html, note, section, table
from meshwright.planner.report.lanes import Box, Label, picture

_LEAST_HEIGHT, _MOST_HEIGHT, _RANK_HEIGHT = 170.0, 520.0, 24.0
"""Pixels of the picture, which fits a screen, and of a rank where there are few."""

_MOST_NODE_LABELS = 24
"""Beside the picture at its largest they would touch each other otherwise."""


def glance(plan: Plan) -> Html:
    """The picture, and a table with what it has no room for."""
    cluster = plan.facts.cluster
    nodes = _nodes(plan)
    height = min(max(_RANK_HEIGHT * cluster.num_ranks, _LEAST_HEIGHT), _MOST_HEIGHT)
    drawn = picture(
        _boxes(plan),
        axis=linear(0.0, plan.period_seconds),
        unit="s",
        num_lanes=cluster.num_ranks,
        lane_height=height / cluster.num_ranks,
        labels=nodes,
        rules=[*(label.first for label in nodes), cluster.num_ranks],
        describe="which stage runs on which ranks at what time of a turn",
    )
    return section("glance", "The plan at a glance", note(_sentence(plan)), drawn, _table(plan))


def works_ahead(plan: Plan) -> bool:
    """Whether some stage works ahead of the training."""
    return any(placement.steps_ahead for placement in plan.placements)


def _sentence(plan: Plan) -> str:
    turn = f"One turn of {words.seconds(plan.period_seconds)}: ranks from top to bottom, grouped by node."
    if not works_ahead(plan):
        return f"{turn} Every stage works on the same step; ranks are idle where nothing is drawn."
    return f"{turn} Stages that work ahead of the training say on which step; ranks are idle where nothing is drawn."


def _boxes(plan: Plan) -> Iterator[Box]:
    for item in items(plan):
        if item.end_seconds == item.start_seconds:
            continue
        name = name_of(item)
        span = f"{words.seconds(item.start_seconds)} to {words.seconds(item.end_seconds)}"
        for first, last in words.consecutive(ranks_of(plan, item)):
            yield Box(
                first=first,
                last=last,
                start=item.start_seconds,
                end=item.end_seconds,
                colour=words.colour(name, plan.graph),
                title=f"{name} on ranks {words.ranks(ranks_of(plan, item))}, {span}",
                lines=_lines(plan, item),
            )


def _lines(plan: Plan, item: Placement | Refit) -> tuple[str, ...]:
    if isinstance(item, Refit):
        return (name_of(item),)
    step = (words.step(item.steps_ahead),) if works_ahead(plan) else ()
    return (item.stage, *step, str(item.layout), words.schedule(item.schedule))


def _nodes(plan: Plan) -> list[Label]:
    """A label for each node, or for some nodes together where there are many."""
    cluster = plan.facts.cluster
    every = -(-cluster.nodes // _MOST_NODE_LABELS)
    found = []
    for node in range(0, cluster.nodes, every):
        first, after = (min(n, cluster.nodes) * cluster.ranks_per_node for n in (node, node + every))
        nodes = words.ranks(range(node, min(node + every, cluster.nodes)))
        name = f"node {nodes}: {words.ranks(range(first, after))}" if every == 1 else f"nodes {nodes}"
        found.append(Label(first, after - 1, name))
    return found


def _table(plan: Plan) -> Html:
    rows = [
        (
            p.stage,
            words.ranks(plan.pool(p.pool).ranks),
            str(p.layout),
            words.schedule(p.schedule),
            words.step(p.steps_ahead),
            f"{p.start_seconds:.3f}",
            f"{p.cost.total:.3f}",
        )
        for p in sorted(plan.placements, key=lambda p: p.start_seconds)
    ]
    headings = ("stage", "ranks", "layout", "schedule", "works on", "start s", "seconds")
    return table(headings, rows, numbers=(5, 6))
