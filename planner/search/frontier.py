"""The exact Pareto set of each stage: choices that no other choice beats in seconds and in every kind of bytes.

A stage whose weights other stages may share, or are refit to, keeps the choices of each layout apart: the layout then
decides more than the stage's own cost. Positions of a pool do not matter here, only its size and its kind of nodes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from meshwright.cost_models.question import Call, CostModel
from meshwright.planner.plan.calls import Choice, call_of
from meshwright.planner.plan.host_workers import late_seconds, reward_readers
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.pins import Pin, Ranks
from meshwright.planner.plan.rules import room_on
from meshwright.planner.plan.steps_ahead import Scope, max_deferral, plain
from meshwright.planner.search.candidates import (
    Candidate,
    costed,
    undominated,
    undominated_by_layout,
    undominated_generations,
)
from meshwright.planner.search.costing import ANY_TIME, DOMINATED, TOO_SLOW, Asked, Most, Notes, OnLayout, Room
from meshwright.planner.search.interleaved import Beside
from meshwright.planner.search.space import choices_by_layout, pools
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import Stage


class PoolKind(NamedTuple):
    """What of a pool decides the cost of a choice on it: the number of its part of the cluster, and its size."""

    part: int
    num_ranks: int


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """What is left of one stage's choices: by the kind of the pools it may use, with the counts of what was left out.

    `smallest` has the least peak of any legal choice on each part of the cluster, fitting or not.
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
    most: Mapping[PoolKind, Most] | None = None,
    is_plain: bool = False,
    on: Mapping[Ranks, PoolKind] | None = None,
) -> Frontier:
    """The frontier of one stage; without a limit, choices are kept however much of the device they need.

    `most` is what a choice on a kind of pool may take, nothing for a kind that is not of use; all may take any time
    without it. With `is_plain` only plain choices are costed (`space.is_plain`). `on` are its pools where they are
    known. The scope is the plainest where none is given.
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
        most=most,
        is_plain=is_plain,
    )
    return Frontier(
        stage=stage,
        pools=found,
        candidates={kind: costing.kept(kind) for kind in sorted(set(found.values()))},
        rejected=+costing.notes.rejected,
        smallest={p: costed(model, costing.call(choice, p)) for p, (_, choice) in costing.notes.smallest.items()},
        asked=costing.notes.asked,
    )


def kinds_of(facts: Facts, stage: Stage, pins: Sequence[Pin]) -> dict[Ranks, PoolKind]:
    """The pools that a stage may use, each with its kind."""
    cluster = facts.cluster
    return {r: PoolKind(cluster.part_of_pool(r.ranks), r.num_ranks) for r in pools(facts, stage, pins)}


@dataclass(frozen=True, kw_only=True)
class _Costing:
    """The choices of one stage, costed kind by kind; what is left out is counted as it goes."""

    facts: Facts
    model: CostModel
    stage: Stage
    pins: Sequence[Pin]
    is_limited: bool
    scope: Scope
    most: Mapping[PoolKind, Most] | None
    is_plain: bool
    notes: Notes = field(default_factory=Notes)

    @property
    def deferral(self) -> int:
        return max_deferral(self.scope.ahead, self.facts.staleness)

    def kept(self, kind: PoolKind) -> tuple[Candidate, ...]:
        """The choices on pools of one kind that fit, are not too slow, and that no other beats."""
        most = ANY_TIME if self.most is None else self.most.get(kind)
        if most is None:
            self.notes.rejected[TOO_SLOW] += 1
            return ()
        rejected, (device_bytes, host_bytes) = self.notes.rejected, room_on(self.facts, kind.part)
        room = Room(most=most, device_bytes=device_bytes if self.is_limited else math.inf, host_bytes=host_bytes)
        fitting: list[Candidate] = []
        beside = Beside(self.facts.models.spec(self.stage.role))
        every = choices_by_layout(
            self.facts,
            self.stage,
            kind.num_ranks,
            self.pins,
            rejected,
            part=kind.part,
            scope=self.scope,
            plain_only=self.is_plain,
        )
        for layout, schedules in every:
            call = replace(self.call(Choice(layout, schedules[0]), kind.part), max_deferral=self.deferral)
            on_layout = OnLayout(model=self.model, call=call, room=room, beside=beside, notes=self.notes)
            for schedule in self.dealt(call, schedules):
                found = on_layout.costed(schedule)
                if isinstance(found, Candidate):
                    fitting.append(found)
                else:
                    rejected[found] += 1
        kept = self._undominated(fitting, kind.part)
        rejected[DOMINATED] += len(fitting) - len(kept)
        return kept

    def _undominated(self, fitting: Sequence[Candidate], part: int) -> tuple[Candidate, ...]:
        by_layout = self.stage.may_share or self.stage.is_trained
        if not (self.stage.generates and reward_readers(self.facts)):
            return tuple(undominated_by_layout(fitting)) if by_layout else undominated(fitting)
        groups: dict[Layout | None, list[Candidate]] = {}
        for one in fitting:
            groups.setdefault(one.layout if by_layout else None, []).append(one)

        def late(one: Candidate) -> float:
            return late_seconds(self.facts, part, one.layout, one.schedule, one.seconds)

        return tuple(one for same in groups.values() for one in undominated_generations(same, late))

    def dealt(self, call: Call, schedules: Sequence[Schedule]) -> Iterable[Schedule]:
        """Schedules in place of the call's, with rows that are dealt by speed on two kinds of nodes."""
        if len(self.facts.cluster.parts_of(call.part)) == 1:
            return schedules
        return (self.model.dealt(replace(call, schedule=schedule)) for schedule in schedules)

    def call(self, choice: Choice, part: int) -> Call:
        """The question that a choice on a part of the cluster is to the model."""
        return call_of(self.facts, self.stage, choice, deferral=self.deferral, part=part)


def frontiers(
    facts: Facts, model: CostModel, pins: Sequence[Pin], *, is_limited: bool = True, scope: Scope | None = None
) -> tuple[Frontier, ...]:
    """The frontier of every stage, in the order of the stages."""
    stages = facts.graph.stages
    return tuple(frontier(facts, model, stage, pins, is_limited=is_limited, scope=scope) for stage in stages)
