"""The section on idle time: busy and waiting time of each pool in the simulation, and what it waits for."""

from __future__ import annotations

from meshwright.planner.report import words
from meshwright.planner.report.axis import linear
from meshwright.planner.report.html import Html, badge, note, section, table
from meshwright.planner.report.lanes import Box, Label, lane_chart, legend
from meshwright.planner.simulation.simulate import Simulation, TimeUse
from meshwright.profiles.stages import StageGraph

_POOL_LANE_HEIGHT = 30.0
"""Height of a bar in pixels, with room for its text."""

_MAX_CAUSES, _MIN_CAUSE_SHARE = 4, 0.0005
"""The causes of waiting that are listed for a pool: their number, and the smallest share, which does not round to 0."""


def idle(simulation: Simulation, graph: StageGraph) -> Html:
    """Return the section: a bar for each pool, busy time in full colour, waiting hatched in the colour of its cause."""
    pools = simulation.pools
    chart = lane_chart(
        [box for lane, use in enumerate(pools) for box in _pool_bar(lane, use, graph)],
        axis=linear(0.0, 100.0),
        unit="%",
        num_lanes=len(pools),
        lane_height=_POOL_LANE_HEIGHT,
        labels=[Label(lane, lane, use.name) for lane, use in enumerate(pools)],
        describe="what the pools are busy with and what they wait for",
    )
    steps = simulation.steps
    summary = note(
        badge("SIMULATED"),
        f"{len(steps.seconds)} steps with {simulation.durations} durations: mean {words.seconds(steps.mean)}, median "
        f"{words.seconds(steps.p50)}, p90 {words.seconds(steps.p90)}, p99 {words.seconds(steps.p99)}; the plan says "
        f"{words.seconds(simulation.plan_seconds)}. {words.count(simulation.tokens_per_second)} response tokens/s.",
    )
    entries = (("c-other", "solid", "busy, in the colour of the stage"), ("c-other", "hatched", "waiting for it"))
    rows = [(use.name, words.percent(use.idle_share), _causes(use)) for use in pools]
    return section("idle", "Idle time", summary, legend(entries), chart, table(("pool", "idle", "waiting for"), rows))


def _pool_bar(lane: int, use: TimeUse, graph: StageGraph) -> list[Box]:
    boxes, start = [], 0.0
    parts = [(share, "solid", share.what) for share in use.busy]
    parts += [(share, "hatched", f"waits for {share.what}") for share in use.waits]
    for share, look, text in parts:
        boxes.append(
            Box(
                first=lane,
                last=lane,
                start=100 * start,
                end=100 * (start + share.share),
                colour=words.colour(share.what, graph),
                title=f"{text}: {words.percent(share.share)}",
                lines=(f"{text} {words.percent(share.share)}",),
                look=look,
            )
        )
        start += share.share
    return boxes


def _causes(use: TimeUse) -> str:
    """The largest causes of waiting, without those that round to 0.0%."""
    shares = [share for share in use.waits[:_MAX_CAUSES] if share.share >= _MIN_CAUSE_SHARE] or use.waits[:1]
    return ", ".join(f"{share.what} {words.percent(share.share)}" for share in shares) or "nothing"
