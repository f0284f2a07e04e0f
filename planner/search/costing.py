"""Costs the schedules of a stage on one layout, or rejects them with a reason.

The answer for one schedule spares questions about others: schedules with more rows at a time than one that does not
fit, variants of a too slow schedule that only take longer, and interleaved pipelines that the plain one beats.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from meshwright.cost_models.question import Call, CostModel, LayoutCosts
from meshwright.planner.plan.calls import Choice
from meshwright.planner.search.candidates import Candidate, candidate_of
from meshwright.planner.search.interleaved import PlainPipeline
from meshwright.profiles.schedule import Offload, Recompute, Schedule

DOMINATED = "another choice is no slower and no larger"
TOO_LARGE = "larger than the device"
TOO_LARGE_FOR_HOST = "larger than its part of the host's memory"
TOO_SLOW = "too slow for any plan that is as fast as one that is known"


@dataclass
class QuestionCounts:
    """Number of questions to a cost model: seconds (`timed`), bytes (`weighed`) and simulated generations.

    A simulation of generation depends on the numbers of replicas, pipeline stages and slots, and on what is in flight.
    """

    timed: int = 0
    weighed: int = 0
    generations: int = 0


@dataclass
class CostingRecord:
    """Bookkeeping of costing one stage: questions, rejections by reason, least peak memory by cluster part."""

    questions: QuestionCounts = field(default_factory=QuestionCounts)
    rejected: Counter[str] = field(default_factory=Counter)
    smallest: dict[int, tuple[float, Choice]] = field(default_factory=dict)
    simulated: set[Hashable] = field(default_factory=set)


class TimeLimit(NamedTuple):
    """The longest seconds of a choice worth costing, in all and after the end of what it streams (tail)."""

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
    """Costs the schedules of one layout one after the other; schedules with fewer rows at a time have to come first."""

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
        held = self.costs.bytes(schedule)  # memory first: what does not fit need not be timed
        peak, smallest = held.peak, self.record.smallest.get(self.call.part)
        if smallest is None or peak < smallest[0]:
            self.record.smallest[self.call.part] = peak, Choice(self.call.layout, schedule)
        if held.host > self.limits.host_bytes:
            return TOO_LARGE_FOR_HOST
        if peak > self.limits.device_bytes:
            return TOO_LARGE
        if self.call.stage.generates and self._is_slower_by_bound(schedule):
            return TOO_SLOW
        seconds = self._seconds(schedule)
        return candidate_of(self.costs, self.call.layout, schedule, seconds, held)

    def _is_too_slow(self, schedule: Schedule) -> bool:
        """True if the schedule is too slow, decided by its quickest variant, once for all variants.

        Stages that stream, and generation, are checked for memory first, because simulating a generation takes as long
        as many memory questions.
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
        """Ask the cost model for the seconds, and count the question."""
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
