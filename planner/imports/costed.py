"""The cost of a trainer's configuration as it is, and of the best plans within the trainer and without.

A value that is not legal here is read as the nearest legal one, or left free where there is none; a note says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from meshwright.cost_models.question import CostModel
from meshwright.planner.compile import best_plan, compile_plan
from meshwright.planner.export.trainer import OtherTrainer
from meshwright.planner.export.within import best_expressible_plan
from meshwright.planner.imports.said import ParsedConfig, ParsedField
from meshwright.planner.imports.slot_bounds import slot_bounds
from meshwright.planner.plan.calls import CostModelBuilder
from meshwright.planner.plan.job import DEFAULT_SETTINGS, Facts
from meshwright.planner.plan.pins import Pin, parse_pin
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.steps_ahead import pattern_ahead
from meshwright.planner.search.refusal import NoPlan
from meshwright.planner.search.space import check_pins
from meshwright.planner.solver.result import Limits
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout, divisors
from meshwright.profiles.stages import GENERATE
from meshwright.profiles.workload import Workload

_SLOTS = f"{GENERATE}.generation_slots"

_FEW_ROWS = 64
"""Micro-batch rows up to which every smaller number is tried; above it, powers of two only."""


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A trainer and the function that reads its configurations."""

    trainer: OtherTrainer
    read: Callable[..., ParsedConfig]


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A configuration as a plan, and faster plans.

    `plan` is the configuration as it is, by our costs; None where it does not fit. `within` is the best plan that the
    trainer can express, `best` the fastest plan that was found, within the gap of the optimum; None where there is
    none. `is_unfinished` is true if a search reached its limit before it found a plan or excluded one. `deciding` are
    the fields that the plan depends on, `notes` sentences on what was read differently, `named` keys that may change a
    step and are not read, with the reason, and `unread` keys that a plan does not depend on.
    """

    plan: Plan | None
    best_in_trainer: Plan | None
    best: Plan | None
    deciding: tuple[ParsedField, ...]
    notes: tuple[str, ...]
    unread: tuple[str, ...] = ()
    named: Mapping[str, str] = field(default_factory=dict)
    timed_out: bool = False


def evaluate_config(
    reader: Reader,
    configured: ParsedConfig,
    facts: Facts,
    rebuild_cost_model: CostModelBuilder,
    *,
    limits: Limits | None = None,
    search_seconds: float | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Imported:
    """Cost the configuration as it is, and search for the best plan that the trainer can express and the best of all.

    Each search keeps `limits` and takes `search_seconds` at most. `progress` is called with the name of the current
    search, how many of its parts are done, and of how many.
    """
    model, new_limits = rebuild_cost_model(facts), partial(_limits_from_now, limits or Limits(), search_seconds)
    report = progress or _no_progress
    pins, notes = _legal_pins(facts, configured)
    bounds, bound_notes = slot_bounds(facts, model, configured.by_name)
    pins, notes = (*pins, *bounds), [*notes, *bound_notes]
    report("costing the configuration", 0, 1)
    plan = _as_configured(facts, model, pins, configured, new_limits())
    if plan is None:
        notes.append(_why_not(facts, model, pins, new_limits()))
    expressible = best_expressible_plan(
        reader.trainer,
        facts,
        model,
        limits=new_limits(),
        progress=lambda done, total: report(f"searching what {reader.trainer.name} can say", done, total),
    )
    report("searching all plans", 0, 1)
    best = best_plan(facts, model, limits=new_limits())
    within_trainer = _fastest(expressible.plan if expressible else None, plan)
    return Imported(
        plan=plan,
        best_in_trainer=within_trainer,
        best=_fastest(best if isinstance(best, Plan) else None, within_trainer),
        timed_out=best == "out_of_limit",
        deciding=tuple(parsed for parsed in configured.fields if parsed.what.partition(".")[0] not in DEFAULT_SETTINGS),
        notes=(*configured.notes, *notes),
        unread=configured.ignored,
        named=configured.unmodelled,
    )


def _fastest(*plans: Plan | None) -> Plan | None:
    """The plan with the shortest step; None where there is none."""
    return min((plan for plan in plans if plan), key=lambda plan: plan.period_seconds, default=None)


def _limits_from_now(limits: Limits, seconds: float | None) -> Limits:
    """The limits of a search that starts now and takes at most this many seconds."""
    if seconds is None:
        return limits
    return replace(limits, max_deterministic_time=seconds, deadline=time.monotonic() + seconds)


def _as_configured(
    facts: Facts, model: CostModel, pins: tuple[Pin, ...], configured: ParsedConfig, limits: Limits
) -> Plan | None:
    ahead = pattern_ahead(facts.graph, configured.steps_ahead)
    plan = best_plan(facts, model, pins=pins, ahead=(ahead,), limits=limits)
    return plan if isinstance(plan, Plan) else None


def _why_not(facts: Facts, model: CostModel, pins: tuple[Pin, ...], limits: Limits) -> str:
    """A sentence on why the configuration has no plan."""
    answer = compile_plan(facts, model, pins=tuple(map(str, pins)), limits=limits)
    reasons = " ".join(limit.sentence for limit in answer.limits) if isinstance(answer, NoPlan) else ""
    if isinstance(answer, NoPlan) and answer.status == "out_of_limit":
        return f"it is not known how long a step of the configuration takes: {reasons}"
    return f"the cost model predicts out of memory for the configuration as it is: {reasons}"


def _legal_pins(facts: Facts, configured: ParsedConfig) -> tuple[tuple[Pin, ...], list[str]]:
    """The configuration as pins that are legal together, and notes on the values that are read as others."""
    pins: list[Pin] = []
    notes: list[str] = []
    for parsed in configured.fields:
        stage = parsed.what.partition(".")[0]
        if stage not in facts.graph.by_name or parsed.what == _SLOTS:
            continue
        stage_pins = [pin for pin in pins if pin.stage == stage]
        pin, problem = _first_legal(facts, stage_pins, _with_layout_budget(parsed, stage_pins, configured))
        if pin:
            pins.append(pin)
        if problem:
            notes.append(f"{', '.join(parsed.keys)}: {problem}")
    no_overlap = [parse_pin(f"{GENERATE}.{key}", facts.graph) for key in ("batches_in_flight=1", "overcommit=0")]
    unstreamed = [
        parse_pin(f"{name}.chunk_tokens=0", facts.graph)
        for name, stage in facts.graph.by_name.items()
        if not (stage.generates or stage.trains)
    ]
    return (*pins, *no_overlap, *unstreamed), notes


def _with_layout_budget(parsed: ParsedField, stage_pins: list[Pin], configured: ParsedConfig) -> ParsedField:
    """Adjust a stage's token budget to the layout that it is read with: the budget is per rank, and a smaller cp shards
    a sequence over fewer ranks."""
    stage, _, key = parsed.what.partition(".")
    layouts = [pin.value for pin in stage_pins if isinstance(pin.value, Layout)]
    if key != "micro_batch_tokens" or not layouts:
        return parsed
    configured_layout = Layout.parse(str(configured.by_name[f"{stage}.layout"]))
    return replace(parsed, value=int(parsed.value) * layouts[0].cp // configured_layout.cp)


def _first_legal(facts: Facts, stage_pins: list[Pin], parsed: ParsedField) -> tuple[Pin | None, str]:
    """The pin of a field, or of its nearest legal value, and a note where the value itself is not legal."""
    problem = ""
    for text in _pins_to_try(parsed, facts.workload):
        try:
            pin = parse_pin(text, facts.graph)
            check_pins(facts, (*stage_pins, pin))
        except BadInput as error:
            problem = problem or str(error)
            continue
        return pin, _read_as_note(parsed, pin, facts.workload) if problem else ""
    return None, f"{problem} It is left free."


def _read_as_note(parsed: ParsedField, pin: Pin, workload: Workload) -> str:
    """A sentence on a value that is read as another one."""
    if parsed.what.endswith(".micro_batch_tokens") and pin.key == "micro_batch_size":
        return (
            f"{parsed.what}={parsed.value} is read as {pin.key}={pin.value}: this layout is costed by rows, and no "
            f"more sequences of {workload.mean_tokens:,.0f} tokens, their mean, fit into the budget and divide a "
            "replica's."
        )
    if parsed.what.endswith(".layout"):
        return (
            f"{parsed.what}={parsed.value} is read as {pin.value}, the nearest layout that is costed: interleaved "
            "pipelines have as many layers in each part, and context parallelism leaves a rank 2,048 tokens or more of "
            "the longest sequence, of a model without experts."
        )
    return f"{parsed.what}={parsed.value} is read as {str(pin).removeprefix(f'{parsed.what}=')}"


def _pins_to_try(parsed: ParsedField, workload: Workload) -> Iterator[str]:
    """The pins to try for a field, its own value first.

    A count is followed by smaller numbers, the largest first; a layout by ones with less interleaving, then with less
    context parallelism and more replicas. A token budget is followed by budgets of whole longest sequences and then,
    for layouts without a token budget, by the rows that it holds on average.
    """
    longest = workload.max_tokens
    stage, _, key = parsed.what.partition(".")
    if key == "layout":
        yield from (f"{parsed.what}={layout}" for layout in _simpler_layouts(Layout.parse(str(parsed.value))))
    elif key == "micro_batch_size":
        yield f"{parsed.what}={parsed.value}"
        yield from (f"{parsed.what}={number}" for number in _numbers_below(int(parsed.value)))
    elif key == "micro_batch_tokens":
        cap = int(parsed.value)
        rows = max(1, int(cap / workload.mean_tokens))
        yield f"{parsed.what}={cap}"
        yield from (f"{parsed.what}={number * longest}" for number in _powers_of_two_up_to(max(1, cap // longest)))
        yield from (f"{stage}.micro_batch_size={number}" for number in (rows, *_numbers_below(rows)))
    else:
        yield f"{parsed.what}={parsed.value}"


def _simpler_layouts(layout: Layout) -> Iterator[Layout]:
    """A layout, then those with a smaller vpp, then those with a smaller cp and more replicas."""
    for cp in reversed(divisors(layout.cp)):
        for vpp in reversed(divisors(layout.vpp)):
            yield replace(layout, vpp=vpp, cp=cp, dp=layout.dp * layout.cp // cp)


def _numbers_below(number: int) -> Iterator[int]:
    """Numbers below a number of rows, the largest first: powers of two above `_FEW_ROWS`, then every number."""
    yield from (power for power in _powers_of_two_up_to(max(1, number - 1)) if power > _FEW_ROWS)
    yield from range(min(number - 1, _FEW_ROWS), 0, -1)


def _powers_of_two_up_to(number: int) -> Iterator[int]:
    """The powers of two up to a number, the largest first."""
    power = 1 << (number.bit_length() - 1)
    while power:
        yield power
        power //= 2


def _no_progress(_what: str, _done: int, _total: int) -> None: ...
