"""The sections on what a plan uses: the terms of every predicted time, the peak memory of every rank, and the busy and
idle time of every pool.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from meshwright.cost_models.cost import Source, Term
from meshwright.planner.analysis.plan_summary import memory_parts
from meshwright.planner.plan.evaluate import Item, items, resident_bytes, task_name_of
from meshwright.planner.plan.plan import Placement, Plan
from meshwright.planner.report import formatting
from meshwright.planner.report.charts import Box, Label, Mark, lane_chart, linear
from meshwright.planner.report.rendering import render
from meshwright.planner.simulation.simulate import Simulation, TimeUse
from meshwright.profiles.stages import StageGraph

_TASK_LANE_HEIGHT = 30.0
"""Height of a bar in pixels, with room for its text."""

_OPACITIES = (1.0, 0.8, 0.62, 0.47, 0.35)
"""Opacities of the terms of a bar, the largest term first; further terms have the last opacity."""

_MIN_TERM_SHARE = 0.001
"""The smallest share of a cost with which a term is listed in the table."""


def terms(plan: Plan) -> Markup:
    """Return the section on costs: a bar for each task, its terms from the largest to the smallest.

    Extrapolated terms are hatched.
    """
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
    extrapolated = [task_name_of(item) for item in shown if item.cost.source is Source.EXTRAPOLATED]
    return render("terms.html", extrapolated=extrapolated, chart=chart, rows=rows)


def _largest_first(item: Item) -> Sequence[Term]:
    return sorted(item.cost.merged().terms, key=lambda term: -term.amount)


def _task_bar(plan: Plan, lane: int, item: Item) -> list[Box]:
    boxes, start = [], 0.0
    for position, term in enumerate(_largest_first(item)):
        extrapolated = term.source is Source.EXTRAPOLATED
        boxes.append(
            Box(
                first=lane,
                last=lane,
                start=start,
                end=start + term.amount,
                colour=formatting.colour(task_name_of(item), plan.graph),
                title=f"{task_name_of(item)}: {term.name} {formatting.seconds(term.amount)}, {term.source}",
                lines=(f"{term.name} {formatting.seconds(term.amount)}",) if position < 2 or extrapolated else (),
                look="hatched" if extrapolated else "solid",
                opacity=_OPACITIES[min(position, len(_OPACITIES) - 1)],
            )
        )
        start += term.amount
    return boxes


def _terms_text(item: Item) -> str:
    """The terms with their seconds, and with their source where it differs from that of the whole cost."""
    source = item.cost.source
    return ", ".join(
        f"{term.name} {formatting.seconds(term.amount)}" + (f" ({term.source})" if term.source is not source else "")
        for term in _largest_first(item)
        if term.amount >= _MIN_TERM_SHARE * item.cost.total
    )


_RANKS_LANE_HEIGHT = 30.0
"""Height of a bar in pixels, with room for its text."""

_MAX_NAME_LENGTH = 20
"""Maximum number of characters that fit in the margin beside a bar."""

_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
"""Units of the axis; the largest that a device fills is used."""


@dataclass(frozen=True)
class RankMemory:
    """The memory of ranks with equal contents: resident bytes by stage, and the stage with the most transient bytes."""

    ranks: tuple[int, ...]
    resident: tuple[tuple[str, float], ...]
    worst: Placement | None

    @property
    def resident_bytes(self) -> float:
        return sum(num_bytes for _, num_bytes in self.resident)

    @property
    def transient_bytes(self) -> float:
        return self.worst.transient.total if self.worst else 0.0

    @property
    def peak_bytes(self) -> float:
        return self.resident_bytes + self.transient_bytes


def memory_of_ranks(plan: Plan) -> tuple[RankMemory, ...]:
    """Return the memory of all ranks, grouped by equal contents."""
    ranks_by_contents: dict[tuple[int, tuple[str, ...]], list[int]] = defaultdict(list)
    for rank in range(plan.facts.cluster.num_ranks):
        stages = tuple(p.stage for p in plan.placements if rank in plan.pool(p.pool).ranks)
        ranks_by_contents[plan.facts.cluster.part_of(rank), stages].append(rank)
    return tuple(_rank_memory(plan, stages, ranks) for (_, stages), ranks in ranks_by_contents.items())


def memory(plan: Plan) -> Markup:
    """Return the section on memory: a bar for each group of ranks with equal contents, against the usable memory."""
    cluster, rank_groups = plan.facts.cluster, memory_of_ranks(plan)
    limits = sorted({part.device.usable_bytes for part in cluster.parts})
    usable = limits[-1]
    fullest = max((group.peak_bytes for group in rank_groups), default=0.0)
    scale, unit = next(((s, u) for s, u in _UNITS if usable >= s), _UNITS[-1])
    chart = lane_chart(
        [box for lane, group in enumerate(rank_groups) for box in _memory_bar(plan, lane, group, scale)],
        axis=linear(0.0, max(usable, fullest) * 1.02 / scale),
        unit=unit,
        num_lanes=len(rank_groups),
        lane_height=_RANKS_LANE_HEIGHT,
        labels=[Label(lane, lane, _ranks_label(group)) for lane, group in enumerate(rank_groups)],
        marks=[Mark(limit / scale, f"usable: {formatting.size(limit)}", limit=True) for limit in limits],
        describe="peak memory of the ranks against the limit",
    )
    owners = dict.fromkeys(stage for group in rank_groups for stage, _ in group.resident)
    return render(
        "memory.html",
        devices=_device_memory(plan),
        colours_of_stages=[(formatting.colour(stage, plan.graph), "solid", f"{stage}, stays") for stage in owners],
        chart=chart,
        rows=[_row(group, cluster.usable_bytes(group.ranks[0])) for group in rank_groups],
        parts=[
            (part.stage, part.what, "always" if part.stays else "while it runs", formatting.size(part.num_bytes))
            for part in memory_parts(plan)
        ],
    )


def _device_memory(plan: Plan) -> str:
    devices = {part.device.name: part.device for part in plan.facts.cluster.parts}
    return "; ".join(
        f"{name} has {formatting.size(device.memory_bytes)}, of which {formatting.size(device.usable_bytes)} are usable"
        for name, device in devices.items()
    )


def _rank_memory(plan: Plan, stages: tuple[str, ...], ranks: list[int]) -> RankMemory:
    placements = [plan.placement(stage) for stage in stages]
    resident = [(p.stage, resident_bytes(plan, p)) for p in placements]
    return RankMemory(
        ranks=tuple(ranks),
        resident=tuple((stage, num_bytes) for stage, num_bytes in resident if num_bytes),
        worst=max(placements, key=lambda p: p.transient.total, default=None),
    )


def _ranks_label(group: RankMemory) -> str:
    """The ranks of a group, or only their number if the list does not fit."""
    name = f"ranks {formatting.ranks(group.ranks)}"
    return name if len(name) <= _MAX_NAME_LENGTH else f"{len(group.ranks)} ranks"


def _memory_bar(plan: Plan, lane: int, group: RankMemory, scale: float) -> list[Box]:
    boxes, start = [], 0.0
    parts = [(stage, num_bytes, "solid", "stays") for stage, num_bytes in group.resident]
    if group.worst:
        parts.append((group.worst.stage, group.transient_bytes, "hatched", "while it runs"))
    for stage, num_bytes, look, when in parts:
        boxes.append(
            Box(
                first=lane,
                last=lane,
                start=start / scale,
                end=(start + num_bytes) / scale,
                colour=formatting.colour(stage, plan.graph),
                title=f"{stage}, {when}: {formatting.size(num_bytes)}",
                lines=(formatting.size(num_bytes),),
                look=look,
            )
        )
        start += num_bytes
    return boxes


def _row(group: RankMemory, usable: int) -> tuple[str, ...]:
    stage, num_bytes = max(group.resident, key=lambda part: part[1], default=("", 0.0))
    return (
        formatting.ranks(group.ranks),
        formatting.size(group.resident_bytes),
        f"{stage} {formatting.size(num_bytes)}" if stage else "",
        formatting.size(group.transient_bytes),
        group.worst.stage if group.worst else "",
        formatting.size(group.peak_bytes),
        formatting.size(usable - group.peak_bytes),
    )


_POOL_LANE_HEIGHT = 30.0
"""Height of a bar in pixels, with room for its text."""

_MAX_CAUSES, _MIN_CAUSE_SHARE = 4, 0.0005
"""The maximum number of causes of waiting that are listed for a pool, and the smallest share that is not shown as 0."""


def idle(simulation: Simulation, graph: StageGraph) -> Markup:
    """Return the section on idle time: a bar for each pool, busy time solid, waiting hatched in its cause's colour."""
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
    summary = (
        f"{len(steps.seconds)} steps with {simulation.durations} durations: mean {formatting.seconds(steps.mean)}, "
        f"median {formatting.seconds(steps.p50)}, p90 {formatting.seconds(steps.p90)}, "
        f"p99 {formatting.seconds(steps.p99)}; the plan predicts {formatting.seconds(simulation.plan_seconds)}. "
        f"{formatting.count(simulation.tokens_per_second)} response tokens/s."
    )
    rows = [(use.name, formatting.percent(use.idle_share), _causes(use)) for use in pools]
    return render("idle.html", summary=summary, chart=chart, rows=rows)


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
                colour=formatting.colour(share.what, graph),
                title=f"{text}: {formatting.percent(share.share)}",
                lines=(f"{text} {formatting.percent(share.share)}",),
                look=look,
            )
        )
        start += share.share
    return boxes


def _causes(use: TimeUse) -> str:
    """The largest causes of waiting, without those that round to 0.0%."""
    shares = [share for share in use.waits[:_MAX_CAUSES] if share.share >= _MIN_CAUSE_SHARE] or use.waits[:1]
    return ", ".join(f"{share.what} {formatting.percent(share.share)}" for share in shares) or "nothing"
