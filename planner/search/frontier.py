"""The exact Pareto set of each stage: choices that no other choice beats in seconds and in every kind of bytes.

A stage whose weights other stages may share, or are refit to, keeps the choices of each layout apart: the layout then
decides more than the stage's own cost. Positions of a pool do not matter here, only its size and its kind of nodes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeAlias

from meshwright.cost_models.cost import Cost, Memory
from meshwright.cost_models.question import Call, CostModel
from meshwright.planner.plan.calls import Choice, call_of
from meshwright.planner.plan.evaluate import WEIGHTS
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.pins import Pin, Ranks
from meshwright.planner.plan.rules import host_share
from meshwright.planner.plan.steps_ahead import Scope, max_deferral, plain
from meshwright.planner.search.interleaved import Beside
from meshwright.planner.search.space import choices, pools
from meshwright.planner.solver import dominance
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Offload, Recompute, Schedule
from meshwright.profiles.stages import Stage

DOMINATED = "another choice is no slower and no larger"
TOO_LARGE = "larger than the device"
TOO_LARGE_FOR_HOST = "larger than its part of the host's memory"
TOO_SLOW = "too slow for any plan that is as fast as one that is known"


Amounts: TypeAlias = tuple[float, float, float, float, float]
"""What has to be small: seconds, those after what is streamed, resident bytes but weights, weights, transient bytes."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A legal choice and what it costs: seconds per turn, of them those that remain when what it streams has ended,
    bytes on the fullest rank."""

    layout: Layout
    schedule: Schedule
    seconds: Cost
    resident: Cost
    transient: Cost
    tail_seconds: float = 0.0
    host: Cost = field(default_factory=Cost)

    @cached_property
    def weights_bytes(self) -> float:
        return sum(term.amount for term in self.resident.terms if term.name == WEIGHTS)

    @cached_property
    def peak_bytes(self) -> float:
        return self.resident.total + self.transient.total

    @cached_property
    def amounts(self) -> Amounts:
        """What has to be small: seconds, those after what it streams, resident bytes without weights, weights,
        transient bytes."""
        seconds, resident = self.seconds.total, self.resident.total
        tail = self.tail_seconds if self.schedule.chunk_tokens else seconds
        return seconds, tail, resident - self.weights_bytes, self.weights_bytes, self.transient.total


class PoolKind(NamedTuple):
    """What of a pool decides the cost of a choice on it: the position of its part of the cluster, and its size."""

    part: int
    num_ranks: int


@dataclass
class Asked:
    """How many questions costing has put to a cost model: of seconds, of bytes, and in how many ways generation was
    played, each a number of replicas, of pipeline stages and of slots with what is in flight."""

    timed: int = 0
    weighed: int = 0
    generations: int = 0


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """What is left of one stage's choices: by the kind of the pools it may use, with the counts of what was left out.

    `smallest` is the least peak of any legal choice on each part of the cluster, fitting or not.
    """

    stage: Stage
    pools: Mapping[Ranks, PoolKind]
    candidates: Mapping[PoolKind, tuple[Candidate, ...]]
    rejected: Counter[str]
    smallest: Mapping[int, Candidate]
    asked: Asked

    def on(self, ranks: Ranks) -> tuple[Candidate, ...]:
        """The choices on one of its pools."""
        return self.candidates[self.pools[ranks]]


def frontier(
    facts: Facts,
    model: CostModel,
    stage: Stage,
    pins: Sequence[Pin],
    *,
    is_limited: bool = True,
    scope: Scope | None = None,
    most_seconds: Mapping[PoolKind, float] | None = None,
    is_plain: bool = False,
    on: Mapping[Ranks, PoolKind] | None = None,
) -> Frontier:
    """The frontier of one stage; without a limit, choices are kept however much of the device they need.

    `most_seconds` are those of a choice on a kind of pool, none for a kind that is not of use; all may take any without
    it. With `is_plain` only plain choices are costed (`space.is_plain`). `on` are its pools where they are known. The
    scope is the plainest where none is given.
    """
    mine = [pin for pin in pins if pin.stage == stage.name]
    found = kinds_of(facts, stage, mine) if on is None else on
    costing = _Costing(
        facts=facts,
        model=model,
        stage=stage,
        pins=mine,
        is_limited=is_limited,
        scope=scope or plain(facts.graph),
        most_seconds=most_seconds,
        is_plain=is_plain,
    )
    return Frontier(
        stage=stage,
        pools=found,
        candidates={kind: costing.kept(kind) for kind in sorted(set(found.values()))},
        rejected=+costing.rejected,
        smallest={part: costing.candidate(choice, part) for part, (_, choice) in costing.smallest.items()},
        asked=replace(costing.asked, generations=len(costing.generations)),
    )


def kinds_of(facts: Facts, stage: Stage, pins: Sequence[Pin]) -> dict[Ranks, PoolKind]:
    """The pools that a stage may use, each with its kind."""
    cluster = facts.cluster
    return {ranks: PoolKind(cluster.part_of(ranks.first_rank), ranks.num_ranks) for ranks in pools(facts, stage, pins)}


@dataclass(frozen=True, kw_only=True)
class _Costing:
    """The choices of one stage, costed kind by kind; what is left out is counted as it goes."""

    facts: Facts
    model: CostModel
    stage: Stage
    pins: Sequence[Pin]
    is_limited: bool
    scope: Scope
    most_seconds: Mapping[PoolKind, float] | None
    is_plain: bool
    rejected: Counter[str] = field(default_factory=Counter)
    smallest: dict[int, tuple[float, Choice]] = field(default_factory=dict)
    asked: Asked = field(default_factory=Asked)
    generations: set[Hashable] = field(default_factory=set)

    def kept(self, kind: PoolKind) -> tuple[Candidate, ...]:
        """The choices on pools of one kind that fit, are not too slow, and that no other beats."""
        most = math.inf if self.most_seconds is None else self.most_seconds.get(kind, 0.0)
        if most == 0.0:
            self.rejected[TOO_SLOW] += 1
            return ()
        part = self.facts.cluster.parts[kind.part]
        room = part.device.usable_bytes if self.is_limited else math.inf, host_share(part, self.facts.graph)
        fitting: list[Candidate] = []
        too_large: dict[Hashable, str] = {}
        is_slower = self._slower_than(most, kind.part)
        beside = Beside(self.facts.models.spec(self.stage.role))
        for choice in choices(
            self.facts, self.stage, kind.num_ranks, self.pins, self.rejected, scope=self.scope, plain_only=self.is_plain
        ):
            if not self.stage.generates and is_slower(choice):  # a turn is played for as long as many are weighed
                self.rejected[TOO_SLOW] += 1
                continue
            family = _family(choice)
            found: Candidate | str
            if family in too_large and self.model.memory_grows:  # a family's choices come with the smaller ones first
                found = too_large[family]
            else:
                found = self._costed(choice, kind.part, room, beside)
            if self.stage.trains and choice.layout.vpp == 1 and self.model.memory_grows:
                beside.note(choice.layout, choice.schedule, found if isinstance(found, str) else found.amounts)
            if isinstance(found, Candidate) and found.seconds.total > most and not choice.schedule.chunk_tokens:
                found = TOO_SLOW
            if isinstance(found, Candidate):
                fitting.append(found)
                continue
            self.rejected[found] += 1
            if found in (TOO_LARGE, TOO_LARGE_FOR_HOST):
                too_large[family] = found
        kept = tuple(_undominated_by_layout(fitting)) if self.stage.is_trained else undominated(fitting)
        self.rejected[DOMINATED] += len(fitting) - len(kept)
        return kept

    def _costed(self, choice: Choice, part: int, room: tuple[float, float], beside: Beside) -> Candidate | str:
        """What the choice costs on a part of the cluster, or why it is left out: `room` is of the device and the host,
        in bytes."""
        layout, schedule, call = choice.layout, choice.schedule, self._call(choice, part)
        if layout.vpp > 1:
            if reason := beside.too_large(layout, schedule):
                return reason
            if beside.beats(layout, schedule, self._seconds(call).total):
                return DOMINATED
        self.asked.weighed += 1
        memory = self.model.memory(call)  # asked first: what does not fit need not be timed
        peak = memory.resident.total + memory.transient.total
        if part not in self.smallest or peak < self.smallest[part][0]:
            self.smallest[part] = peak, choice
        device_bytes, host_bytes = room
        if memory.host.total > host_bytes:
            return TOO_LARGE_FOR_HOST
        return TOO_LARGE if peak > device_bytes else _candidate(self._seconds(call), self.model, call, memory)

    def _slower_than(self, most: float, part: int) -> Callable[[Choice], bool]:
        """Whether a choice takes more than `most` seconds, told once by the quickest of those that differ in what only
        takes longer. A stage that reads while generation goes on may take any time."""
        told: dict[tuple[Layout, Schedule], bool] = {}

        def is_slower(choice: Choice) -> bool:
            if most == math.inf or choice.schedule.chunk_tokens:
                return False
            quickest = _quickest(choice.schedule) if self.model.seconds_grow else choice.schedule
            asked = choice.layout, quickest
            if asked not in told:
                told[asked] = self._seconds(self._call(Choice(*asked), part)).total > most
            return told[asked]

        return is_slower

    def candidate(self, choice: Choice, part: int) -> Candidate:
        """The choice on a part of the cluster with what it costs."""
        call = self._call(choice, part)
        return _candidate(self.model.seconds(call), self.model, call, self.model.memory(call))

    def _seconds(self, call: Call) -> Cost:
        """Asked of the model, and counted."""
        self.asked.timed += 1
        if self.stage.generates:
            slots = call.schedule.generation_slots, call.schedule.batches_in_flight, call.schedule.overcommit
            self.generations.add((call.layout.dp, call.layout.pp, *slots))
        return self.model.seconds(call)

    def _call(self, choice: Choice, part: int) -> Call:
        deferral = max_deferral(self.scope.ahead, self.facts.staleness)
        return call_of(self.facts, self.stage, choice, deferral=deferral, part=part)


@lru_cache(maxsize=1024)  # many layouts have the same schedules
def _quickest(schedule: Schedule) -> Schedule:
    return replace(schedule, recompute=Recompute.NONE, offload=Offload.NONE)


def _family(choice: Choice) -> Hashable:
    """What is the same for choices that differ in their rows at a time alone."""
    schedule = choice.schedule
    generation = schedule.batches_in_flight, schedule.overcommit
    return choice.layout, schedule.recompute, schedule.chunk_tokens, schedule.offload, *generation


def frontiers(
    facts: Facts, model: CostModel, pins: Sequence[Pin], *, is_limited: bool = True, scope: Scope | None = None
) -> tuple[Frontier, ...]:
    """The frontier of every stage, in the order of the stages."""
    stages = facts.graph.stages
    return tuple(frontier(facts, model, stage, pins, is_limited=is_limited, scope=scope) for stage in stages)


def undominated(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The candidates that no other beats; of equals the first stays."""
    return tuple(candidates[index] for index in dominance.undominated([c.amounts for c in candidates]))


def _undominated_by_layout(candidates: Iterable[Candidate]) -> Iterator[Candidate]:
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


def costed_choice(
    facts: Facts, model: CostModel, stage: Stage, choice: Choice, scope: Scope | None = None, *, part: int = 0
) -> Candidate:
    """The choice on a part of the cluster, with what it costs there; in the plainest scope where none is given."""
    ahead = (scope or plain(facts.graph)).ahead
    call = call_of(facts, stage, choice, deferral=max_deferral(ahead, facts.staleness), part=part)
    return _candidate(model.seconds(call), model, call, model.memory(call))


def _candidate(seconds: Cost, model: CostModel, call: Call, memory: Memory) -> Candidate:
    return Candidate(
        layout=call.layout,
        schedule=call.schedule,
        seconds=seconds,
        tail_seconds=model.tail_seconds(call) if call.schedule.chunk_tokens else 0.0,
        resident=memory.resident,
        transient=memory.transient,
        host=memory.host,
    )
