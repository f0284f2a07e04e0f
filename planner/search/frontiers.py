"""Computes the exact Pareto frontier of each stage: the choices that no other beats in seconds and every kind of
bytes.

If other stages may share a stage's weights, or refits start from them, only choices with the same layout are compared.
Only the size of a pool and its kind of nodes matter here, not its position. Stages are costed in parallel.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from meshwright.cost_models.protocol import CostModel, StageQuery
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.cost_queries import Choice, query_for_choice
from meshwright.planner.plan.layout_and_schedule_rules import available_bytes
from meshwright.planner.plan.pins import Pin, Ranks
from meshwright.planner.plan.reward_workers import extra_reward_wait_seconds, reward_readers
from meshwright.planner.plan.steps_ahead import SearchCase, max_deferral, synchronous_case
from meshwright.planner.search import parallel
from meshwright.planner.search.choice_costs import (
    DOMINATED,
    NO_TIME_LIMIT,
    TOO_SLOW,
    Candidate,
    ChoiceLimits,
    CostedChoices,
    CostingRecord,
    QueryCounts,
    TimeLimit,
    cost_choices,
    cost_query,
    undominated_generations,
)
from meshwright.planner.search.legal_choices import legal_choice_table, pools
from meshwright.profiles.choice_table import ChoiceTable, ScheduleTable
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import Stage


class PoolKind(NamedTuple):
    """The properties of a pool that decide the cost of a choice on it: its part of the cluster, and its size."""

    part: int
    num_ranks: int


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """The frontier of one stage: its undominated choices by kind of pool, and the number of rejected ones by reason.

    `smallest` has the choice with the least peak memory on each part of the cluster, fitting or not. `queries`
    counts the queries to the cost model.
    """

    stage: Stage
    pools: Mapping[Ranks, PoolKind]
    candidates: Mapping[PoolKind, tuple[Candidate, ...]]
    rejected: Counter[str]
    smallest: Mapping[int, Candidate]
    queries: QueryCounts

    def candidates_on(self, ranks: Ranks) -> tuple[Candidate, ...]:
        """Return the choices on one of the stage's pools."""
        return self.candidates[self.pools[ranks]]


def frontier(
    facts: Facts,
    model: CostModel,
    stage: Stage,
    pins: Sequence[Pin],
    *,
    is_limited: bool = True,
    search_case: SearchCase | None = None,
    time_limits: Mapping[PoolKind, TimeLimit] | None = None,
    is_plain: bool = False,
    is_timed: bool = True,
    stage_pools: Mapping[Ranks, PoolKind] | None = None,
) -> Frontier:
    """Compute the frontier of one stage; unless `is_limited`, choices are kept whatever device memory they need.

    Unless `is_timed`, only the memory of choices is computed and compared.

    `time_limits` limits the seconds of a choice by kind of pool, and excludes the kinds that it lacks; None means no
    limit. `is_plain` costs only plain choices (`legal_choice_table`). `stage_pools` are the stage's pools if
    already enumerated. `search_case` defaults to `synchronous_case`.
    """
    stage_pins = [pin for pin in pins if pin.stage == stage.name]
    kinds = kinds_of(facts, stage, stage_pins) if stage_pools is None else stage_pools
    costing = _Costing(
        facts=facts,
        model=model,
        stage=stage,
        pins=stage_pins,
        is_limited=is_limited,
        search_case=search_case or synchronous_case(facts.graph),
        time_limits=time_limits,
        is_plain=is_plain,
        is_timed=is_timed,
    )
    return Frontier(
        stage=stage,
        pools=kinds,
        candidates=costing.candidates(sorted(set(kinds.values()))),
        rejected=+costing.record.rejected,  # without reasons that were counted 0 times
        smallest={
            part: cost_query(model, costing.query(choice, part), is_timed=is_timed)
            for part, (_, choice) in costing.record.smallest.items()
        },
        queries=costing.record.queries,
    )


def kinds_of(facts: Facts, stage: Stage, pins: Sequence[Pin]) -> dict[Ranks, PoolKind]:
    """Return the pools that a stage may use, each with its kind."""
    cluster = facts.cluster
    return {r: PoolKind(cluster.part_of_pool(r.ranks), r.num_ranks) for r in pools(facts, stage, pins)}


@dataclass(frozen=True, kw_only=True)
class _Costing:
    """Costs the choices of one stage, and counts what it rejects."""

    facts: Facts
    model: CostModel
    stage: Stage
    pins: Sequence[Pin]
    is_limited: bool
    search_case: SearchCase
    time_limits: Mapping[PoolKind, TimeLimit] | None
    is_plain: bool
    is_timed: bool
    record: CostingRecord = field(default_factory=CostingRecord)

    @property
    def deferral(self) -> int:
        return max_deferral(self.search_case.ahead, self.facts.staleness)

    def candidates(self, kinds: Iterable[PoolKind]) -> dict[PoolKind, tuple[Candidate, ...]]:
        """Return, for each kind of pool, the choices that fit, are not too slow, and that no other beats."""
        sizes: dict[int, list[int]] = {}
        for kind in kinds:
            sizes.setdefault(kind.part, []).append(kind.num_ranks)
        found: dict[PoolKind, tuple[Candidate, ...]] = {}
        for part, sizes_of_part in sizes.items():
            by_size = self._candidates_on_part(part, sizes_of_part)
            found.update((PoolKind(part, num_ranks), kept) for num_ranks, kept in by_size.items())
        return found

    def _candidates_on_part(self, part: int, sizes: Sequence[int]) -> dict[int, tuple[Candidate, ...]]:
        """Return the candidates on pools of several sizes on one part of the cluster; all are costed together."""
        time_limits = {size: self._time_limit(PoolKind(part, size)) for size in sizes}
        possible = {size: limit for size, limit in time_limits.items() if limit is not None}
        rejected, (device_bytes, host_bytes) = self.record.rejected, available_bytes(self.facts, part)
        rejected[TOO_SLOW] += len(time_limits) - len(possible)
        limits = ChoiceLimits(
            time_limits=possible,
            device_bytes=device_bytes if self.is_limited else math.inf,
            host_bytes=host_bytes,
            is_timed=self.is_timed,
        )
        choices = ChoiceTable.concatenate([self._legal_choices(part, size) for size in possible])
        if not len(choices):
            return dict.fromkeys(sizes, ())
        query = replace(self.query(Choice(*choices[0]), part), max_deferral=self.deferral)
        costed = cost_choices(self.model, query, self.with_split_rows(query, choices), limits, self.record)
        by_size = {
            size: self._undominated(costed.where(costed.choices.layout.num_ranks == size), part) for size in sizes
        }
        rejected[DOMINATED] += len(costed.choices) - sum(map(len, by_size.values()))
        return by_size

    def _time_limit(self, kind: PoolKind) -> TimeLimit | None:
        """Return the longest time of a choice on a kind of pool; None if every choice is too slow."""
        return NO_TIME_LIMIT if self.time_limits is None else self.time_limits.get(kind)

    def _legal_choices(self, part: int, num_ranks: int) -> ChoiceTable:
        return legal_choice_table(
            self.facts,
            self.stage,
            num_ranks,
            self.pins,
            self.record.rejected,
            part=part,
            search_case=self.search_case,
            usual_only=self.is_plain,
        )

    def _undominated(self, costed: CostedChoices, part: int) -> tuple[Candidate, ...]:
        """Return the choices that no other beats; generations also compare how long their rewards on hosts take."""
        by_layout = self.stage.may_share or self.stage.is_trained
        if not (self.is_timed and self.stage.generates and reward_readers(self.facts)):
            return costed.candidates(costed.undominated_by_layout() if by_layout else costed.undominated())
        groups: dict[Layout | None, list[Candidate]] = {}
        for candidate in costed.candidates(range(len(costed.choices))):
            groups.setdefault(candidate.layout if by_layout else None, []).append(candidate)

        def late_seconds_of(candidate: Candidate) -> float:
            return extra_reward_wait_seconds(self.facts, part, candidate.layout, candidate.schedule, candidate.seconds)

        return tuple(
            candidate for group in groups.values() for candidate in undominated_generations(group, late_seconds_of)
        )

    def with_split_rows(self, query: StageQuery, choices: ChoiceTable) -> ChoiceTable:
        """Replace the schedules by ones whose rows are split by speed if the pool spans two kinds of nodes."""
        if len(self.facts.cluster.parts_of(query.part)) == 1:
            return choices
        schedules: dict[Layout, list[Schedule]] = {}
        for layout, schedule in choices:
            split = self.model.with_row_split(replace(query, layout=layout, schedule=schedule))
            schedules.setdefault(layout, []).append(split)
        return ChoiceTable.from_product(
            list(schedules), [ScheduleTable(tuple(of_layout)) for of_layout in schedules.values()]
        )

    def query(self, choice: Choice, part: int) -> StageQuery:
        """Build the query to the cost model for a choice on a part of the cluster."""
        return query_for_choice(self.facts, self.stage, choice, deferral=self.deferral, part=part)


def frontiers(
    facts: Facts,
    model: CostModel,
    pins: Sequence[Pin],
    *,
    is_limited: bool = True,
    is_timed: bool = True,
    search_case: SearchCase | None = None,
) -> tuple[Frontier, ...]:
    """Compute the frontier of every stage, in the order of the stages."""
    return tuple(
        frontier(facts, model, stage, pins, is_limited=is_limited, is_timed=is_timed, search_case=search_case)
        for stage in facts.graph.stages
    )


@dataclass
class StageCosts:
    """Costs stages of one job; `costed_frontiers` collects every frontier that was costed."""

    facts: Facts
    model: CostModel
    pins: Sequence[Pin]
    costed_frontiers: list[Frontier] = field(default_factory=list)

    @cached_property
    def pools(self) -> dict[str, Mapping[Ranks, PoolKind]]:
        """The pools of each stage with their kinds, enumerated once for stages with equal pool pins."""
        by_pins: dict[frozenset[Pin], Mapping[Ranks, PoolKind]] = {}
        by_stage = {}
        for stage in self.facts.graph.stages:
            pool_pins = frozenset(pin for pin in self.pins if pin.stage == stage.name and pin.key == "pool")
            if pool_pins not in by_pins:
                by_pins[pool_pins] = kinds_of(self.facts, stage, self.pins)
            by_stage[stage.name] = by_pins[pool_pins]
        return by_stage

    @cached_property
    def kinds(self) -> dict[str, set[PoolKind]]:
        """The kinds of the pools of each stage."""
        return {name: set(pools.values()) for name, pools in self.pools.items()}

    def frontier(
        self,
        stage: Stage,
        search_case: SearchCase,
        time_limits: Mapping[PoolKind, TimeLimit] | None,
        *,
        is_plain: bool = False,
    ) -> Frontier:
        """Return one stage's frontier in a search case without its pools, which are too many to send between processes.

        `time_limits` and `is_plain` are as in `frontiers.frontier`.
        """
        costed = frontier(
            self.facts,
            self.model,
            stage,
            self.pins,
            search_case=search_case,
            time_limits=time_limits,
            is_plain=is_plain,
            stage_pools=self.pools[stage.name],
        )
        return replace(costed, pools={})

    def fits(self, stage: Stage, search_case: SearchCase) -> bool:
        """Return True if some choice of a stage fits the devices in a search case.

        Only memory is computed, on one kind of pool after the other, the largest first.
        """
        for kind in sorted(self.kinds[stage.name], key=lambda kind: -kind.num_ranks):
            on_kind = frontier(
                self.facts,
                self.model,
                stage,
                self.pins,
                search_case=search_case,
                time_limits={kind: NO_TIME_LIMIT},
                is_timed=False,
                stage_pools=self.pools[stage.name],
            )
            if on_kind.candidates[kind]:
                return True
        return False

    def in_parallel(
        self,
        work: Callable[[Stage], Frontier],
        stages: Sequence[Stage],
        *,
        prepare: Callable[[], None],
        on_start: Callable[[int], None],
    ) -> list[Frontier]:
        """Return the frontiers of some stages, with their pools; see `parallel.map_in_two_processes`."""
        pools = self.pools  # enumerated before the fork, so that the child process inherits them
        frontiers = parallel.map_in_two_processes(work, stages, prepare=prepare, on_start=on_start)
        self.costed_frontiers += frontiers
        return [replace(costed, pools=pools[costed.stage.name]) for costed in frontiers]


def costing_order(stages: Sequence[Stage]) -> tuple[list[Stage], ...]:
    """Group the stages in the order in which to cost them: generation, training, and the others.

    Generation and training take most of a period, so that their costs prune choices of the other stages most.
    """
    generates = [stage for stage in stages if stage.generates]
    trains = [stage for stage in stages if stage.trains]
    return generates, trains, [stage for stage in stages if stage not in [*generates, *trains]]
