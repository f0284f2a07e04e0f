"""A configuration as a job and as a plan with its cost, and what better plans would gain.

A pin that no legal choice keeps is told and left out; a number of rows or slots is first read as the next smaller one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from meshwright.cost_models.question import CostModel
from meshwright.planner.compile import best_plan, compile_plan
from meshwright.planner.export.trainer import OtherTrainer
from meshwright.planner.export.within import within
from meshwright.planner.imports.said import Configured, Said
from meshwright.planner.imports.slot_bounds import slot_bounds
from meshwright.planner.plan.calls import Remodel
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
"""Below so many rows of a micro-batch every number is tried until one is legal."""


@dataclass(frozen=True, kw_only=True)
class Reader:
    """How the configurations of a trainer are read."""

    trainer: OtherTrainer
    read: Callable[..., Configured]


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A configuration as a plan, and what would be faster.

    `plan` is the configuration as it is, by our costs; None where it does not fit. `within` is the best plan that the
    trainer can say, `best` the fastest of all that were found, within a gap of the best there is; None where there is
    none, and `is_unfinished` says that a search ended by its limit before it found or excluded one. `notes` say
    what could not be read, `named` are keys that may change a step and have no word here, and `unread` keys that a plan
    does not depend on.
    """

    plan: Plan | None
    within: Plan | None
    best: Plan | None
    deciding: tuple[Said, ...]
    notes: tuple[str, ...]
    unread: tuple[str, ...] = ()
    named: Mapping[str, str] = field(default_factory=dict)
    is_unfinished: bool = False


def imported(
    reader: Reader,
    configured: Configured,
    facts: Facts,
    remodel: Remodel,
    *,
    limits: Limits | None = None,
    search_seconds: float | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Imported:
    """The configuration costed as it is, and what is best within the trainer and without, each searched for under the
    limits and for so many seconds at most."""
    model, asked = remodel(facts), partial(_beginning, limits or Limits(), search_seconds)
    tell = progress or _silent
    pins, notes = _legal(facts, configured)
    bounds, bound_notes = slot_bounds(facts, model, configured.words)
    pins, notes = (*pins, *bounds), [*notes, *bound_notes]
    tell("costing the configuration", 0, 1)
    plan = _as_configured(facts, model, pins, configured, asked())
    if plan is None:
        notes.append(_why_not(facts, model, pins, asked()))
    found = within(
        reader.trainer,
        facts,
        model,
        limits=asked(),
        progress=lambda done, total: tell(f"searching what {reader.trainer.name} can say", done, total),
    )
    tell("searching all plans", 0, 1)
    free = best_plan(facts, model, limits=asked())
    sayable = _fastest(found.plan if found else None, plan)
    return Imported(
        plan=plan,
        within=sayable,
        best=_fastest(free if isinstance(free, Plan) else None, sayable),
        is_unfinished=free == "out_of_limit",
        deciding=tuple(one for one in configured.said if one.what.partition(".")[0] not in DEFAULT_SETTINGS),
        notes=(*configured.notes, *notes),
        unread=configured.unread,
        named=configured.named,
    )


def _fastest(*plans: Plan | None) -> Plan | None:
    """The plan with the shortest step; None where there is none."""
    return min((one for one in plans if one), key=lambda one: one.period_seconds, default=None)


def _beginning(limits: Limits, seconds: float | None) -> Limits:
    """Gives the limits of a search that begins now and takes so many seconds."""
    if seconds is None:
        return limits
    return replace(limits, max_deterministic_time=seconds, deadline=time.monotonic() + seconds)


def _as_configured(
    facts: Facts, model: CostModel, pins: tuple[Pin, ...], configured: Configured, limits: Limits
) -> Plan | None:
    ahead = pattern_ahead(facts.graph, configured.steps_ahead)
    found = best_plan(facts, model, pins=pins, ahead=(ahead,), limits=limits)
    return found if isinstance(found, Plan) else None


def _why_not(facts: Facts, model: CostModel, pins: tuple[Pin, ...], limits: Limits) -> str:
    """What binds where nothing of the configuration fits."""
    answer = compile_plan(facts, model, pins=tuple(map(str, pins)), limits=limits)
    reasons = " ".join(limit.sentence for limit in answer.limits) if isinstance(answer, NoPlan) else ""
    if isinstance(answer, NoPlan) and answer.status == "out_of_limit":
        return f"it is not known what a step of the configuration takes: {reasons}"
    return f"the cost model predicts out of memory for the configuration as it is: {reasons}"


def _legal(facts: Facts, configured: Configured) -> tuple[tuple[Pin, ...], list[str]]:
    """The pins that legal choices keep together, and what was said otherwise."""
    kept: list[Pin] = []
    notes: list[str] = []
    for one in configured.said:
        stage = one.what.partition(".")[0]
        if stage not in facts.graph.by_name or one.what == _SLOTS:
            continue
        mine = [pin for pin in kept if pin.stage == stage]
        found, problem = _first_legal(facts, mine, _of_layout(one, mine, configured))
        if found:
            kept.append(found)
        if problem:
            notes.append(f"{', '.join(one.keys)}: {problem}")
    plain = [parse_pin(f"{GENERATE}.{key}", facts.graph) for key in ("batches_in_flight=1", "overcommit=0")]
    whole = [
        parse_pin(f"{name}.chunk_tokens=0", facts.graph)
        for name, stage in facts.graph.by_name.items()
        if not (stage.generates or stage.trains)
    ]
    return (*kept, *plain, *whole), notes


def _of_layout(one: Said, kept: list[Pin], configured: Configured) -> Said:
    """A budget of tokens for the layout that a stage is read with: it is each rank's, and a sequence is cut over fewer
    of them than the configuration says where the layout is read so."""
    stage, _, key = one.what.partition(".")
    layouts = [pin.value for pin in kept if isinstance(pin.value, Layout)]
    if key != "micro_batch_tokens" or not layouts:
        return one
    told = Layout.parse(str(configured.words[f"{stage}.layout"]))
    return replace(one, value=int(one.value) * layouts[0].cp // told.cp)


def _first_legal(facts: Facts, kept: list[Pin], one: Said) -> tuple[Pin | None, str]:
    """The pin of what is said, or of the nearest that is legal; and what is wrong with the first."""
    problem = ""
    for pinned in _read_as(one, facts.workload):
        try:
            pin = parse_pin(pinned, facts.graph)
            check_pins(facts, (*kept, pin))
        except BadInput as error:
            problem = problem or str(error)
            continue
        return pin, _told(one, pin, facts.workload) if problem else ""
    return None, f"{problem} It is left free."


def _told(one: Said, pin: Pin, workload: Workload) -> str:
    """A sentence on a value that is read as another."""
    if one.what.endswith(".micro_batch_tokens") and pin.key == "micro_batch_size":
        return (
            f"{one.what}={one.value} is read as {pin.key}={pin.value}: with this layout rows alone decide, and no more "
            f"sequences of {workload.mean_tokens:,.0f} tokens, their mean, fit into the budget and divide a replica's."
        )
    if one.what.endswith(".layout"):
        return (
            f"{one.what}={one.value} is read as {pin.value}, the nearest layout that is costed: interleaved pipelines "
            "have as many layers in each part, and context parallelism leaves a rank 2,048 tokens or more of the "
            "longest sequence, of a model without experts."
        )
    return f"{one.what}={one.value} is read as {str(pin).removeprefix(f'{one.what}=')}"


def _read_as(one: Said, workload: Workload) -> Iterator[str]:
    """The pin of what is said, and for a count those of the numbers below it, the largest first.

    A layout is next read without interleaving, and then with fewer ranks for a sequence and more replicas. For a cap of
    tokens the pins are those of caps for so many of the longest sequences, and where tokens may not decide of as many
    rows as it holds on average.
    """
    longest = workload.max_tokens
    stage, _, key = one.what.partition(".")
    if key == "layout":
        yield from (f"{one.what}={layout}" for layout in _plainer(Layout.parse(str(one.value))))
    elif key == "micro_batch_size":
        yield f"{one.what}={one.value}"
        yield from (f"{one.what}={number}" for number in _below(int(one.value)))
    elif key == "micro_batch_tokens":
        cap = int(one.value)
        rows = max(1, int(cap / workload.mean_tokens))
        yield f"{one.what}={cap}"
        yield from (f"{one.what}={number * longest}" for number in _halved(max(1, cap // longest)))
        yield from (f"{stage}.micro_batch_size={number}" for number in (rows, *_below(rows)))
    else:
        yield f"{one.what}={one.value}"


def _plainer(layout: Layout) -> Iterator[Layout]:
    """A layout, those in which its pipeline is interleaved less, and those in which fewer ranks share a sequence and
    there are more replicas of them."""
    for cp in reversed(divisors(layout.cp)):
        for vpp in reversed(divisors(layout.vpp)):
            yield replace(layout, vpp=vpp, cp=cp, dp=layout.dp * layout.cp // cp)


def _below(number: int) -> Iterator[int]:
    """Numbers of rows below a number, the largest first: of many rows the powers of two, of few every one."""
    yield from (power for power in _halved(max(1, number - 1)) if power > _FEW_ROWS)
    yield from range(min(number - 1, _FEW_ROWS), 0, -1)


def _halved(number: int) -> Iterator[int]:
    """The powers of two up to a number, the largest first."""
    power = 1 << (number.bit_length() - 1)
    while power:
        yield power
        power //= 2


def _silent(_what: str, _done: int, _total: int) -> None: ...
