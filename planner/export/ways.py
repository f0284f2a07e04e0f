"""The ways in which a trainer may place and run the stages of a job, each as pins and as choices that must be alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.pins import Ranks, parse_pin
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.pools import pool_sizes, pool_violations
from meshwright.planner.plan.rules import layout_rules
from meshwright.planner.plan.steps_ahead import StepsAhead, pattern_ahead
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.cluster import AnyCluster
from meshwright.profiles.layout import Layout, divisors, layers_of_stages
from meshwright.profiles.stages import GENERATE, StageGraph

ONE_AHEAD = 1
"""Steps by which generation may work ahead in the trainers that are known here."""

_EIGHTHS = 8
"""No part is smaller than one of these."""


@dataclass(frozen=True)
class SameChoice:
    """One choice of a stage that has to be that of another one."""

    stage: str
    leader: str
    key: str = "layout"


@dataclass(frozen=True, kw_only=True)
class Way:
    """What a trainer fixes when it is set up in one of its modes; everything else is free."""

    name: str
    pins: tuple[str, ...]
    alike: tuple[SameChoice, ...] = ()
    steps_ahead: int = 0

    def ahead(self, graph: StageGraph) -> StepsAhead:
        """The steps that every stage works ahead."""
        return pattern_ahead(graph, self.steps_ahead)

    def of(self, facts: Facts) -> Way:
        """What it fixes of the stages that a job has, which may have no critic or no reference. Of pipelines it leaves
        those out whose stages between the first and the last hold different numbers of layers, which no key says."""
        graph = facts.graph
        pins = tuple(pin for pin in self.pins if pin.partition(".")[0] in graph.by_name)
        return replace(
            self,
            pins=(*pins, *_equal_between(facts, pins)),
            alike=tuple(one for one in self.alike if {one.stage, one.leader} <= graph.by_name.keys()),
        )

    def broken(self, plan: Plan) -> Iterator[str]:
        """One clause for each choice of a plan that this way cannot say."""
        for text in self.pins:
            pin = parse_pin(text, plan.graph)
            has = plan.choice(pin.stage, pin.key)
            if not pin.allows(has):
                wants = f"anything but {pin.value}" if pin.forbids else f"{pin.value}"
                yield f"{pin.stage} has {pin.key}={has}, and it takes {wants}"
        for one in self.alike:
            mine, leaders = plan.choice(one.stage, one.key), plan.choice(one.leader, one.key)
            if mine != leaders:
                yield f"{one.stage} has {one.key}={mine}, and it takes that of {one.leader}, {leaders}"
        for placement in plan.placements:
            if placement.schedule.rows:
                yield f"{placement.stage} deals rows by speed, and it takes as many on every replica"
        ahead = self.ahead(plan.graph)
        for stage, steps in plan.ahead.items():
            if steps != ahead[stage]:
                yield f"{stage} works {steps} steps ahead, and it takes {ahead[stage]}"


def _equal_between(facts: Facts, pins: Iterable[str]) -> Iterator[str]:
    """Pins against pipelines of stages that the trainer itself cuts, on the pools that other pins put them on."""
    fixed_pins = [parse_pin(pin, facts.graph) for pin in pins]
    one_stage = {GENERATE, *(pin.stage for pin in fixed_pins if pin.key == "pp" and not pin.forbids)}
    for pin in fixed_pins:
        if isinstance(pin.value, Ranks) and pin.stage not in one_stage:
            stage, num_ranks = facts.graph.by_name[pin.stage], pin.value.num_ranks
            for pp in divisors(num_ranks):
                layouts = (Layout(tp=tp, pp=pp, dp=num_ranks // pp // tp) for tp in divisors(num_ranks // pp))
                if any(not layout_rules(facts, stage, layout) for layout in layouts):
                    between = layers_of_stages(facts.models.spec(stage.role), pp)[1:-1]
                    if len(set(between)) > 1:
                        yield f"{stage.name}.pp!={pp}"


def on(ranks: Ranks, stages: Iterable[str]) -> tuple[str, ...]:
    """The pins that put stages on a pool."""
    return tuple(f"{stage}.pool={ranks}" for stage in stages)


def fixed(key: str, value: object, stages: Iterable[str]) -> tuple[str, ...]:
    """The pins that give stages one value."""
    return tuple(f"{stage}.{key}={value}" for stage in stages)


def alike(key: str, leader: str, stages: Iterable[str]) -> tuple[SameChoice, ...]:
    """Stages that take a choice of another one."""
    return tuple(SameChoice(stage, leader, key) for stage in stages)


def names(*, trains: bool | None = None, role: str | None = None) -> tuple[str, ...]:
    """The stages of PPO, which has those of all algorithms, that do not generate, of a role or of all, those that train
    or those that do not."""
    return tuple(
        stage.name
        for stage in PPO_GRAPH.stages
        if not stage.generates and trains in (None, stage.trains) and role in (None, stage.role.value)
    )


def present(plan: Plan, stages: Mapping[str, str]) -> dict[str, str]:
    """Of a mapping from stages, or from names to them, what is of stages that the plan has."""
    return {one: other for one, other in stages.items() if {one, other} & plan.graph.by_name.keys()}


def all_ranks(cluster: AnyCluster) -> Ranks:
    """The pool of every rank."""
    return Ranks(0, cluster.num_ranks)


def parts(cluster: AnyCluster, number: int) -> Iterator[tuple[Ranks, ...]]:
    """The ways to divide all ranks into so many pools that follow each other."""
    return _parts(cluster, 0, number)


def _parts(cluster: AnyCluster, first: int, number: int) -> Iterator[tuple[Ranks, ...]]:
    left = cluster.num_ranks - first
    if number == 1:
        if left and not pool_violations(cluster, first, left):
            yield (Ranks(first, left),)
        return
    least = cluster.num_ranks / _EIGHTHS
    for size in pool_sizes(cluster):
        if least <= size < left and not pool_violations(cluster, first, size):
            for others in _parts(cluster, first + size, number - 1):
                yield (Ranks(first, size), *others)


def served_in_parts_of_tp() -> tuple[str, ...]:
    """The pins of a trainer whose engines, of the reward model too, know tensor parallelism alone, and which neither
    overlaps stages nor interleaves pipelines."""
    return (
        *no_overlap(),
        *fixed("pp", 1, (GENERATE, "reward_score")),
        "reward_score.cp=1",
        *fixed("vpp", 1, names(trains=True)),
        "reward_score.offload=none",
    )


def no_overlap() -> tuple[str, ...]:
    """The pins of a trainer that neither streams responses nor keeps sequences of a batch for the next one."""
    reads = names(trains=False)
    return (
        *fixed("chunk_tokens", 0, reads),
        f"{GENERATE}.batches_in_flight=1",
        f"{GENERATE}.overcommit=0",
    )
