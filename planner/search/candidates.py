"""A legal choice with what it costs, and which of several no other beats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from meshwright.cost_models.question import Bytes, Call, CostModel, LayoutCosts
from meshwright.planner.plan.calls import Choice
from meshwright.planner.solver import dominance
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Schedule

Amounts: TypeAlias = tuple[float, float, float, float, float]
"""What has to be small: seconds, those after what is streamed, resident bytes but weights, weights, transient bytes."""


class Candidate(NamedTuple):
    """A legal choice and what it costs: seconds per turn, of them those that remain when what it streams has ended,
    bytes on the fullest rank, of its resident ones those of its weights. `late_seconds` are those that rewards on hosts
    take at least after a generation, beyond what they take after every one (`host_workers.late_seconds`)."""

    layout: Layout
    schedule: Schedule
    seconds: float
    tail_seconds: float
    resident_bytes: float
    weights_bytes: float
    transient_bytes: float
    host_bytes: float = 0.0
    late_seconds: float = 0.0

    @property
    def choice(self) -> Choice:
        return Choice(self.layout, self.schedule)

    @property
    def peak_bytes(self) -> float:
        return self.resident_bytes + self.transient_bytes

    @property
    def private_bytes(self) -> float:
        """Resident, and of no use to another stage."""
        return self.resident_bytes - self.weights_bytes

    @property
    def held(self) -> tuple[float, float, float]:
        """What it keeps of a device: resident bytes but weights, weights, transient bytes."""
        return self.private_bytes, self.weights_bytes, self.transient_bytes

    @property
    def amounts(self) -> Amounts:
        """What has to be small."""
        return self.seconds, self.tail_seconds, *self.held


def costed(model: CostModel, call: Call) -> Candidate:
    """The choice that a model is asked about, with what it costs."""
    costs, schedule = model.on_layout(call), call.schedule
    return candidate_of(costs, call.layout, schedule, costs.seconds(schedule), costs.bytes(schedule))


def candidate_of(costs: LayoutCosts, layout: Layout, schedule: Schedule, seconds: float, held: Bytes) -> Candidate:
    """The choice whose seconds and bytes are known."""
    tail = costs.tail_seconds(schedule) if schedule.chunk_tokens else seconds
    return Candidate(layout, schedule, seconds, tail, *held)


def undominated(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The candidates that no other beats; of equals the first stays."""
    amounts = [(*c.amounts, c.seconds + c.late_seconds) for c in candidates]
    return tuple(candidates[index] for index in dominance.undominated(amounts))


def undominated_generations(
    candidates: Sequence[Candidate], late: Callable[[Candidate], float]
) -> tuple[Candidate, ...]:
    """Those of a generation whose rewards are waited for; `late` tells for how long at least.

    Of those with as many replicas and slots the faster one has its rewards sooner, so that few need be asked.
    """
    groups: dict[tuple[int, int], list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault((candidate.layout.dp, candidate.schedule.generation_slots), []).append(candidate)
    kept = (one for same in groups.values() for one in undominated(same))
    return undominated([one._replace(late_seconds=late(one)) for one in kept])


def undominated_by_layout(candidates: Iterable[Candidate]) -> Iterator[Candidate]:
    """Of an interleaved pipeline, which no other stage shares and which is refit as any other number of chunks is, a
    choice is kept where none of as many chunks or fewer beats it."""
    groups: dict[Layout, dict[int, list[Candidate]]] = {}
    for candidate in candidates:
        layout = candidate.layout
        base = replace(layout, vpp=1) if layout.vpp > 1 else layout
        groups.setdefault(base, {}).setdefault(layout.vpp, []).append(candidate)
    for by_chunks in groups.values():
        plain = undominated(by_chunks.pop(1, ()))
        yield from plain
        interleaved = [candidate for vpp in by_chunks for candidate in by_chunks[vpp]]
        if interleaved:
            yield from (kept for kept in undominated([*plain, *interleaved]) if kept.layout.vpp > 1)
