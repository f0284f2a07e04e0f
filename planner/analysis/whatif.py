"""What would change if: the plan under other facts, as differences against the plan as it is.

Baseline and answers are costed by one and the same model. Without a new search the placements stay what they are; with
one, each answer is the best plan for its facts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright.cost_models.cost import Source
from meshwright.planner.compile import compile_plan
from meshwright.planner.plan.calls import Remodel
from meshwright.planner.plan.evaluate import free_bytes, host_bytes, items, name_of, ranks_of
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.job_limits import position_violations
from meshwright.planner.plan.pins import parse_pins
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.settings import Setting, with_setting
from meshwright.planner.plan.verify import verify
from meshwright.planner.search.recost import illegal_under, recost
from meshwright.planner.search.refusal import NoPlan
from meshwright.planner.search.start import start_from
from meshwright.planner.solver.result import Limits

_STEPS = 1000
"""Steps whose GPU-hours and price are told."""

_HOUR = 3600.0
_TOLERANCE = 1e-6
"""Relative: a baseline that differs more from the plan is told."""


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """One plan in seven numbers, or the differences between two."""

    step_seconds: float
    tokens_per_second: float  # response tokens
    idle_share: float  # of all ranks, 0 to 1
    headroom_bytes: float  # on the fullest rank; negative when it does not fit
    host_bytes: float  # in host memory, of the fullest node
    gpu_hours: float  # per 1000 steps
    money: float | None  # per 1000 steps, in the unit of the price

    def minus(self, other: Outlook) -> Outlook:
        return Outlook(
            step_seconds=self.step_seconds - other.step_seconds,
            tokens_per_second=self.tokens_per_second - other.tokens_per_second,
            idle_share=self.idle_share - other.idle_share,
            headroom_bytes=self.headroom_bytes - other.headroom_bytes,
            host_bytes=self.host_bytes - other.host_bytes,
            gpu_hours=self.gpu_hours - other.gpu_hours,
            money=None if self.money is None or other.money is None else self.money - other.money,
        )


@dataclass(frozen=True, kw_only=True)
class Consequence:
    """What one setting does. Without an `outlook` the placements are illegal, or no plan was found: see `broken`.

    `extrapolated` names the tasks whose cost is a guess beyond what was measured.
    """

    setting: Setting
    fits: bool
    broken: tuple[str, ...]
    outlook: Outlook | None
    difference: Outlook | None
    extrapolated: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """`notes` say what to know before the baseline is believed."""

    baseline: Outlook
    replanned: bool
    answers: tuple[Consequence, ...]
    notes: tuple[str, ...]


def whatif(
    plan: Plan,
    settings: Sequence[Setting],
    remodel: Remodel,
    *,
    replan: bool = False,
    price: float | None = None,
    limits: Limits | None = None,
) -> WhatIf:
    """One answer for each setting. `price` is per GPU-hour; `limits` bound each new search.

    Raises BadInput for an unknown field or a value that breaks a rule.
    """
    before = recost(plan, plan.facts, remodel(plan.facts))
    baseline = outlook(before, price)
    answers, most_ranks = [], 0
    for setting in settings:
        facts = with_setting(plan.facts, setting)
        most_ranks = max(most_ranks, facts.cluster.num_ranks)
        found = _replanned(plan, facts, remodel, limits) if replan else _recosted(plan, facts, remodel)
        broken, after = found
        seen = outlook(after, price) if after else None
        answers.append(
            Consequence(
                setting=setting,
                fits=not broken,
                broken=broken,
                outlook=seen,
                difference=seen.minus(baseline) if seen else None,
                extrapolated=_extrapolated(after) if after else (),
                notes=tuple(_cut_lengths(facts)),
            )
        )
    return WhatIf(
        baseline=baseline,
        replanned=replan,
        answers=tuple(answers),
        notes=(*_doubts(plan, before), *_stops(replan, (limits or Limits()).on(most_ranks))),
    )


def outlook(plan: Plan, price: float | None = None) -> Outlook:
    """The numbers of a plan, by its own costs."""
    cluster, workload, period = plan.facts.cluster, plan.facts.workload, plan.period_seconds
    busy = sum(item.cost.total * len(ranks_of(plan, item)) for item in items(plan))
    hours = period * cluster.num_ranks * _STEPS / _HOUR
    return Outlook(
        step_seconds=period,
        tokens_per_second=workload.batch_size * workload.drawn_lengths.mean / period,
        idle_share=1 - busy / (period * cluster.num_ranks),
        headroom_bytes=free_bytes(plan),
        host_bytes=host_bytes(plan),
        gpu_hours=hours,
        money=None if price is None else hours * price,
    )


def _recosted(plan: Plan, facts: Facts, remodel: Remodel) -> tuple[tuple[str, ...], Plan | None]:
    """What is broken, and the same placements costed again unless a rule forbids them."""
    illegal = illegal_under(plan, facts)
    if illegal:
        return illegal, None
    after = recost(plan, facts, remodel(facts))
    return verify(after), after


def _replanned(
    plan: Plan, facts: Facts, remodel: Remodel, limits: Limits | None
) -> tuple[tuple[str, ...], Plan | None]:
    if too_long := position_violations(facts.models.by_name, facts.workload):
        return too_long, None
    model = remodel(facts)
    kept = start_from(plan, facts, model, parse_pins(plan.pins, plan.graph))
    start = kept if isinstance(kept, Plan) else None
    found = compile_plan(facts, model, pins=plan.pins, limits=limits, start=start)
    if isinstance(found, NoPlan):
        return tuple(limit.sentence for limit in found.limits) or ("no plan was found in time.",), None
    return (), found


def _extrapolated(plan: Plan) -> tuple[str, ...]:
    return tuple(name_of(item) for item in items(plan) if item.cost.source is Source.EXTRAPOLATED)


def _cut_lengths(facts: Facts) -> Iterator[str]:
    """A quantile beyond the longest length changes nothing more."""
    for what, lengths in (("prompt", facts.workload.prompt), ("response", facts.workload.response)):
        if lengths.p99 is not None and lengths.p99 > lengths.max:
            yield f"workload.{what}.p99={lengths.p99:g} is cut at workload.{what}.max={lengths.max}; set both."


def _stops(replan: bool, limits: Limits) -> Iterator[str]:
    if replan and limits.tolerance:
        yield f"every new search stopped when it was proven to be within {limits.tolerance:.2g} of the best."


def _doubts(plan: Plan, before: Plan) -> Iterator[str]:
    if abs(before.period_seconds - plan.period_seconds) > _TOLERANCE * plan.period_seconds:
        why = "give the table it was made with as --profile" if "profile" in plan.digests else "the cost model changed"
        here = f"{before.period_seconds:.6g} s here"
        yield f"the plan says {plan.period_seconds:.6g} s a step and is costed at {here}; {why}."
