"""The overview section: a chart of ranks (top to bottom) over one period (left to right), with the stages on them."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.planner.plan.evaluate import items, ranks_of, task_name_of
from meshwright.planner.plan.plan import Placement, Plan, Refit
from meshwright.planner.report import words
from meshwright.planner.report.axis import linear
from meshwright.planner.report.html import Html, note, section, table
from meshwright.planner.report.lanes import Box, Label, lane_chart

_MIN_HEIGHT, _MAX_HEIGHT, _RANK_HEIGHT = 170.0, 520.0, 24.0
"""Heights in pixels: limits of the chart, which fits a screen, and of a rank where there are few."""

_MAX_NODE_LABELS = 24
"""The most labels beside a chart of the largest height, so that they do not overlap."""


def overview(plan: Plan) -> Html:
    """Return the section: the chart, and a table of all placements."""
    cluster = plan.facts.cluster
    nodes = _nodes(plan)
    height = min(max(_RANK_HEIGHT * cluster.num_ranks, _MIN_HEIGHT), _MAX_HEIGHT)
    chart = lane_chart(
        _task_boxes(plan),
        axis=linear(0.0, plan.period_seconds),
        unit="s",
        num_lanes=cluster.num_ranks,
        lane_height=height / cluster.num_ranks,
        labels=nodes,
        rules=[*(label.first for label in nodes), cluster.num_ranks],
        describe="which stage runs on which ranks at what time of a period",
    )
    return section("glance", "The plan at a glance", note(_caption(plan)), chart, _placements_table(plan))


def works_ahead(plan: Plan) -> bool:
    """True if some stage works ahead of training."""
    return any(placement.steps_ahead for placement in plan.placements)


def _caption(plan: Plan) -> str:
    period = f"One period of {words.seconds(plan.period_seconds)}: ranks from top to bottom, grouped by node."
    if not works_ahead(plan):
        return f"{period} Every stage works on the same step; ranks are idle where nothing is drawn."
    return f"{period} Stages that work ahead of training name their step; ranks are idle where nothing is drawn."


def _task_boxes(plan: Plan) -> Iterator[Box]:
    for item in items(plan):
        if item.end_seconds == item.start_seconds:
            continue
        name = task_name_of(item)
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
        return (task_name_of(item),)
    step = (words.step(item.steps_ahead),) if works_ahead(plan) else ()
    return (item.stage, *step, str(item.layout), words.schedule(item.schedule))


def _nodes(plan: Plan) -> list[Label]:
    """A label for each node, or for several nodes together where there are many."""
    cluster = plan.facts.cluster
    nodes_per_label = -(-cluster.nodes // _MAX_NODE_LABELS)
    labels = []
    for node in range(0, cluster.nodes, nodes_per_label):
        first, stop = (min(n, cluster.nodes) * cluster.ranks_per_node for n in (node, node + nodes_per_label))
        nodes = words.ranks(range(node, min(node + nodes_per_label, cluster.nodes)))
        name = f"node {nodes}: {words.ranks(range(first, stop))}" if nodes_per_label == 1 else f"nodes {nodes}"
        labels.append(Label(first, stop - 1, name))
    return labels


def _placements_table(plan: Plan) -> Html:
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
