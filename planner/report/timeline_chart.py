"""The section of timelines: several steps on every rank, simulated, rehearsed or measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from meshwright.planner.analysis.compare import step_ends
from meshwright.planner.plan.plan import Plan
from meshwright.planner.report import words
from meshwright.planner.report.axis import linear
from meshwright.planner.report.contents import Contents, clock_label, run_label
from meshwright.planner.report.html import Html, badge, note, section, tag
from meshwright.planner.report.lanes import Box, Label, Mark, lane_chart, legend
from meshwright.profiles.stages import StageGraph
from meshwright.profiles.trace import Run, Span

_MAX_STEPS = 3
"""The most steps that are drawn after the first."""

_MAX_LANES = 64
"""The most ranks with a lane each; with more, a lane would be thinner than a line."""

_MAX_LABELS = 16
"""The most labels beside the lanes."""

_MIN_TIMELINE_HEIGHT, _MAX_TIMELINE_HEIGHT, _TIMELINE_RANK_HEIGHT = 60.0, 400.0, 22.0
"""Heights in pixels: limits of a chart, and of a rank where there are few."""

_TWO_LINE_HEIGHT = 28.0
"""The height in pixels from which a box shows its stage and its step in two lines."""

_HIDDEN_KINDS = ("send", "receive")
"""Kinds of spans that are not drawn: a rank that waits for a message is idle."""


def timelines(contents: Contents) -> Html:
    """Return the section: a chart of the simulation and of each run."""
    plan, simulation = contents.plan, contents.simulation
    simulated = Run(spans=simulation.spans, name=f"with {simulation.durations} durations")
    charts = [part for run in (simulated, *contents.runs) for part in _timeline(plan, run)]
    caption = (
        "Every rank over some steps; ranks are idle where nothing is drawn. Rest the pointer on a box for its times."
    )
    entries = [(words.colour(p.stage, plan.graph), "solid", p.stage) for p in plan.placements]
    entries += [("c-refit", "solid", "refit"), ("c-other", "solid", "evaluation, checkpoint")]
    return section("timelines", "Timelines", note(caption), legend(entries), *charts)


def _timeline(plan: Plan, run: Run) -> Iterator[Html]:
    start, end, ends = _window(plan.graph, run.spans)
    num_ranks = plan.facts.cluster.num_ranks
    shown = shown_ranks(plan)
    height = min(max(_TIMELINE_RANK_HEIGHT * len(shown), _MIN_TIMELINE_HEIGHT), _MAX_TIMELINE_HEIGHT)
    charts = lane_chart(
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
    shown_note = (
        f"; {len(shown)} of the {num_ranks} ranks are shown, some of every pool" if len(shown) < num_ranks else ""
    )
    yield tag("h3", badge(clock_label(run)), run.name, shown_note, class_="timeline")
    yield charts


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
        times = f"{words.seconds(start - window_start)} to {words.seconds(end - window_start)}"
        for first, last in words.consecutive(lanes_of_box):
            ranks = words.ranks(shown[lane] for lane in range(first, last + 1))
            is_flat = (last + 1 - first) * lane_height < _TWO_LINE_HEIGHT
            yield Box(
                first=first,
                last=last,
                start=start - window_start,
                end=end - window_start,
                colour=words.colour(name, graph),
                title=f"{name} of step {step} on ranks {ranks}: {words.seconds(end - start)}, {times}",
                lines=(f"{name}, step {step}",) if is_flat else (name, f"step {step}"),
            )


def _labels(shown: Sequence[int]) -> list[Label]:
    """Labels of the ranks beside their lanes, one for several ranks where there are many."""
    ranks_per_label = -(-len(shown) // _MAX_LABELS)
    starts = range(0, len(shown), ranks_per_label)
    ends = [min(lane + ranks_per_label, len(shown)) - 1 for lane in starts]
    return [Label(a, b, words.ranks(range(shown[a], shown[b] + 1))) for a, b in zip(starts, ends, strict=True)]
