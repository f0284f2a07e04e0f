"""The deployment modes of other trainers: each fixes choices of a plan by pins, and makes choices of stages equal.

For example, in one mode of verl generation is on the ranks that train. All other choices of a mode are free.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from meshwright.planner.job.job import Facts
from meshwright.planner.plan.layout_and_schedule_rules import layout_rules
from meshwright.planner.plan.pins import Ranks, Value, parse_pin
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.pool_rules import pool_sizes, pool_violations
from meshwright.planner.plan.steps_ahead import StepsAhead, pattern_ahead
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.hardware import AnyCluster
from meshwright.profiles.layout import Layout, divisors, layers_per_stage
from meshwright.profiles.stages import GENERATE, StageGraph

ONE_AHEAD = 1
"""Steps that generation works ahead in the asynchronous modes of all known trainers."""

_MIN_POOL_DIVISOR = 8
"""Each of several pools has at least 1/8 of the ranks."""


@dataclass(frozen=True)
class EqualChoice:
    """A choice of one stage, by `key`, that has to equal that of another stage, the leader."""

    stage: str
    leader: str
    key: str = "layout"


@dataclass(frozen=True, kw_only=True)
class DeploymentMode:
    """A deployment mode of a trainer: the pins and equal choices that it requires; everything else is free.

    `with_sp` are stages that have sequence parallelism wherever they have tensor parallelism. Each of them leads or
    follows an equal choice of its layout. `has_end_layers` says whether the trainer has keys for the numbers of layers
    of the first and the last stage of a pipeline.
    """

    name: str
    pins: tuple[str, ...]
    equal_choices: tuple[EqualChoice, ...] = ()
    steps_ahead: int = 0
    with_sp: tuple[str, ...] = ()
    has_end_layers: bool = True

    def expressible_value(self, stage: str, value: Value) -> Value:
        """The value that the mode gives a stage for a choice: a layout gets the sequence parallelism of `with_sp`."""
        if isinstance(value, Layout) and stage in self.with_sp:
            return replace(value, sp=value.tp > 1)
        return value

    def ahead(self, graph: StageGraph) -> StepsAhead:
        """The steps ahead of every stage."""
        return pattern_ahead(graph, self.steps_ahead)

    def for_job(self, facts: Facts) -> DeploymentMode:
        """The mode restricted to the stages of a job, which may have no critic or no reference.

        Pipelines whose stages hold different numbers of layers are forbidden, except for the first and the last stage
        if the trainer has keys for them.
        """
        graph = facts.graph
        pins = tuple(pin for pin in self.pins if pin.partition(".")[0] in graph.by_name)
        return replace(
            self,
            pins=(*pins, *_equal_stages(facts, pins, has_end_layers=self.has_end_layers)),
            equal_choices=tuple(self._present_choices(graph)),
            with_sp=tuple(stage for stage in self.with_sp if stage in graph.by_name),
        )

    def _present_choices(self, graph: StageGraph) -> Iterator[EqualChoice]:
        """The equal choices between stages of a job. Where it lacks the leader of a group, the first of its other
        stages leads."""
        groups: dict[tuple[str, str], list[str]] = {}
        for choice in self.equal_choices:
            groups.setdefault((choice.leader, choice.key), []).append(choice.stage)
        for (leader, key), followers in groups.items():
            present = [stage for stage in (leader, *followers) if stage in graph.by_name]
            yield from (EqualChoice(stage, present[0], key) for stage in present[1:])

    def inexpressible(self, plan: Plan) -> Iterator[str]:
        """A clause for each choice of a plan that this mode cannot express."""
        for text in self.pins:
            pin = parse_pin(text, plan.graph)
            value = plan.choice(pin.stage, pin.key)
            if not pin.allows(value):
                required = f"anything but {pin.value}" if pin.forbids else f"{pin.value}"
                yield f"{pin.stage} has {pin.key}={value}, and the trainer requires {required}"
        yield from self._unequal(plan)
        for placement in plan.placements:
            if self.expressible_value(placement.stage, placement.layout) != placement.layout:
                yield f"{placement.stage} has layout={placement.layout}, and the trainer requires sp with tp above 1"
            if placement.schedule.rows:
                yield f"{placement.stage} splits rows by speed, and the trainer gives every replica equally many"
        ahead = self.ahead(plan.graph)
        for stage, steps in plan.ahead.items():
            if steps != ahead[stage]:
                yield f"{stage} works {steps} steps ahead, and the trainer requires {ahead[stage]}"

    def _unequal(self, plan: Plan) -> Iterator[str]:
        """A clause for each choice that differs from its leader's."""
        for choice in self.equal_choices:
            value, leader_value = plan.choice(choice.stage, choice.key), plan.choice(choice.leader, choice.key)
            if value != leader_value:
                yield (
                    f"{choice.stage} has {choice.key}={value}, and the trainer requires that of {choice.leader}, "
                    f"{leader_value}"
                )


def _equal_stages(facts: Facts, pins: Iterable[str], *, has_end_layers: bool) -> Iterator[str]:
    """Pins that forbid pipeline degrees whose stages hold different numbers of layers; with `has_end_layers` the first
    and the last stage may.

    Applies to stages for which a pin fixes the pool and no pin fixes the pipeline degree.
    """
    fixed_pins = [parse_pin(pin, facts.graph) for pin in pins]
    single_stage = {GENERATE, *(pin.stage for pin in fixed_pins if pin.key == "pp" and not pin.forbids)}
    for pin in fixed_pins:
        if isinstance(pin.value, Ranks) and pin.stage not in single_stage:
            stage, num_ranks = facts.graph.by_name[pin.stage], pin.value.num_ranks
            for pp in divisors(num_ranks):
                layouts = (Layout(tp=tp, pp=pp, dp=num_ranks // pp // tp) for tp in divisors(num_ranks // pp))
                if any(not layout_rules(facts, stage, layout) for layout in layouts):
                    layers = layers_per_stage(facts.models.spec(stage.role), pp)
                    if len(set(layers[1:-1] if has_end_layers else layers)) > 1:
                        yield f"{stage.name}.pp!={pp}"


def on_pool(ranks: Ranks, stages: Iterable[str]) -> tuple[str, ...]:
    """Pins that put stages on a pool."""
    return tuple(f"{stage}.pool={ranks}" for stage in stages)


def pin_value(key: str, value: object, stages: Iterable[str]) -> tuple[str, ...]:
    """Pins that give stages one value."""
    return tuple(f"{stage}.{key}={value}" for stage in stages)


def equal_choices(key: str, leader: str, stages: Iterable[str]) -> tuple[EqualChoice, ...]:
    """Choices of stages that follow those of a leader."""
    return tuple(EqualChoice(stage, leader, key) for stage in stages)


def ppo_stages(*, trains: bool | None = None, role: str | None = None) -> tuple[str, ...]:
    """The stages of PPO that do not generate, optionally only those of one role, and only those that train (or do not).

    PPO has the stages of all exported algorithms.
    """
    return tuple(
        stage.name
        for stage in PPO_GRAPH.stages
        if not stage.generates and trains in (None, stage.trains) and role in (None, stage.role.value)
    )


def present_stages(plan: Plan, stages: Mapping[str, str]) -> dict[str, str]:
    """The items of a mapping whose key or value is a stage of the plan."""
    return {key: value for key, value in stages.items() if {key, value} & plan.graph.by_name.keys()}


def all_ranks(cluster: AnyCluster) -> Ranks:
    """The pool of all ranks."""
    return Ranks(0, cluster.num_ranks)


def pool_divisions(cluster: AnyCluster, number: int) -> Iterator[tuple[Ranks, ...]]:
    """All divisions of the ranks into `number` consecutive pools."""
    return _divisions(cluster, 0, number)


def _divisions(cluster: AnyCluster, first: int, number: int) -> Iterator[tuple[Ranks, ...]]:
    num_left = cluster.num_ranks - first
    if number == 1:
        if num_left and not pool_violations(cluster, first, num_left):
            yield (Ranks(first, num_left),)
        return
    min_size = cluster.num_ranks / _MIN_POOL_DIVISOR
    for size in pool_sizes(cluster):
        if min_size <= size < num_left and not pool_violations(cluster, first, size):
            for rest in _divisions(cluster, first + size, number - 1):
                yield (Ranks(first, size), *rest)


def tp_only_engines(*, has_drafts: bool) -> tuple[str, ...]:
    """The pins of a trainer whose engines, that of the reward model included, support only tensor parallelism.

    `has_drafts` says whether the trainer has keys for speculative decoding. The trainer neither overlaps stages nor
    interleaves pipelines.
    """
    return (
        *no_overlap(has_drafts=has_drafts),
        *pin_value("pp", 1, (GENERATE, "reward_score")),
        "reward_score.cp=1",
        *pin_value("vpp", 1, ppo_stages(trains=True)),
        "reward_score.offload=none",
    )


def no_overlap(*, has_drafts: bool = False) -> tuple[str, ...]:
    """The pins of a trainer that neither streams responses nor carries unfinished sequences into the next batch; nor
    decodes speculatively, unless it has keys for drafts."""
    reads = ppo_stages(trains=False)
    return (
        *pin_value("chunk_tokens", 0, reads),
        f"{GENERATE}.batches_in_flight=1",
        f"{GENERATE}.overcommit=0",
        *(() if has_drafts else (f"{GENERATE}.draft_tokens=0",)),
    )
