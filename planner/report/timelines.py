"""The sections that show stages over time: the overview of ranks over one period, the predicted timeline of its tasks
with the critical path, and several steps of the simulation and of each run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from meshwright.planner.analysis.explain import explain
from meshwright.planner.analysis.trace_analysis import step_ends
from meshwright.planner.plan.evaluate import items, ranks_of, task_name_of
from meshwright.planner.plan.plan import Placement, Plan, Refit
from meshwright.planner.report import formatting
from meshwright.planner.report.charts import Box, Label, Mark, lane_chart, linear
from meshwright.planner.report.contents import Contents, clock_label, run_label
from meshwright.planner.report.rendering import render
from meshwright.profiles.stages import StageGraph
from meshwright.profiles.trace import Run, Span

_MIN_HEIGHT, _MAX_HEIGHT, _RANK_HEIGHT = 170.0, 520.0, 24.0
"""Heights in pixels: the limits of the chart, so that it fits a screen, and the height of a rank within them."""

_MAX_NODE_LABELS = 24
"""Maximum number of labels beside a chart of the largest height, so that they do not overlap."""


def overview(plan: Plan) -> Markup:
    """Return the section with a chart of ranks over one period and a table of all placements."""
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
    colours = [(formatting.colour(stage.name, plan.graph), "solid", stage.name) for stage in plan.graph.stages]
    rows = _placement_rows(plan)
    return render("overview.html", caption=_caption(plan), chart=chart, colours=colours, placements=rows)


def works_ahead(plan: Plan) -> bool:
    """True if some stage works ahead of training."""
    return any(placement.steps_ahead for placement in plan.placements)


def _caption(plan: Plan) -> str:
    period = f"One period of {formatting.seconds(plan.period_seconds)}: ranks from top to bottom, grouped by node."
    if not works_ahead(plan):
        return f"{period} Every stage works on the same step; ranks are idle where nothing is drawn."
    return f"{period} Stages that work ahead of training name their step; ranks are idle where nothing is drawn."


def _task_boxes(plan: Plan) -> Iterator[Box]:
    for item in items(plan):
        if item.end_seconds == item.start_seconds:
            continue
        name = task_name_of(item)
        span = f"{formatting.seconds(item.start_seconds)} to {formatting.seconds(item.end_seconds)}"
        for first, last in formatting.consecutive(ranks_of(plan, item)):
            yield Box(
                first=first,
                last=last,
                start=item.start_seconds,
                end=item.end_seconds,
                colour=formatting.colour(name, plan.graph),
                title=f"{name} on ranks {formatting.ranks(ranks_of(plan, item))}, {span}",
                lines=_lines(plan, item),
            )


def _lines(plan: Plan, item: Placement | Refit) -> tuple[str, ...]:
    if isinstance(item, Refit):
        return (task_name_of(item),)
    step = (formatting.step(item.steps_ahead),) if works_ahead(plan) else ()
    return (item.stage, *step, str(item.layout), formatting.schedule(item.schedule))


def _nodes(plan: Plan) -> list[Label]:
    """A label for each node, or for several nodes together where there are many."""
    cluster = plan.facts.cluster
    nodes_per_label = -(-cluster.nodes // _MAX_NODE_LABELS)
    labels = []
    for node in range(0, cluster.nodes, nodes_per_label):
        first, stop = (min(n, cluster.nodes) * cluster.ranks_per_node for n in (node, node + nodes_per_label))
        nodes = formatting.ranks(range(node, min(node + nodes_per_label, cluster.nodes)))
        name = f"node {nodes}: {formatting.ranks(range(first, stop))}" if nodes_per_label == 1 else f"nodes {nodes}"
        labels.append(Label(first, stop - 1, name))
    return labels


def _placement_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    for p in sorted(plan.placements, key=lambda p: p.start_seconds):
        yield (
            p.stage,
            formatting.ranks(plan.pool(p.pool).ranks),
            str(p.layout),
            formatting.schedule(p.schedule),
            formatting.step(p.steps_ahead),
            f"{p.start_seconds:.3f}",
            f"{p.cost.total:.3f}",
        )


_PERIOD_LANE_HEIGHT = 24.0
"""Height of a task in pixels, with room for its text."""


def period_timeline(plan: Plan) -> Markup:
    """Return the section with the tasks of a period by their start; those off the critical path are pale."""
    path = explain(plan).critical_path
    rows = [
        (
            f"{entry.start_seconds:.3f}",
            f"{entry.seconds:.3f}",
            entry.task,
            entry.because,
            ", ".join(f"{term.name} {formatting.seconds(term.amount)}" for term in entry.largest_terms),
        )
        for entry in path
    ]
    chart = _period_chart(plan, {entry.task for entry in path}, plan.period_seconds)
    return render("period.html", chart=chart, critical_path=rows)


def period_chart(plan: Plan, end_seconds: float) -> Markup:
    """Return the chart of the tasks of a period by their start, over an axis that ends at `end_seconds`."""
    return _period_chart(plan, {entry.task for entry in explain(plan).critical_path}, end_seconds)


def _period_chart(plan: Plan, critical: Set[str], end_seconds: float) -> Markup:
    shown = sorted((i for i in items(plan) if i.cost.total), key=lambda i: (i.start_seconds, i.end_seconds))
    boxes = []
    for lane, item in enumerate(shown):
        name = task_name_of(item)
        step = f", {formatting.step(item.steps_ahead)}" if isinstance(item, Placement) and works_ahead(plan) else ""
        boxes.append(
            Box(
                first=lane,
                last=lane,
                start=item.start_seconds,
                end=item.end_seconds,
                colour=formatting.colour(name, plan.graph),
                title=f"{name}: {formatting.seconds(item.start_seconds)} to {formatting.seconds(item.end_seconds)}",
                lines=(f"{formatting.seconds(item.cost.total)}{step}",),
                look="solid" if name in critical else "faint",
            )
        )
    return lane_chart(
        boxes,
        axis=linear(0.0, end_seconds),
        unit="s",
        num_lanes=len(shown),
        lane_height=_PERIOD_LANE_HEIGHT,
        labels=[Label(lane, lane, task_name_of(item)) for lane, item in enumerate(shown)],
        describe="when each task of a period runs, as predicted",
    )


_MAX_STEPS = 3
"""Maximum number of steps that are drawn after the first."""

_MAX_LANES = 64
"""Maximum number of ranks with a lane each; with more, a lane would be thinner than a line."""

_MAX_LABELS = 16
"""Maximum number of labels beside the lanes."""

_MIN_TIMELINE_HEIGHT, _MAX_TIMELINE_HEIGHT, _TIMELINE_RANK_HEIGHT = 60.0, 400.0, 22.0
"""Heights in pixels: the limits of a chart, and the height of a rank within them."""

_TWO_LINE_HEIGHT = 28.0
"""The height in pixels from which a box shows its stage and its step in two lines."""

_HIDDEN_KINDS = ("send", "receive")
"""Kinds of spans that are not drawn: a rank that waits for a message is idle."""


def timelines(contents: Contents) -> Markup:
    """Return the section with a chart of the simulation and of each run."""
    plan, simulation = contents.plan, contents.simulation
    simulated = Run(spans=simulation.spans, name=f"with {simulation.durations} durations")
    return render(
        "timelines.html",
        colours_of_stages=[(formatting.colour(p.stage, plan.graph), "solid", p.stage) for p in plan.placements],
        runs=[_timeline(plan, run) for run in (simulated, *contents.runs)],
    )


@dataclass(frozen=True, kw_only=True)
class _Timeline:
    """The chart of a run; `which_ranks` is empty if it shows all of them."""

    clock: str
    name: str
    which_ranks: str
    chart: Markup


def _timeline(plan: Plan, run: Run) -> _Timeline:
    start, end, ends = _window(plan.graph, run.spans)
    num_ranks = plan.facts.cluster.num_ranks
    shown = shown_ranks(plan)
    height = min(max(_TIMELINE_RANK_HEIGHT * len(shown), _MIN_TIMELINE_HEIGHT), _MAX_TIMELINE_HEIGHT)
    chart = lane_chart(
        _span_boxes(plan.graph, _between(run.spans, start, end), shown, start, height),
        axis=linear(0.0, end - start),
        unit="s",
        num_lanes=len(shown),
        lane_height=height / len(shown),
        labels=_labels(shown),
        rules=_node_borders(plan, shown),
        marks=[Mark(at - start, f"end of step {step}") for step, at in ends.items()],
        describe=f"what every rank does over some steps, {run_label(run)}",
    )
    which_ranks = (
        f"; {len(shown)} of the {num_ranks} ranks are shown, some of every pool" if len(shown) < num_ranks else ""
    )
    return _Timeline(clock=clock_label(run), name=run.name, which_ranks=which_ranks, chart=chart)


def shown_ranks(plan: Plan) -> list[int]:
    """Return the ranks to draw: all, or where there are many, some of each set of ranks that are in the same pools."""
    num_ranks = plan.facts.cluster.num_ranks
    if num_ranks <= _MAX_LANES:
        return list(range(num_ranks))
    borders = sorted({0, num_ranks, *(end for p in plan.pools for end in (p.ranks.start, p.ranks.stop))})
    shown: list[int] = []
    for first, stop in pairwise(borders):
        size = stop - first
        lanes = min(size, max(1, round(_MAX_LANES * size / num_ranks)))
        shown += [first + size * lane // lanes for lane in range(lanes)]
    return shown


def _node_borders(plan: Plan, shown: Sequence[int]) -> list[float]:
    """The lanes at which a node starts, if every rank has a lane."""
    per_node = plan.facts.cluster.ranks_per_node
    return [rank for rank in shown if rank % per_node == 0] if len(shown) == plan.facts.cluster.num_ranks else []


def _window(graph: StageGraph, spans: Sequence[Span]) -> tuple[float, float, dict[int, float]]:
    """The time window to draw, with the ends of its steps: from the end of the first step, which is a warm-up, through
    several more. A single step is drawn whole."""
    ends = step_ends(graph, spans)
    (first, first_end), *others = ends.items()
    if not others:
        return min(span.start_seconds for span in spans), first_end, {first: first_end}
    shown = dict(others[:_MAX_STEPS])
    return first_end, max(shown.values()), shown


def _between(spans: Sequence[Span], start: float, end: float) -> list[Span]:
    """The spans that overlap a time window."""
    return [span for span in spans if span.end_seconds > start and span.start_seconds < end]


def _span_boxes(
    graph: StageGraph, spans: Sequence[Span], shown: Sequence[int], window_start: float, height: float
) -> Iterator[Box]:
    """Boxes of the spans; neighbouring lanes with the same instruction of a step at the same time share a box."""
    lane_height = height / len(shown)
    lane_of = {rank: lane for lane, rank in enumerate(shown)}
    lanes: dict[tuple[int, str, float, float], set[int]] = defaultdict(set)
    for span in spans:
        if span.rank in lane_of and span.kind not in _HIDDEN_KINDS and span.seconds:
            lanes[span.step, span.instruction, span.start_seconds, span.end_seconds].add(lane_of[span.rank])
    for (step, name, start, end), lanes_of_box in lanes.items():
        times = f"{formatting.seconds(start - window_start)} to {formatting.seconds(end - window_start)}"
        for first, last in formatting.consecutive(lanes_of_box):
            ranks = formatting.ranks(shown[lane] for lane in range(first, last + 1))
            is_flat = (last + 1 - first) * lane_height < _TWO_LINE_HEIGHT
            yield Box(
                first=first,
                last=last,
                start=start - window_start,
                end=end - window_start,
                colour=formatting.colour(name, graph),
                title=f"{name} of step {step} on ranks {ranks}: {formatting.seconds(end - start)}, {times}",
                lines=(f"{name}, step {step}",) if is_flat else (name, f"step {step}"),
            )


def _labels(shown: Sequence[int]) -> list[Label]:
    """Labels of the ranks beside their lanes, one for several ranks where there are many."""
    ranks_per_label = -(-len(shown) // _MAX_LABELS)
    starts = range(0, len(shown), ranks_per_label)
    ends = [min(lane + ranks_per_label, len(shown)) - 1 for lane in starts]
    return [Label(a, b, formatting.ranks(range(shown[a], shown[b] + 1))) for a, b in zip(starts, ends, strict=True)]
