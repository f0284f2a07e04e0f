"""A legal choice with its costs, and the Pareto filters over several choices."""

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
"""The amounts to minimise: seconds, tail seconds, private resident bytes, bytes of weights, transient bytes."""


class Candidate(NamedTuple):
    """A legal choice with its costs: seconds per period, and bytes on the fullest rank.

    `tail_seconds` remain after the end of what the stage streams; `weights_bytes` are part of `resident_bytes`.
    `late_seconds` is how long rewards on hosts take after a generation, beyond the time that they take after any
    generation (`host_workers.late_seconds`).
    """

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
        """Resident bytes that no other stage can share."""
        return self.resident_bytes - self.weights_bytes

    @property
    def device_bytes(self) -> tuple[float, float, float]:
        """Device memory: private resident bytes, bytes of weights, transient bytes."""
        return self.private_bytes, self.weights_bytes, self.transient_bytes

    @property
    def amounts(self) -> Amounts:
        """All amounts to minimise."""
        return self.seconds, self.tail_seconds, *self.device_bytes


def cost_call(model: CostModel, call: Call) -> Candidate:
    """Cost the choice in a question to the model."""
    costs, schedule = model.on_layout(call), call.schedule
    return candidate_of(costs, call.layout, schedule, costs.seconds(schedule), costs.bytes(schedule))


def candidate_of(costs: LayoutCosts, layout: Layout, schedule: Schedule, seconds: float, held: Bytes) -> Candidate:
    """Build the candidate of a choice whose seconds and bytes are known."""
    tail = costs.tail_seconds(schedule) if schedule.chunk_tokens else seconds
    return Candidate(layout, schedule, seconds, tail, *held)


def undominated(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return the candidates that no other beats; of equal ones the first is kept."""
    amounts = [(*candidate.amounts, candidate.seconds + candidate.late_seconds) for candidate in candidates]
    return tuple(candidates[index] for index in dominance.undominated(amounts))


def undominated_generations(
    candidates: Sequence[Candidate], late: Callable[[Candidate], float]
) -> tuple[Candidate, ...]:
    """Return the undominated choices of a generation whose rewards are waited for.

    `late` returns the least wait in seconds.

    Among choices with the same numbers of replicas and slots the faster one has its rewards sooner, so that `late` is
    called for few of them.
    """
    groups: dict[tuple[int, int], list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault((candidate.layout.dp, candidate.schedule.generation_slots), []).append(candidate)
    kept = (generation for group in groups.values() for generation in undominated(group))
    return undominated([generation._replace(late_seconds=late(generation)) for generation in kept])


def undominated_by_layout(candidates: Iterable[Candidate]) -> Iterator[Candidate]:
    """Yield the undominated choices of each layout.

    Interleaved pipelines that differ only in the number of chunks are compared with each other and with the plain
    pipeline: no other stage shares their weights, and refits do not depend on the number of chunks.
    """
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
