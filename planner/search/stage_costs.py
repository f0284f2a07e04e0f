"""The frontiers of the stages of one job, costed side by side, and what is the same for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from meshwright.cost_models.question import CostModel
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.pins import Pin, Ranks
from meshwright.planner.plan.steps_ahead import Scope
from meshwright.planner.search import parallel
from meshwright.planner.search.costing import Most
from meshwright.planner.search.frontier import Frontier, PoolKind, frontier, kinds_of
from meshwright.profiles.stages import Stage


@dataclass
class StageCosts:
    """`asked` grows by every frontier that is costed."""

    facts: Facts
    model: CostModel
    pins: Sequence[Pin]
    asked: list[Frontier] = field(default_factory=list)

    @cached_property
    def pools(self) -> dict[str, Mapping[Ranks, PoolKind]]:
        """Those of each stage; listed once for all that have the same, for they are many."""
        known: dict[frozenset[Pin], Mapping[Ranks, PoolKind]] = {}
        found = {}
        for stage in self.facts.graph.stages:
            pool_pins = frozenset(pin for pin in self.pins if pin.stage == stage.name and pin.key == "pool")
            if pool_pins not in known:
                known[pool_pins] = kinds_of(self.facts, stage, self.pins)
            found[stage.name] = known[pool_pins]
        return found

    @cached_property
    def kinds(self) -> dict[str, set[PoolKind]]:
        """Those of the pools of each stage."""
        return {name: set(pools.values()) for name, pools in self.pools.items()}

    def frontier(
        self, stage: Stage, scope: Scope, most: Mapping[PoolKind, Most] | None, *, is_plain: bool = False
    ) -> Frontier:
        """One stage's in a scope, without its pools: they are known, and too many to be told by another process.

        `most` and `is_plain` as in `frontier.frontier`.
        """
        found = frontier(
            self.facts,
            self.model,
            stage,
            self.pins,
            scope=scope,
            most=most,
            is_plain=is_plain,
            on=self.pools[stage.name],
        )
        return replace(found, pools={})

    def side_by_side(
        self,
        work: Callable[[Stage], Frontier],
        stages: Sequence[Stage],
        *,
        prepare: Callable[[], None],
        begun: Callable[[int], None],
    ) -> list[Frontier]:
        """Frontiers of some stages, with their pools; see `parallel.side_by_side`."""
        pools = self.pools  # listed before the work is shared
        found = parallel.side_by_side(work, stages, prepare=prepare, begun=begun)
        self.asked += found
        return [replace(one, pools=pools[one.stage.name]) for one in found]


def first_to_cost(stages: Sequence[Stage]) -> tuple[list[Stage], ...]:
    """Those that take most of a turn: what is known of them leaves out choices of the others, or all."""
    generates = [stage for stage in stages if stage.generates]
    trains = [stage for stage in stages if stage.trains]
    return generates, trains, [stage for stage in stages if stage not in [*generates, *trains]]
