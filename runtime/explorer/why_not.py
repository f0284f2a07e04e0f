"""Why not: what a pinned choice costs, or the rule or the limit that forbids it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwright.planner.analysis.plan_summary import most_grown
from meshwright.planner.plan.evaluate import free_bytes
from meshwright.planner.plan.plan import Plan
from meshwright.planner.report.formatting import size
from meshwright.planner.search.no_plan import NoPlan
from meshwright.runtime.explorer.searches import Answer, Refusal


def why_not(pins: Sequence[str], pinned: Answer, free: Answer | None) -> tuple[str, ...]:
    """The sentences that say what the pins cost against the plan without them; `free` is the answer without them."""
    return tuple(_sentences(pins, pinned, free.outcome if free else None))


def _sentences(pins: Sequence[str], pinned: Answer, free: object) -> Iterator[str]:
    outcome = pinned.outcome
    if isinstance(outcome, Refusal):
        yield outcome.sentence
    elif isinstance(outcome, NoPlan):
        yield f"No plan has {' and '.join(pins)}."
        yield from (limit.sentence for limit in outcome.limits)
    elif isinstance(free, Plan):
        yield from _differences(pins, outcome, free)
    else:
        yield f"The plan has {' and '.join(pins)}; without it there is none to compare with."


def _differences(pins: Sequence[str], pinned: Plan, free: Plan) -> Iterator[str]:
    longer = pinned.period_seconds - free.period_seconds
    share = longer / free.period_seconds
    yield (
        f"With {' and '.join(pins)} a step takes {pinned.period_seconds:.3f} s instead of {free.period_seconds:.3f} s "
        f"({longer:+.3f} s, {share:+.1%})."
    )
    for placement in pinned.placements:
        before = free.placement(placement.stage)
        if (before.layout, before.schedule) == (placement.layout, placement.schedule):
            continue
        change = placement.cost.total - before.cost.total
        grown = most_grown(before, placement)
        mostly = f", mostly {grown.name} {grown.amount:+.3f} s" if grown else ""
        layouts = (
            f"{placement.layout} instead of {before.layout}"
            if placement.layout != before.layout
            else f"{placement.layout} with another schedule"
        )
        yield f"{placement.stage}: {layouts}, {change:+.3f} s{mostly}."
    freed = free_bytes(pinned) - free_bytes(free)
    if freed:
        yield f"The fullest rank has {size(abs(freed))} {'more' if freed > 0 else 'less'} free."
