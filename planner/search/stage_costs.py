"""Costs the frontiers of several stages of one job in parallel, and lists the pools that all of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from meshwright.cost_models.question import CostModel
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.pins import Pin, Ranks
from meshwright.planner.plan.steps_ahead import SearchCase
from meshwright.planner.search import parallel
from meshwright.planner.search.costing import TimeLimit
from meshwright.planner.search.frontier import Frontier, PoolKind, frontier, kinds_of
from meshwright.profiles.stages import Stage


@dataclass
class StageCosts:
    """Costs stages of one job; `asked` collects every frontier that was costed."""

    facts: Facts
    model: CostModel
    pins: Sequence[Pin]
    costed_frontiers: list[Frontier] = field(default_factory=list)

    @cached_property
    def pools(self) -> dict[str, Mapping[Ranks, PoolKind]]:
        """The pools of each stage with their kinds; the many pools are listed once for equal pool pins."""
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

        `most` and `is_plain` are as in `frontier.frontier`.
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

    def in_parallel(
        self,
        work: Callable[[Stage], Frontier],
        stages: Sequence[Stage],
        *,
        prepare: Callable[[], None],
        on_start: Callable[[int], None],
    ) -> list[Frontier]:
        """Return the frontiers of some stages, with their pools; see `parallel.side_by_side`."""
        pools = self.pools  # listed here, so that a forked process inherits them
        frontiers = parallel.map_in_two_processes(work, stages, prepare=prepare, on_start=on_start)
        self.costed_frontiers += frontiers
        return [replace(found, pools=pools[found.stage.name]) for found in frontiers]


def costing_order(stages: Sequence[Stage]) -> tuple[list[Stage], ...]:
    """Group the stages in the order in which to cost them: generation, training, and the others.

    Generation and training take most of a period, so that their costs prune choices of the other stages most.
    """
    generates = [stage for stage in stages if stage.generates]
    trains = [stage for stage in stages if stage.trains]
    return generates, trains, [stage for stage in stages if stage not in [*generates, *trains]]
