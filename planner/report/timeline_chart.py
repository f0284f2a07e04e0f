"""Several steps on every rank, by any clock: simulated, rehearsed or measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from meshwright.planner.analysis.compare import step_ends
from meshwright.planner.plan.plan import Plan
from meshwright.planner.report import words
from meshwright.planner.report.axis import linear
from meshwright.planner.report.contents import Contents, clock, named
from meshwright.planner.report.html import Html, badge, note, section, tag
from meshwright.planner.report.lanes import Box, Label, Mark, legend, picture
from meshwright.profiles.stages import StageGraph
from meshwright.profiles.trace import Run, Span

_MOST_STEPS = 3
"""Drawn after the first: enough to see that they are alike."""

_MOST_LANES = 64
"""Ranks that have a lane each: more would be thinner than a line."""

_MOST_LABELS = 16
"""Beside the lanes, which lie close where there are many."""

_LEAST_HEIGHT, _MOST_HEIGHT, _RANK_HEIGHT = 60.0, 400.0, 22.0
"""Pixels of a picture, and of a rank where there are few."""

_TWO_LINES = 28.0
"""Pixels that a stage and its step need below each other; a flatter box has both in one line."""

_QUIET = ("send", "receive")
"""Kinds that are not drawn: a rank that waits for a message is idle."""


def timelines(contents: Contents) -> Html:
    """A picture for the simulation and for each run."""
    plan, simulation = contents.plan, contents.simulation
    simulated = Run(spans=simulation.spans, name=f"with {simulation.durations} durations")
    drawn = [part for run in (simulated, *contents.runs) for part in _timeline(plan, run)]
    said = "Every rank over some steps; ranks are idle where nothing is drawn. Rest the pointer on a box for its times."
    entries = [(words.colour(p.stage, plan.graph), "solid", p.stage) for p in plan.placements]
    entries += [("c-refit", "solid", "refit"), ("c-other", "solid", "evaluation, checkpoint")]
    return section("timelines", "Timelines", note(said), legend(entries), *drawn)


def _timeline(plan: Plan, run: Run) -> Iterator[Html]:
    start, end, ends = _window(plan.graph, run.spans)
    num_ranks = plan.facts.cluster.num_ranks
    shown = shown_ranks(plan)
    height = min(max(_RANK_HEIGHT * len(shown), _LEAST_HEIGHT), _MOST_HEIGHT)
    drawn = picture(
        _boxes(plan.graph, _between(run.spans, start, end), shown, start, height),
        axis=linear(0.0, end - start),
        unit="s",
        num_lanes=len(shown),
        lane_height=height / len(shown),
        labels=_labels(shown),
        rules=_node_borders(plan, shown),
        marks=[Mark(at - start, f"end of step {step}") for step, at in ends.items()],
        describe=f"what every rank does over some steps, {named(run)}",
    )
    some = f"; {len(shown)} of the {num_ranks} ranks are shown, some of every pool" if len(shown) < num_ranks else ""
    yield tag("h3", badge(clock(run)), run.name, some, class_="timeline")
    yield drawn


def shown_ranks(plan: Plan) -> list[int]:
    """All ranks, or where there are many some of every set of ranks that are in the same pools."""
    num_ranks = plan.facts.cluster.num_ranks
    if num_ranks <= _MOST_LANES:
        return list(range(num_ranks))
    borders = sorted({0, num_ranks, *(end for p in plan.pools for end in (p.ranks.start, p.ranks.stop))})
    shown: list[int] = []
    for first, after in pairwise(borders):
        size = after - first
        lanes = min(size, max(1, round(_MOST_LANES * size / num_ranks)))
        shown += [first + size * lane // lanes for lane in range(lanes)]
    return shown


def _node_borders(plan: Plan, shown: Sequence[int]) -> list[float]:
    """Lanes at which a node begins, where every rank has its lane."""
    per_node = plan.facts.cluster.ranks_per_node
    return [rank for rank in shown if rank % per_node == 0] if len(shown) == plan.facts.cluster.num_ranks else []


def _window(graph: StageGraph, spans: Sequence[Span]) -> tuple[float, float, dict[int, float]]:
    """From the end of the first step, which warms up, through some more, with their ends; a single step is whole."""
    ends = step_ends(graph, spans)
    (first, begins), *others = ends.items()
    if not others:
        return min(span.start_seconds for span in spans), begins, {first: begins}
    shown = dict(others[:_MOST_STEPS])
    return begins, max(shown.values()), shown


def _between(spans: Sequence[Span], start: float, end: float) -> list[Span]:
    """The spans that reach into a window."""
    return [span for span in spans if span.end_seconds > start and span.start_seconds < end]


def _boxes(
    graph: StageGraph, spans: Sequence[Span], shown: Sequence[int], began: float, height: float
) -> Iterator[Box]:
    """One box for all neighbouring lanes on which an instruction of a step ran at the same time."""
    lane_height = height / len(shown)
    lane_of = {rank: lane for lane, rank in enumerate(shown)}
    lanes: dict[tuple[int, str, float, float], set[int]] = defaultdict(set)
    for span in spans:
        if span.rank in lane_of and span.kind not in _QUIET and span.seconds:
            lanes[span.step, span.instruction, span.start_seconds, span.end_seconds].add(lane_of[span.rank])
    for (step, name, start, end), found in lanes.items():
        times = f"{words.seconds(start - began)} to {words.seconds(end - began)}"
        for first, last in words.consecutive(found):
            ranks = words.ranks(shown[lane] for lane in range(first, last + 1))
            is_flat = (last + 1 - first) * lane_height < _TWO_LINES
            yield Box(
                first=first,
                last=last,
                start=start - began,
                end=end - began,
                colour=words.colour(name, graph),
                title=f"{name} of step {step} on ranks {ranks}: {words.seconds(end - start)}, {times}",
                lines=(f"{name}, step {step}",) if is_flat else (name, f"step {step}"),
            )


def _labels(shown: Sequence[int]) -> list[Label]:
    """Ranks beside their lanes, some at a time where there are many."""
    every = -(-len(shown) // _MOST_LABELS)
    starts = range(0, len(shown), every)
    ends = [min(lane + every, len(shown)) - 1 for lane in starts]
    return [Label(a, b, words.ranks(range(shown[a], shown[b] + 1))) for a, b in zip(starts, ends, strict=True)]
