"""The schedules of a stage on one layout, each costed or left out for a reason.

What one of them tells of others is not asked again: of more rows at a time than do not fit, of what only takes longer
than what is too slow, and of pipelines in chunks beside the plain one.
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
from meshwright.planner.search.interleaved import Beside
from meshwright.profiles.schedule import Offload, Recompute, Schedule

DOMINATED = "another choice is no slower and no larger"
TOO_LARGE = "larger than the device"
TOO_LARGE_FOR_HOST = "larger than its part of the host's memory"
TOO_SLOW = "too slow for any plan that is as fast as one that is known"


@dataclass
class Asked:
    """How many questions costing has put to a cost model: of seconds, of bytes, and in how many ways generation was
    played, each a number of replicas, of pipeline stages and of slots with what is in flight."""

    timed: int = 0
    weighed: int = 0
    generations: int = 0


@dataclass
class Notes:
    """What costing one stage leaves: what was asked, how often each reason left a choice out, and of each part of the
    cluster the least peak of any choice."""

    asked: Asked = field(default_factory=Asked)
    rejected: Counter[str] = field(default_factory=Counter)
    smallest: dict[int, tuple[float, Choice]] = field(default_factory=dict)
    played: set[Hashable] = field(default_factory=set)


class Most(NamedTuple):
    """Seconds above which a choice is in no plan that is worth finding: all of them, and those that remain when what it
    streams has ended."""

    seconds: float
    tail_seconds: float

    def allows(self, seconds: float, tail_seconds: float) -> bool:
        """Whether a choice takes no more."""
        return seconds <= self.seconds and tail_seconds <= self.tail_seconds


ANY_TIME = Most(math.inf, math.inf)


@dataclass(frozen=True, kw_only=True)
class Room:
    """The most that a choice may take, of time, of a device and of its part of the host's memory."""

    most: Most
    device_bytes: float
    host_bytes: float


@dataclass(frozen=True, kw_only=True)
class OnLayout:
    """The schedules of the layout of a call, costed one after the other; those with less at a time come first."""

    model: CostModel
    call: Call
    room: Room
    beside: Beside
    notes: Notes
    too_large: dict[Hashable, str] = field(default_factory=dict)
    slower: dict[Hashable, bool] = field(default_factory=dict)

    @cached_property
    def costs(self) -> LayoutCosts:
        return self.model.on_layout(self.call)

    def costed(self, schedule: Schedule) -> Candidate | str:
        """What the schedule costs, or why it is left out."""
        if self._is_slower(schedule):
            return TOO_SLOW
        family = _family(schedule)
        found = self.too_large.get(family) or self._weighed(schedule)
        if self.call.stage.trains and self.call.layout.vpp == 1 and self.model.memory_grows:
            self.beside.note(self.call.layout, schedule, found if isinstance(found, str) else found.amounts)
        if isinstance(found, Candidate):
            return found if self.room.most.allows(found.seconds, found.tail_seconds) else TOO_SLOW
        if found in (TOO_LARGE, TOO_LARGE_FOR_HOST) and self.model.memory_grows:
            self.too_large[family] = found
        return found

    def _weighed(self, schedule: Schedule) -> Candidate | str:
        if self.call.layout.vpp > 1:
            if reason := self.beside.too_large(self.call.layout, schedule):
                return reason
            if self.beside.beats(self.call.layout, schedule, self._seconds(schedule)):
                return DOMINATED
        self.notes.asked.weighed += 1
        held = self.costs.bytes(schedule)  # asked first: what does not fit need not be timed
        peak, smallest = held.peak, self.notes.smallest.get(self.call.part)
        if smallest is None or peak < smallest[0]:
            self.notes.smallest[self.call.part] = peak, Choice(self.call.layout, schedule)
        if held.host > self.room.host_bytes:
            return TOO_LARGE_FOR_HOST
        if peak > self.room.device_bytes:
            return TOO_LARGE
        if self.call.stage.generates and self._is_slower_unplayed(schedule):
            return TOO_SLOW
        seconds = self._seconds(schedule)
        return candidate_of(self.costs, self.call.layout, schedule, seconds, held)

    def _is_slower(self, schedule: Schedule) -> bool:
        """Whether it takes more than the most seconds, told once by the quickest of those that differ in what only
        takes longer.

        A stage that reads while generation goes on is weighed before, and so is a generation, whose turn is played for
        as long as many are weighed.
        """
        if self.room.most == ANY_TIME or schedule.chunk_tokens or self.call.stage.generates:
            return False
        asked: Hashable = schedule.micro_batch_size, schedule.micro_batch_tokens, schedule.rows
        if not self.model.seconds_grow:
            asked = asked, schedule.recompute, schedule.offload
        known = self.slower.get(asked)
        if known is None:
            quickest = _quickest(schedule) if self.model.seconds_grow else schedule
            known = self.slower[asked] = self._seconds(quickest) > self.room.most.tail_seconds
        return known

    def _is_slower_unplayed(self, schedule: Schedule) -> bool:
        """Whether a generation takes more than the most seconds however its turns are played."""
        most = self.room.most.seconds
        return most < math.inf and self.model.least_generation_seconds(replace(self.call, schedule=schedule)) > most

    def _seconds(self, schedule: Schedule) -> float:
        """Asked of the model, and counted."""
        self.notes.asked.timed += 1
        if self.call.stage.generates:
            slots = schedule.generation_slots, schedule.batches_in_flight, schedule.overcommit
            self.notes.played.add((self.call.layout.dp, self.call.layout.pp, *slots, schedule.while_waiting))
            self.notes.asked.generations = len(self.notes.played)
        return self.costs.seconds(schedule)


@lru_cache(maxsize=1024)  # many layouts have the same schedules
def _quickest(schedule: Schedule) -> Schedule:
    return replace(schedule, recompute=Recompute.NONE, offload=Offload.NONE)


def _family(schedule: Schedule) -> Hashable:
    """What is the same for schedules that differ in their rows at a time alone."""
    in_flight = schedule.batches_in_flight, schedule.overcommit
    return schedule.recompute, schedule.chunk_tokens, schedule.offload, schedule.while_waiting, *in_flight
