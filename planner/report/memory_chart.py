"""Memory of every rank at its worst instant: the copies that stay, the stage that needs most on top, and the limit."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from meshwright.planner.plan.evaluate import resident_bytes
from meshwright.planner.plan.plan import Placement, Plan
from meshwright.planner.report import words
from meshwright.planner.report.axis import linear
from meshwright.planner.report.html import Html, note, section, table
from meshwright.planner.report.lanes import Box, Label, Mark, legend, picture

_LANE = 30.0
"""Pixels of the height of a bar, with room for its text."""

_LONGEST_NAME = 20
"""Letters that the margin beside a bar has room for."""

_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
"""Of the axis, the largest that a device fills."""


@dataclass(frozen=True)
class Filling:
    """What some ranks hold alike: bytes of each copy that stays, and the stage that needs most while it runs."""

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


def fillings(plan: Plan) -> tuple[Filling, ...]:
    """The memory of all ranks, those of equal contents together."""
    alike: dict[tuple[int, tuple[str, ...]], list[int]] = defaultdict(list)
    for rank in range(plan.facts.cluster.num_ranks):
        stages = tuple(p.stage for p in plan.placements if rank in plan.pool(p.pool).ranks)
        alike[plan.facts.cluster.part_of(rank), stages].append(rank)
    return tuple(_filling(plan, stages, ranks) for (_, stages), ranks in alike.items())


def memory(plan: Plan) -> Html:
    """A bar for all ranks of equal contents, against what a device can hold."""
    cluster, found = plan.facts.cluster, fillings(plan)
    limits = sorted({part.device.usable_bytes for part in cluster.parts})
    usable = limits[-1]
    fullest = max((f.peak_bytes for f in found), default=0.0)
    scale, unit = next(((s, u) for s, u in _UNITS if usable >= s), _UNITS[-1])
    drawn = picture(
        [box for lane, filling in enumerate(found) for box in _bar(plan, lane, filling, scale)],
        axis=linear(0.0, max(usable, fullest) * 1.02 / scale),
        unit=unit,
        num_lanes=len(found),
        lane_height=_LANE,
        labels=[Label(lane, lane, _named(filling)) for lane, filling in enumerate(found)],
        marks=[Mark(limit / scale, f"usable: {words.size(limit)}", limit=True) for limit in limits],
        describe="memory of the ranks at their worst instant against the limit",
    )
    owners = dict.fromkeys(stage for filling in found for stage, _ in filling.resident)
    entries = [(words.colour(stage, plan.graph), "solid", f"{stage}, stays") for stage in owners]
    entries.append(("c-other", "hatched", "the most that a stage needs while it runs"))
    rows = [_row(filling, cluster.usable_bytes(filling.ranks[0])) for filling in found]
    headings = ("ranks", "stays", "largest copy", "while a stage runs", "which", "at worst", "free")
    said = note(
        f"{_device(plan)}: what stays on a rank whatever runs, and the most that a stage needs on top. "
        "Stages that share weights count them once."
    )
    return section("memory", "Memory", said, legend(entries), drawn, table(headings, rows, numbers=(1, 3, 5, 6)))


def _device(plan: Plan) -> str:
    devices = {part.device.name: part.device for part in plan.facts.cluster.parts}
    return "; ".join(
        f"{name} has {words.size(device.memory_bytes)}, of which {words.size(device.usable_bytes)} are usable"
        for name, device in devices.items()
    )


def _filling(plan: Plan, stages: tuple[str, ...], ranks: list[int]) -> Filling:
    here = [plan.placement(stage) for stage in stages]
    resident = [(p.stage, resident_bytes(plan, p)) for p in here]
    return Filling(
        ranks=tuple(ranks),
        resident=tuple((stage, num_bytes) for stage, num_bytes in resident if num_bytes),
        worst=max(here, key=lambda p: p.transient.total, default=None),
    )


def _named(filling: Filling) -> str:
    """The ranks, or only their number where they are scattered."""
    name = f"ranks {words.ranks(filling.ranks)}"
    return name if len(name) <= _LONGEST_NAME else f"{len(filling.ranks)} ranks"


def _bar(plan: Plan, lane: int, filling: Filling, scale: float) -> list[Box]:
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


def _row(filling: Filling, usable: int) -> tuple[str, ...]:
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
