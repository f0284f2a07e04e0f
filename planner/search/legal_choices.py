"""Enumerates the legal choices (layout and schedule) of one stage on a pool of one size, without any costs.

Every rejected choice is counted under the sentence that says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations
from typing import Any

import numpy as np

from meshwright.planner.job.job import Facts
from meshwright.planner.plan.cost_queries import Choice
from meshwright.planner.plan.layout_and_schedule_rules import (
    layout_rules,
    max_context_parallel,
    offered_layouts,
    schedule_rules,
    schedule_table,
    streaming_rules,
)
from meshwright.planner.plan.micro_batch_rules import NO_EXTRA_CHOICES, ExtraChoices
from meshwright.planner.plan.pins import DEGREES, Pin, Ranks, Value, value_of
from meshwright.planner.plan.pool_rules import (
    first_ranks,
    may_span_node_kinds,
    overlap_violations,
    pool_sizes,
    pool_violations,
)
from meshwright.planner.plan.steps_ahead import SearchCase, search_cases, steps_ahead_patterns, synchronous_case
from meshwright.profiles.choice_table import ChoiceTable, ScheduleTable
from meshwright.profiles.elementwise import BoolArray
from meshwright.profiles.errors import BadInput, one_of
from meshwright.profiles.layout import Layout, divisors
from meshwright.profiles.schedule import Offload, Recompute, Schedule
from meshwright.profiles.stages import Stage

PINNED = "excluded by a pin"


_INDEPENDENT_DEGREES = ("tp", "pp", "cp")
"""Degrees whose rules need no other degree."""


def legal_choices(
    facts: Facts,
    stage: Stage,
    num_ranks: int,
    pins: Sequence[Pin],
    *,
    part: int = 0,
    search_case: SearchCase | None = None,
    extra_choices: ExtraChoices = NO_EXTRA_CHOICES,
) -> Iterator[Choice]:
    """Yield the legal choices that agree with the pins, in a fixed order; see `legal_choice_table`."""
    table = legal_choice_table(
        facts, stage, num_ranks, pins, Counter(), part=part, search_case=search_case, extra_choices=extra_choices
    )
    return (Choice(layout, schedule) for layout, schedule in table)


def legal_choice_table(
    facts: Facts,
    stage: Stage,
    num_ranks: int,
    pins: Sequence[Pin],
    rejected: Counter[str],
    *,
    part: int = 0,
    search_case: SearchCase | None = None,
    usual_only: bool = False,
    extra_choices: ExtraChoices = NO_EXTRA_CHOICES,
) -> ChoiceTable:
    """Return the legal layouts on a part of the cluster, each with its legal schedules that agree with the pins.

    The order is fixed. Rejected choices are counted in `rejected`, by reason. Over two kinds of nodes, rows are
    split by speed later, by `cost_models.mixed`. With `usual_only`, only usual choices (`_is_usual_layout`,
    `_usual_schedules`) are returned, and the others are not counted. `search_case` defaults to `synchronous_case`.
    Micro-batch sizes and token caps that are pinned are offered in addition to the usual ones; without pins,
    `extra_choices` has the extra choices.
    """
    search_case = search_case or synchronous_case(facts.graph)
    extra_choices = _pinned_extra_choices(pins) if pins else extra_choices
    layouts, tables, all_legal = list[Layout](), list[ScheduleTable](), list[BoolArray]()
    for uninterleaved in _layouts(facts, stage, num_ranks, extra_choices):
        if usual_only and not _is_usual_layout(uninterleaved, facts.cluster.ranks_per_node):
            continue
        for layout in (uninterleaved,) if usual_only else _with_interleaving(facts, stage, uninterleaved):
            violations = layout_rules(facts, stage, layout, part)
            if violations:
                rejected[violations[0]] += 1
                break  # every number of model chunks (vpp) violates the same rule
            table = schedule_table(facts, stage, layout, search_case, extra_choices)
            is_legal = _usual_schedules(table, facts.workload.max_tokens) if usual_only else np.full(len(table), True)
            is_legal = _without_illegal_streaming(facts, layout, table, is_legal, rejected, part=part)
            if pins:
                agreeing = np.array([agrees(Choice(layout, schedule), pins) for schedule in table.schedules])
                rejected[PINNED] += int((is_legal & ~agreeing).sum())
                is_legal = is_legal & agreeing
            if is_legal.any():
                layouts.append(layout)
                tables.append(table)
                all_legal.append(is_legal)
    whole = ChoiceTable.from_product(layouts, tables)
    return whole.filter(np.concatenate(all_legal)) if layouts else whole


def _without_illegal_streaming(
    facts: Facts,
    layout: Layout,
    table: ScheduleTable,
    is_legal: BoolArray,
    rejected: Counter[str],
    *,
    part: int,
) -> BoolArray:
    """Return `is_legal`, [schedules], without the schedules that stream but may not do so on this layout.

    Those are counted in `rejected`.
    """
    for chunk_tokens, has_chunks in table.has_chunk_size.items():
        violations = streaming_rules(facts, layout, Schedule(chunk_tokens=chunk_tokens), part)
        if violations:
            rejected[violations[0]] += int((is_legal & has_chunks).sum())
            is_legal = is_legal & ~has_chunks
    return is_legal


def _pinned_extra_choices(pins: Sequence[Pin]) -> ExtraChoices:
    """Return the micro-batches and layouts beyond the usual ones that the pins of a stage require."""
    caps = [pin.value for pin in pins if pin.key == "micro_batch_tokens" and not pin.forbids]
    # A cap of 0 tokens means micro-batches by rows.
    by_rows = 0 in caps or any(pin.key == "micro_batch_size" for pin in pins)
    all_layouts = any(pin.key in ("layout", "pp", "ep", "etp") for pin in pins)
    return ExtraChoices(by_rows, tuple(cap for cap in caps if isinstance(cap, int) and cap), all_layouts)


def _is_usual_layout(layout: Layout, ranks_per_node: int) -> bool:
    """True for the usual layouts: tp within a node and with sequence parallelism, no context parallelism."""
    return layout.tp <= ranks_per_node and layout.sp == (layout.tp > 1) and layout.cp == 1


def _usual_schedules(table: ScheduleTable, longest: int) -> BoolArray:
    """True for the usual schedules: no offload, selective recomputation or chunks, [schedules].

    Their micro-batches have room for 1, 4, 16, ... rows of the maximum length.
    """
    return np.array([_is_usual_schedule(schedule, longest) for schedule in table.schedules])


@lru_cache(maxsize=4096)  # many layouts have the same schedules
def _is_usual_schedule(schedule: Schedule, longest: int) -> bool:
    rows = schedule.max_tokens(longest) // longest
    is_power_of_four = rows.bit_length() % 2 and rows.bit_count() == 1
    return (
        schedule.offload is Offload.NONE
        and schedule.recompute is not Recompute.SELECTIVE
        and not schedule.chunk_tokens
        and bool(is_power_of_four)
    )


def pools(facts: Facts, stage: Stage, pins: Iterable[Pin]) -> tuple[Ranks, ...]:
    """Return the pools that a stage may run on."""
    cluster = facts.cluster
    pool_pins = [pin for pin in pins if pin.stage == stage.name and pin.key == "pool"]
    all_ranks = (Ranks(first, size) for size in pool_sizes(cluster) for first in first_ranks(cluster, size))
    return tuple(
        ranks
        for ranks in all_ranks
        if all(pin.allows(ranks) for pin in pool_pins)
        and (may_span_node_kinds(facts, stage) or len(cluster.parts_of(cluster.part_of_pool(ranks.ranks))) == 1)
    )


def check_pins(facts: Facts, pins: Sequence[Pin]) -> None:
    """Check that the pins leave legal choices.

    Raises BadInput for the first pin that no legal choice agrees with; the message names the nearest legal value.
    """
    for name in dict.fromkeys(pin.stage for pin in pins):
        stage, stage_pins = facts.graph.by_name[name], [pin for pin in pins if pin.stage == name]
        for pin in stage_pins:
            if isinstance(pin.value, Ranks):
                _refuse(pin, pool_violations(facts.cluster, pin.value.first_rank, pin.value.num_ranks))
            if isinstance(pin.value, Layout):
                _refuse(pin, layout_rules(facts, stage, pin.value))
        _check_together(facts, stage, stage_pins)
    pool_pins = [pin for pin in pins if isinstance(pin.value, Ranks) and not pin.forbids]
    for first, second in combinations(pool_pins, 2):
        assert isinstance(first.value, Ranks)
        assert isinstance(second.value, Ranks)
        _refuse(second, overlap_violations(first.value.ranks, second.value.ranks))


def _check_together(facts: Facts, stage: Stage, pins: Sequence[Pin]) -> None:
    """Apply the pins of a stage one by one.

    Refuse the first pin that leaves no legal choice, or that forbids a value that no legal choice has.
    """
    cluster = facts.cluster
    parts = [(cluster.part_of_pool(ranks.ranks), ranks.num_ranks) for ranks in pools(facts, stage, pins)]
    # One part of the cluster for each pool size and each number of node kinds (1 or 2).
    kinds = {(size, len(cluster.parts_of(part))): part for part, size in parts}
    if not kinds:
        _refuse(pins[-1], (f"no pool is left for {stage.name}; remove one of its pins.",))
    extra_choices = _pinned_extra_choices(pins)
    all_legal = remaining = [
        choice
        for ahead in steps_ahead_patterns(facts.graph, facts.staleness)
        for search_case in search_cases(ahead, facts.staleness)
        for (size, _), part in sorted(kinds.items())
        for choice in legal_choices(
            facts, stage, size, (), part=part, search_case=search_case, extra_choices=extra_choices
        )
    ]
    for pin in pins:
        if pin.key == "pool":
            continue
        values = {_value(choice, pin.key) for choice in (all_legal if pin.forbids else remaining)}
        if remaining and pin.value not in values:
            legal = min(values, key=lambda value: _distance(value, pin.value))
            reason = _why_illegal(facts, stage, pin, all_legal if pin.forbids else remaining)
            nearest_value = f"no legal choice has this value{reason}; the nearest legal value is {legal}."
            _refuse(pin, (*_broken_by_degree(facts, stage, pin), nearest_value))
        agreeing = [choice for choice in remaining if agrees(choice, (pin,))]
        if remaining and not agreeing:
            _refuse(pin, (f"it leaves {stage.name} without a legal choice; remove one of its pins.",))
        remaining = agreeing


def _broken_by_degree(facts: Facts, stage: Stage, pin: Pin) -> Iterator[str]:
    """Yield the rules that a pinned degree breaks by itself, such as one that does not divide the attention heads."""
    if pin.key in _INDEPENDENT_DEGREES and isinstance(pin.value, int) and not pin.forbids:
        for sentence in layout_rules(facts, stage, Layout.parse(f"{pin.key}{pin.value}")):
            if sentence.startswith(f"{pin.key}={pin.value} "):
                yield sentence


def _why_illegal(facts: Facts, stage: Stage, pin: Pin, legal: Sequence[Choice]) -> str:
    """Return the clause that says which rule the pinned value breaks in the nearest legal choice; empty if that choice
    would be legal with it but is not offered."""
    nearest = min(legal, key=lambda choice: _distance(_value(choice, pin.key), pin.value))
    if pin.key == "layout" or pin.key in DEGREES:
        layout = pin.value if isinstance(pin.value, Layout) else _nearest_with_degree(legal, pin)
        sizes = sorted({choice.layout.num_ranks for choice in legal})
        if layout is not None and layout.num_ranks not in sizes:
            return f", since {layout} takes {layout.num_ranks} ranks and its pool has {one_of(sizes)}"
        violations = layout_rules(facts, stage, layout) if layout else ()
    else:
        violations = schedule_rules(facts, stage, nearest.layout, _with_field(nearest.schedule, pin))
    for sentence in violations:
        if sentence.startswith(f"{pin.key}={pin.value} "):
            # Without its advice: the message names the nearest legal value.
            return f", since {sentence.removesuffix('.').partition('; use')[0]}"
    return ""


def _nearest_with_degree(legal: Sequence[Choice], pin: Pin) -> Layout | None:
    """Return the layout of the legal choice with the nearest degree that may have the pinned degree instead, or None if
    there is none."""
    by_distance = sorted(legal, key=lambda choice: _distance(_value(choice, pin.key), pin.value))
    return next((layout for choice in by_distance if (layout := _with_degree(choice.layout, pin))), None)


def _with_degree(layout: Layout, pin: Pin) -> Layout | None:
    """Return the layout with the pinned degree, or None if no layout has it together with the other degrees."""
    # The degrees of the experts have to divide dp, and were chosen for another one.
    plain = replace(layout, ep=1, etp=layout.tp, vpp=1) if pin.key == "dp" else layout
    try:
        changed: dict[str, Any] = {pin.key: pin.value}
        return replace(plain, **changed)
    except BadInput:
        return None


def _with_field(schedule: Schedule, pin: Pin) -> Schedule:
    """Return the schedule with the pinned field; micro-batches are split either by rows or by tokens."""
    changed: dict[str, Any] = {pin.key: pin.value}
    if pin.key == "micro_batch_size":
        changed["micro_batch_tokens"] = 0
    elif pin.key == "micro_batch_tokens":
        changed["micro_batch_size"] = 0 if pin.value else 1
    return replace(schedule, **changed)


def _refuse(pin: Pin, violations: Sequence[str]) -> None:
    if violations:
        raise BadInput(f"{pin.quoted}: {violations[0]}")


def _layouts(facts: Facts, stage: Stage, num_ranks: int, extra_choices: ExtraChoices) -> Iterator[Layout]:
    """Yield every factorisation of `num_ranks` into tp x pp x dp x cp.

    Each comes with and without sequence parallelism, and with every offered degree of expert parallelism.
    """
    max_cp = max_context_parallel(facts, stage)
    for tp in divisors(num_ranks):
        for pp in divisors(num_ranks // tp):
            for cp in divisors(num_ranks // (tp * pp)):
                dp = num_ranks // (tp * pp * cp)
                if cp > max_cp:
                    break
                for sp in (False, True)[: 2 if tp > 1 else 1]:
                    yield from offered_layouts(facts, stage, Layout(tp=tp, pp=pp, dp=dp, sp=sp, cp=cp), extra_choices)


def _with_interleaving(facts: Facts, stage: Stage, layout: Layout) -> Iterator[Layout]:
    """Yield the layout and, for a stage that trains, its interleaved variants.

    Every number of model chunks (vpp) that divides the layers of a pipeline stage is offered.
    """
    yield layout
    num_layers = facts.models.spec(stage.role).num_layers
    if stage.trains and layout.pp > 1 and num_layers % layout.pp == 0:
        for vpp in divisors(num_layers // layout.pp)[1:]:
            yield replace(layout, vpp=vpp)


def agrees(choice: Choice, pins: Iterable[Pin]) -> bool:
    """True if the pins of a stage allow a choice; pins of pools are ignored."""
    return all(pin.key == "pool" or pin.allows(_value(choice, pin.key)) for pin in pins)


def _value(choice: Choice, key: str) -> Value:
    return value_of(choice.layout, choice.schedule, key)


def _distance(value: object, pinned: object) -> tuple[float, str]:
    """Return a sort key: the distance of a legal value from the pinned one, then the value as text."""
    if isinstance(value, int) and isinstance(pinned, int):
        return abs(value - pinned), f"{value:09d}"
    if isinstance(value, Layout) and isinstance(pinned, Layout):
        axes = ("tp", "pp", "dp", "sp", "ep", "fold_size", "cp", "vpp")
        return sum(abs(getattr(value, axis) - getattr(pinned, axis)) for axis in axes), str(value)
    return 0.0, str(value)
