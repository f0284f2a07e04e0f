"""The exact Pareto set of each stage: choices that no other choice beats in seconds and in every kind of bytes.

A stage whose weights other stages may share, or are refit to, keeps the choices of each layout apart: the layout then
decides more than the stage's own cost. Positions of a pool do not matter here, only its size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from meshwright.cost_models.cost import Cost, Memory
from meshwright.cost_models.question import Call, CostModel
from meshwright.planner import dominance
from meshwright.planner.evaluate import WEIGHTS
from meshwright.planner.job import Facts
from meshwright.planner.leads import PLAIN, Scope, max_deferral
from meshwright.planner.pins import Pin, Ranks
from meshwright.planner.rules import offloads
from meshwright.planner.space import Choice, choices, pools
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import STAGES, TRAIN_STAGE, Stage

DOMINATED = "another choice is no slower and no larger"
TOO_LARGE = "larger than the device"
TOO_LARGE_FOR_HOST = "larger than its part of the host's memory"


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


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """What is left of one stage's choices: by pool size, with the pools it may use and the counts of what was left out.

    `smallest` is the least peak of any legal choice, fitting or not.
    """

    stage: Stage
    pools: tuple[Ranks, ...]
    candidates: Mapping[int, tuple[Candidate, ...]]
    rejected: Counter[str]
    smallest: Candidate | None


def frontier(
    facts: Facts,
    model: CostModel,
    stage: Stage,
    pins: Sequence[Pin],
    limit_bytes: float | None,
    *,
    scope: Scope = PLAIN,
) -> Frontier:
    """The frontier of one stage; without `limit_bytes`, choices of any size are kept."""
    rejected: Counter[str] = Counter()
    mine = [pin for pin in pins if pin.stage == stage.name]
    found = pools(facts, stage, mine)
    smallest, smallest_peak = None, math.inf
    candidates = {}
    for size in sorted({ranks.num_ranks for ranks in found}):
        fitting = []
        too_large: dict[Hashable, str] = {}
        for choice in choices(facts, stage, size, mine, rejected, scope=scope):
            family = _family(choice)
            if family in too_large:  # the choices of a family come with the smaller ones first
                rejected[too_large[family]] += 1
                continue
            call = call_of(facts, stage, choice.layout, choice.schedule, max_deferral(scope.leads, facts.staleness))
            memory = model.memory(call)  # asked first: what does not fit need not be timed
            peak = memory.resident.total + memory.transient.total
            if smallest is None or peak < smallest_peak:
                smallest, smallest_peak = choice, peak
            if memory.host.total > host_share(facts.cluster):
                too_large[family] = TOO_LARGE_FOR_HOST
            elif limit_bytes is not None and peak > limit_bytes:
                too_large[family] = TOO_LARGE
            else:
                fitting.append(_candidate(model, call, memory))
                continue
            rejected[too_large[family]] += 1
        kept = _undominated_by_layout(fitting) if stage.role in TRAIN_STAGE else undominated(fitting)
        rejected[DOMINATED] += len(fitting) - len(kept)
        candidates[size] = kept
    least = costed_choice(facts, model, stage, smallest, scope) if smallest else None
    return Frontier(stage=stage, pools=found, candidates=candidates, rejected=+rejected, smallest=least)


def _family(choice: Choice) -> Hashable:
    """What is the same for choices that differ in their rows at a time alone, of which more never take less memory."""
    schedule = choice.schedule
    generation = schedule.batches_in_flight, schedule.overcommit
    return choice.layout, schedule.recompute, schedule.chunk_tokens, schedule.offload, *generation


def frontiers(
    facts: Facts, model: CostModel, pins: Sequence[Pin], limit_bytes: float | None, *, scope: Scope = PLAIN
) -> tuple[Frontier, ...]:
    """The frontier of every stage, in the order of the stages."""
    return tuple(frontier(facts, model, stage, pins, limit_bytes, scope=scope) for stage in STAGES)


def host_share(cluster: Cluster) -> float:
    """Bytes of host memory that one rank may use for one stage: an equal part for each stage that can offload."""
    offloading = sum(len(offloads(stage)) > 1 for stage in STAGES)
    return cluster.host_memory_bytes / cluster.ranks_per_node / offloading


def undominated(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The candidates that no other beats; of equals the first stays."""
    return tuple(candidates[index] for index in dominance.undominated([c.amounts for c in candidates]))


def _undominated_by_layout(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    groups: dict[Layout, list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault(candidate.layout, []).append(candidate)
    return tuple(kept for layout in groups for kept in undominated(groups[layout]))


def costed_choice(facts: Facts, model: CostModel, stage: Stage, choice: Choice, scope: Scope = PLAIN) -> Candidate:
    """The choice with what it costs."""
    call = call_of(facts, stage, choice.layout, choice.schedule, max_deferral(scope.leads, facts.staleness))
    return _candidate(model, call, model.memory(call))


def _candidate(model: CostModel, call: Call, memory: Memory) -> Candidate:
    return Candidate(
        layout=call.layout,
        schedule=call.schedule,
        seconds=model.seconds(call),
        tail_seconds=model.tail_seconds(call) if call.schedule.chunk_tokens else 0.0,
        resident=memory.resident,
        transient=memory.transient,
        host=memory.host,
    )


def call_of(facts: Facts, stage: Stage, layout: Layout, schedule: Schedule, deferral: int) -> Call:
    """The question that a choice is to a cost model; `deferral` counts turns, and matters where a stage overcommits."""
    deferred = deferral if schedule.overcommit else 0
    return Call(
        stage=stage, model=facts.models.spec(stage.role), layout=layout, schedule=schedule, max_deferral=deferred
    )
