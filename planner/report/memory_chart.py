"""The section on memory: the peak of every rank from resident copies and the largest transient stage, and the limit."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from meshwright.planner.plan.evaluate import resident_bytes
from meshwright.planner.plan.plan import Placement, Plan
from meshwright.planner.report import words
from meshwright.planner.report.axis import linear
from meshwright.planner.report.html import Html, note, section, table
from meshwright.planner.report.lanes import Box, Label, Mark, lane_chart, legend

_RANKS_LANE_HEIGHT = 30.0
"""Height of a bar in pixels, with room for its text."""

_MAX_NAME_LENGTH = 20
"""The most letters that fit in the margin beside a bar."""

_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
"""Units of the axis; the largest that a device fills is used."""


@dataclass(frozen=True)
class RankMemory:
    """The equal contents of some ranks: resident bytes of each stage, and the stage with the most transient bytes."""

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
    return tuple(_filling(plan, stages, ranks) for (_, stages), ranks in ranks_by_contents.items())


def memory(plan: Plan) -> Html:
    """Return the section: a bar for each group of ranks with equal contents, against the usable memory of a device."""
    cluster, memory_fillings = plan.facts.cluster, memory_of_ranks(plan)
    limits = sorted({part.device.usable_bytes for part in cluster.parts})
    usable = limits[-1]
    fullest = max((f.peak_bytes for f in memory_fillings), default=0.0)
    scale, unit = next(((s, u) for s, u in _UNITS if usable >= s), _UNITS[-1])
    chart = lane_chart(
        [box for lane, filling in enumerate(memory_fillings) for box in _memory_bar(plan, lane, filling, scale)],
        axis=linear(0.0, max(usable, fullest) * 1.02 / scale),
        unit=unit,
        num_lanes=len(memory_fillings),
        lane_height=_RANKS_LANE_HEIGHT,
        labels=[Label(lane, lane, _ranks_label(filling)) for lane, filling in enumerate(memory_fillings)],
        marks=[Mark(limit / scale, f"usable: {words.size(limit)}", limit=True) for limit in limits],
        describe="peak memory of the ranks against the limit",
    )
    owners = dict.fromkeys(stage for filling in memory_fillings for stage, _ in filling.resident)
    entries = [(words.colour(stage, plan.graph), "solid", f"{stage}, stays") for stage in owners]
    entries.append(("c-other", "hatched", "the most that a stage needs while it runs"))
    rows = [_row(filling, cluster.usable_bytes(filling.ranks[0])) for filling in memory_fillings]
    headings = ("ranks", "stays", "largest copy", "while a stage runs", "which", "at worst", "free")
    summary = note(
        f"{_device_memory(plan)}: what stays on a rank whatever runs, and the most that a stage needs on top. "
        "Stages that share weights count them once."
    )
    return section("memory", "Memory", summary, legend(entries), chart, table(headings, rows, numbers=(1, 3, 5, 6)))


def _device_memory(plan: Plan) -> str:
    devices = {part.device.name: part.device for part in plan.facts.cluster.parts}
    return "; ".join(
        f"{name} has {words.size(device.memory_bytes)}, of which {words.size(device.usable_bytes)} are usable"
        for name, device in devices.items()
    )


def _filling(plan: Plan, stages: tuple[str, ...], ranks: list[int]) -> RankMemory:
    placements = [plan.placement(stage) for stage in stages]
    resident = [(p.stage, resident_bytes(plan, p)) for p in placements]
    return RankMemory(
        ranks=tuple(ranks),
        resident=tuple((stage, num_bytes) for stage, num_bytes in resident if num_bytes),
        worst=max(placements, key=lambda p: p.transient.total, default=None),
    )


def _ranks_label(filling: RankMemory) -> str:
    """The ranks of a group, or only their number where they are scattered."""
    name = f"ranks {words.ranks(filling.ranks)}"
    return name if len(name) <= _MAX_NAME_LENGTH else f"{len(filling.ranks)} ranks"


def _memory_bar(plan: Plan, lane: int, filling: RankMemory, scale: float) -> list[Box]:
    boxes, start = [], 0.0
    parts = [(stage, num_bytes, "solid", "stays") for stage, num_bytes in filling.resident]
    if filling.worst:
        parts.append((filling.worst.stage, filling.transient_bytes, "hatched", "while it runs"))
    for stage, num_bytes, look, when in parts:
        boxes.append(
            Box(
                first=lane,
                last=lane,
                start=start / scale,
                end=(start + num_bytes) / scale,
                colour=words.colour(stage, plan.graph),
                title=f"{stage}, {when}: {words.size(num_bytes)}",
                lines=(words.size(num_bytes),),
                look=look,
            )
        )
        start += num_bytes
    return boxes


def _row(filling: RankMemory, usable: int) -> tuple[str, ...]:
    stage, num_bytes = max(filling.resident, key=lambda part: part[1], default=("", 0.0))
    return (
        words.ranks(filling.ranks),
        words.size(filling.resident_bytes),
        f"{stage} {words.size(num_bytes)}" if stage else "",
        words.size(filling.transient_bytes),
        filling.worst.stage if filling.worst else "",
        words.size(filling.peak_bytes),
        words.size(usable - filling.peak_bytes),
    )
