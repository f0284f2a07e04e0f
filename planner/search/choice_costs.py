"""Costs the schedules of a stage on one layout, or rejects them with a reason.

A candidate is a legal choice with its costs. The costs of one schedule save queries to the cost model for others:
schedules with more rows at a time than one that does not fit, variants of a too slow schedule that only take longer,
and interleaved pipelines that cannot beat the plain one (vpp=1).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from meshwright.cost_models.protocol import Bytes, Call, CostModel, LayoutCosts
from meshwright.planner.plan.cost_queries import Choice
from meshwright.planner.solver import pareto
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.schedule import Offload, Recompute, Schedule

Amounts: TypeAlias = tuple[float, float, float, float, float]
"""The amounts to minimise: seconds, tail seconds, private resident bytes, bytes of weights, transient bytes."""


class Candidate(NamedTuple):
    """A legal choice with its costs: seconds per period, and bytes on the fullest rank.

    `tail_seconds` remain after the end of the generation that the stage reads in chunks; `weights_bytes` are part of
    `resident_bytes`.
    `late_seconds` is how long rewards on hosts take after a generation, beyond the time that they take after any
    generation (`reward_workers.late_seconds`).
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
    """Return the candidate of a call, with the costs that the model predicts."""
    costs, schedule = model.on_layout(call), call.schedule
    return candidate_of(costs, call.layout, schedule, costs.seconds(schedule), costs.bytes(schedule))


def candidate_of(costs: LayoutCosts, layout: Layout, schedule: Schedule, seconds: float, memory: Bytes) -> Candidate:
    """Build the candidate of a choice whose seconds and bytes are known."""
    tail = costs.tail_seconds(schedule) if schedule.chunk_tokens else seconds
    return Candidate(layout, schedule, seconds, tail, *memory)


def undominated(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return the candidates that no other beats; of equal ones the first is kept."""
    amounts = [(*candidate.amounts, candidate.seconds + candidate.late_seconds) for candidate in candidates]
    return tuple(candidates[index] for index in pareto.undominated(amounts))


def undominated_generations(
    candidates: Sequence[Candidate], late: Callable[[Candidate], float]
) -> tuple[Candidate, ...]:
    """Return the undominated choices of a generation if training waits for its rewards.

    `late` returns a choice's `late_seconds`. Among choices with the same numbers of replicas and slots the faster one
    has its rewards sooner, so that `late` is called for few of them.
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


class PlainPipeline:
    """The costed choices of one plain pipeline (vpp=1) on one kind of pool, to compare its interleaved variants with.

    The plain pipeline has to be costed before the layouts that divide its pipeline stages into chunks.
    """

    def __init__(self, model: ModelSpec) -> None:
        self._applies = model.num_dense_layers in (0, model.num_layers)
        self._plain: Layout | None = None
        self._last_compared: tuple[Layout, bool] | None = None
        self._fitting: dict[Schedule, Sequence[float]] = {}
        self._too_large: dict[Schedule, str] = {}
        self._table: npt.NDArray[np.float64] | None = None

    def record(self, layout: Layout, schedule: Schedule, result: Sequence[float] | str) -> None:
        """Record a plain choice: its amounts (seconds and tail seconds first), or the reason why it is too large."""
        if not self._applies or layout.pp == 1:
            return
        if layout != self._plain:
            self._plain, self._fitting, self._too_large, self._table = layout, {}, {}, None
        if isinstance(result, str):
            self._too_large[schedule] = result
        else:
            self._fitting[schedule] = result

    def too_large(self, layout: Layout, schedule: Schedule) -> str | None:
        """Return why an interleaved choice is too large if the plain one under the same schedule is, else None."""
        return self._too_large.get(schedule) if self._is_variant(layout) else None

    def dominates(self, layout: Layout, schedule: Schedule, seconds: float) -> bool:
        """True if some plain choice is no slower than an interleaved one of these seconds, and no larger."""
        if not self._is_variant(layout) or schedule not in self._fitting:
            return False
        if self._table is None:
            amounts = list(self._fitting.values())
            self._table = np.array([amounts[index] for index in pareto.undominated(amounts)])
        lower_bounds = seconds, seconds, *self._fitting[schedule][2:]
        return pareto.is_dominated(lower_bounds, self._table)

    def _is_variant(self, layout: Layout) -> bool:
        if self._last_compared is None or self._last_compared[0] is not layout:
            self._last_compared = layout, replace(layout, vpp=1) == self._plain
        return self._last_compared[1]


DOMINATED = "another choice is no slower and no larger"
TOO_LARGE = "larger than the device"
TOO_LARGE_FOR_HOST = "larger than its part of the host's memory"
TOO_SLOW = "too slow for any plan that is as fast as one that is known"


@dataclass
class QuestionCounts:
    """Number of queries to a cost model: for seconds (`timed`), for bytes (`weighed`), and simulated generations.

    A simulation depends on the numbers of replicas, pipeline stages and slots, and on how many sequences are in flight;
    each combination counts once.
    """

    timed: int = 0
    weighed: int = 0
    generations: int = 0


@dataclass
class CostingRecord:
    """Bookkeeping of costing one stage: queries, rejections by reason, and the choice of least peak memory by
    cluster part."""

    questions: QuestionCounts = field(default_factory=QuestionCounts)
    rejected: Counter[str] = field(default_factory=Counter)
    smallest: dict[int, tuple[float, Choice]] = field(default_factory=dict)
    simulated: set[Hashable] = field(default_factory=set)


class TimeLimit(NamedTuple):
    """The longest seconds of a choice worth costing, in all and after the generation that it streams from."""

    seconds: float
    tail_seconds: float

    def allows(self, seconds: float, tail_seconds: float) -> bool:
        """True if a choice takes no longer."""
        return seconds <= self.seconds and tail_seconds <= self.tail_seconds


NO_TIME_LIMIT = TimeLimit(math.inf, math.inf)


@dataclass(frozen=True, kw_only=True)
class ChoiceLimits:
    """The limits of a choice: its time, the memory of a device, and its share of the host's memory."""

    time_limit: TimeLimit
    device_bytes: float
    host_bytes: float


@dataclass(frozen=True, kw_only=True)
class LayoutCosting:
    """Costs the schedules of one layout one after the other; schedules with fewer rows at a time have to come first.

    `too_large` has the reasons why schedules with more rows do not fit either, by what such schedules have in common;
    `slower` whether all variants of a schedule are too slow.
    """

    model: CostModel
    call: Call
    limits: ChoiceLimits
    plain_pipeline: PlainPipeline
    record: CostingRecord
    too_large: dict[Hashable, str] = field(default_factory=dict)
    slower: dict[Hashable, bool] = field(default_factory=dict)

    @cached_property
    def costs(self) -> LayoutCosts:
        return self.model.on_layout(self.call)

    def cost(self, schedule: Schedule) -> Candidate | str:
        """Return the schedule with its costs, or the reason for its rejection."""
        if self._is_too_slow(schedule):
            return TOO_SLOW
        family = _family(schedule)
        result = self.too_large.get(family) or self._fitting(schedule)
        if self.call.stage.trains and self.call.layout.vpp == 1 and self.model.memory_is_monotone:
            self.plain_pipeline.record(
                self.call.layout, schedule, result if isinstance(result, str) else result.amounts
            )
        if isinstance(result, Candidate):
            return result if self.limits.time_limit.allows(result.seconds, result.tail_seconds) else TOO_SLOW
        if result in (TOO_LARGE, TOO_LARGE_FOR_HOST) and self.model.memory_is_monotone:
            self.too_large[family] = result
        return result

    def _fitting(self, schedule: Schedule) -> Candidate | str:
        if self.call.layout.vpp > 1:
            if reason := self.plain_pipeline.too_large(self.call.layout, schedule):
                return reason
            if self.plain_pipeline.dominates(self.call.layout, schedule, self._seconds(schedule)):
                return DOMINATED
        self.record.questions.weighed += 1
        memory = self.costs.bytes(schedule)  # memory first: what does not fit need not be timed
        peak, smallest = memory.peak, self.record.smallest.get(self.call.part)
        if smallest is None or peak < smallest[0]:
            self.record.smallest[self.call.part] = peak, Choice(self.call.layout, schedule)
        if memory.host > self.limits.host_bytes:
            return TOO_LARGE_FOR_HOST
        if peak > self.limits.device_bytes:
            return TOO_LARGE
        if self.call.stage.generates and self._is_slower_by_bound(schedule):
            return TOO_SLOW
        seconds = self._seconds(schedule)
        return candidate_of(self.costs, self.call.layout, schedule, seconds, memory)

    def _is_too_slow(self, schedule: Schedule) -> bool:
        """True if the schedule is too slow, decided by its quickest variant, once for all variants.

        Stages that stream, and generation, are checked for memory first, because simulating a generation takes as long
        as many queries for memory.
        """
        if self.limits.time_limit == NO_TIME_LIMIT or schedule.chunk_tokens or self.call.stage.generates:
            return False
        key: Hashable = schedule.micro_batch_size, schedule.micro_batch_tokens, schedule.rows
        if not self.model.seconds_are_monotone:
            key = key, schedule.recompute, schedule.offload
        is_slower = self.slower.get(key)
        if is_slower is None:
            quickest = _quickest(schedule) if self.model.seconds_are_monotone else schedule
            is_slower = self.slower[key] = self._seconds(quickest) > self.limits.time_limit.tail_seconds
        return is_slower

    def _is_slower_by_bound(self, schedule: Schedule) -> bool:
        """True if a generation is too slow by its lower bound, without a simulation."""
        max_seconds = self.limits.time_limit.seconds
        return (
            max_seconds < math.inf
            and self.model.generation_lower_bound(replace(self.call, schedule=schedule)) > max_seconds
        )

    def _seconds(self, schedule: Schedule) -> float:
        """Query the cost model for the seconds, and count the query."""
        self.record.questions.timed += 1
        if self.call.stage.generates:
            slots = schedule.generation_slots, schedule.batches_in_flight, schedule.overcommit
            self.record.simulated.add((self.call.layout.dp, self.call.layout.pp, *slots, schedule.while_waiting))
            self.record.questions.generations = len(self.record.simulated)
        return self.costs.seconds(schedule)


@lru_cache(maxsize=1024)  # many layouts have the same schedules
def _quickest(schedule: Schedule) -> Schedule:
    return replace(schedule, recompute=Recompute.NONE, offload=Offload.NONE)


def _family(schedule: Schedule) -> Hashable:
    """Return what schedules have in common that differ only in their rows at a time."""
    in_flight = schedule.batches_in_flight, schedule.overcommit
    return schedule.recompute, schedule.chunk_tokens, schedule.offload, schedule.while_waiting, *in_flight
