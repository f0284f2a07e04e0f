"""The choices of one stage on a pool of one size, before anything is known of their cost.

Every choice that is left out is counted under the sentence that says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from meshwright.planner.plan.calls import Choice
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.micro_batch_rules import USUAL, Wanted
from meshwright.planner.plan.pins import Pin, Ranks, Value, value_of
from meshwright.planner.plan.pools import (
    crossing_violations,
    first_ranks,
    may_deal,
    pool_sizes,
    pool_violations,
)
from meshwright.planner.plan.rules import (
    layout_rules,
    max_context_parallel,
    offered_layouts,
    schedules,
    streaming_rules,
)
from meshwright.planner.plan.steps_ahead import Scope, patterns, plain, scopes
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout, divisors
from meshwright.profiles.schedule import Offload, Recompute, Schedule
from meshwright.profiles.stages import Stage

PINNED = "excluded by a pin"


def choices(
    facts: Facts,
    stage: Stage,
    num_ranks: int,
    pins: Sequence[Pin],
    *,
    part: int = 0,
    scope: Scope | None = None,
    wanted: Wanted = USUAL,
) -> Iterator[Choice]:
    """The legal choices that agree with the pins, in a fixed order, as `choices_by_layout` has them."""
    every = choices_by_layout(facts, stage, num_ranks, pins, Counter(), part=part, scope=scope, wanted=wanted)
    return (Choice(layout, schedule) for layout, schedules in every for schedule in schedules)


def choices_by_layout(
    facts: Facts,
    stage: Stage,
    num_ranks: int,
    pins: Sequence[Pin],
    rejected: Counter[str],
    *,
    part: int = 0,
    scope: Scope | None = None,
    plain_only: bool = False,
    wanted: Wanted = USUAL,
) -> Iterator[tuple[Layout, list[Schedule]]]:
    """The legal layouts on a part of the cluster, each with its legal schedules that agree with the pins, in a fixed
    order; the other choices are counted in `rejected`. How rows are dealt by speed is not said.

    Those that are not plain are left out, uncounted, where only plain ones are asked for. The scope is the plainest
    where none is given. Rows and caps of tokens that are pinned are offered beside the usual ones, or what is `wanted`.
    """
    scope = scope or plain(facts.graph)
    wanted = _wanted(pins) if pins else wanted
    for whole in _layouts(facts, stage, num_ranks, wanted):
        if plain_only and not _is_plain_layout(whole, facts.cluster.ranks_per_node):
            continue
        for layout in (whole,) if plain_only else _with_chunks(facts, stage, whole):
            broken = layout_rules(facts, stage, layout, part)
            if broken:
                rejected[broken[0]] += 1
                break  # what one number of chunks breaks, the others do
            legal, by_chunk = [], {0: broken}
            for schedule in schedules(facts, stage, layout, scope, wanted):
                if plain_only and not _is_plain_schedule(schedule, facts.workload.max_tokens):
                    continue
                if schedule.chunk_tokens not in by_chunk:
                    by_chunk[schedule.chunk_tokens] = streaming_rules(facts, layout, schedule, part)
                broken = by_chunk[schedule.chunk_tokens]
                if not broken and (not pins or agrees(Choice(layout, schedule), pins)):
                    legal.append(schedule)
                else:
                    rejected[broken[0] if broken else PINNED] += 1
            if legal:
                yield layout, legal


def _wanted(pins: Sequence[Pin]) -> Wanted:
    """By the pins of a stage."""
    caps = [pin.value for pin in pins if pin.key == "micro_batch_tokens" and not pin.forbids]
    by_rows = 0 in caps or any(pin.key == "micro_batch_size" for pin in pins)
    all_layouts = any(pin.key in ("layout", "pp", "ep", "etp") for pin in pins)
    return Wanted(by_rows, tuple(cap for cap in caps if isinstance(cap, int) and cap), all_layouts)


def _is_plain_layout(layout: Layout, ranks_per_node: int) -> bool:
    """What is usual: tensor parallelism within a node and with sequence parallelism, no context parallelism."""
    return layout.tp <= ranks_per_node and layout.sp == (layout.tp > 1) and layout.cp == 1


def _is_plain_schedule(schedule: Schedule, longest: int) -> bool:
    """Everything on the device, no chunks, micro-batches with room for a power of four of the longest rows, all or no
    activations recomputed."""
    rows = schedule.most_tokens(longest) // longest
    is_power_of_four = rows.bit_length() % 2 and rows.bit_count() == 1
    return (
        schedule.offload is Offload.NONE
        and schedule.recompute is not Recompute.SELECTIVE
        and not schedule.chunk_tokens
        and bool(is_power_of_four)
    )


def pools(facts: Facts, stage: Stage, pins: Iterable[Pin]) -> tuple[Ranks, ...]:
    """The pools that a stage may run on."""
    cluster = facts.cluster
    mine = [pin for pin in pins if pin.stage == stage.name and pin.key == "pool"]
    every = (Ranks(first, size) for size in pool_sizes(cluster) for first in first_ranks(cluster, size))
    return tuple(
        ranks
        for ranks in every
        if all(pin.allows(ranks) for pin in mine)
        and (may_deal(facts, stage) or len(cluster.parts_of(cluster.part_of_pool(ranks.ranks))) == 1)
    )


def check_pins(facts: Facts, pins: Sequence[Pin]) -> None:
    """Raises BadInput for the first pin that no legal choice agrees with, naming the nearest legal value."""
    for name in dict.fromkeys(pin.stage for pin in pins):
        stage, mine = facts.graph.by_name[name], [pin for pin in pins if pin.stage == name]
        for pin in mine:
            if isinstance(pin.value, Ranks):
                _refuse(pin, pool_violations(facts.cluster, pin.value.first_rank, pin.value.num_ranks))
            if isinstance(pin.value, Layout):
                _refuse(pin, layout_rules(facts, stage, pin.value))
        _check_together(facts, stage, mine)
    fixed = [pin for pin in pins if isinstance(pin.value, Ranks) and not pin.forbids]
    for one, other in combinations(fixed, 2):
        assert isinstance(one.value, Ranks)
        assert isinstance(other.value, Ranks)
        _refuse(other, crossing_violations(one.value.ranks, other.value.ranks))


def _check_together(facts: Facts, stage: Stage, pins: Sequence[Pin]) -> None:
    """Adds the pins one by one to the legal choices, and refuses the first that leaves none or forbids none."""
    cluster = facts.cluster
    parts = [(cluster.part_of_pool(ranks.ranks), ranks.num_ranks) for ranks in pools(facts, stage, pins)]
    kinds = {(len(cluster.parts_of(part)), size): part for part, size in parts}
    if not kinds:
        _refuse(pins[-1], (f"no pool is left for {stage.name}; remove one of its pins.",))
    wanted = _wanted(pins)
    every = left = [
        choice
        for ahead in patterns(facts.graph, facts.staleness)
        for scope in scopes(ahead, facts.staleness)
        for (_, size), part in sorted(kinds.items(), key=lambda kind: kind[0][::-1])
        for choice in choices(facts, stage, size, (), part=part, scope=scope, wanted=wanted)
    ]
    for pin in pins:
        if pin.key == "pool":
            continue
        values = {_value(choice, pin.key) for choice in (every if pin.forbids else left)}
        if left and pin.value not in values:
            legal = min(values, key=lambda value: _distance(value, pin.value))
            _refuse(pin, (f"no legal choice has it; the nearest legal value is {legal}.",))
        agreeing = [choice for choice in left if agrees(choice, (pin,))]
        if left and not agreeing:
            _refuse(pin, (f"it leaves {stage.name} without a legal choice; remove one of its pins.",))
        left = agreeing


def _refuse(pin: Pin, broken: Sequence[str]) -> None:
    if broken:
        raise BadInput(f"{pin.told}: {broken[0]}")


def _layouts(facts: Facts, stage: Stage, num_ranks: int, wanted: Wanted) -> Iterator[Layout]:
    """Every way to write `num_ranks` as tp x pp x dp x cp, with sequence parallelism off and on, and experts dealt out
    in every way that is offered."""
    max_cp = max_context_parallel(facts, stage)
    for tp in divisors(num_ranks):
        for pp in divisors(num_ranks // tp):
            for cp in divisors(num_ranks // (tp * pp)):
                dp = num_ranks // (tp * pp * cp)
                if cp > max_cp:
                    break
                for sp in (False, True)[: 2 if tp > 1 else 1]:
                    yield from offered_layouts(facts, stage, Layout(tp=tp, pp=pp, dp=dp, sp=sp, cp=cp), wanted)


def _with_chunks(facts: Facts, stage: Stage, layout: Layout) -> Iterator[Layout]:
    """The layout and, for a stage that trains, those that cut its pipeline stages in every number of chunks that
    divides their layers."""
    yield layout
    num_layers = facts.models.spec(stage.role).num_layers
    if stage.trains and layout.pp > 1 and num_layers % layout.pp == 0:
        for vpp in divisors(num_layers // layout.pp)[1:]:
            yield replace(layout, vpp=vpp)


def agrees(choice: Choice, pins: Iterable[Pin]) -> bool:
    """Whether the pins of a stage allow a choice, on whatever pool."""
    return all(pin.key == "pool" or pin.allows(_value(choice, pin.key)) for pin in pins)


def _value(choice: Choice, key: str) -> Value:
    return value_of(choice.layout, choice.schedule, key)


def _distance(value: object, wanted: object) -> tuple[float, str]:
    """How far a legal value is from the wanted one; among equals the first in writing."""
    if isinstance(value, int) and isinstance(wanted, int):
        return abs(value - wanted), f"{value:09d}"
    if isinstance(value, Layout) and isinstance(wanted, Layout):
        axes = ("tp", "pp", "dp", "sp", "ep", "folded", "cp", "vpp")
        return sum(abs(getattr(value, axis) - getattr(wanted, axis)) for axis in axes), str(value)
    return 0.0, str(value)
