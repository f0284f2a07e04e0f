"""A plan that was made before, as what a search of other facts starts from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwright.cost_models.question import CostModel
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.pins import Pin
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.steps_ahead import patterns
from meshwright.planner.plan.verify import verify
from meshwright.planner.search.recost import illegal_under, recost


def start_from(plan: Plan, facts: Facts, model: CostModel, pins: Sequence[Pin]) -> Plan | str:
    """The plan's placements under these facts, costed by their model, or the first thing that they break there."""
    broken = next(_broken(plan, facts, pins), None)
    if broken is None:
        again = recost(plan, facts, model).model_copy(update={"pins": tuple(map(str, pins))})
        broken = next(iter(verify(again)), None)
        if broken is None:
            return again
    return broken


def _broken(plan: Plan, facts: Facts, pins: Sequence[Pin]) -> Iterator[str]:
    if plan.graph != facts.graph:
        yield f"it is of {plan.facts.algorithm}, and its stages are others than those of {facts.algorithm} here."
        return
    yield from illegal_under(plan, facts)
    if plan.ahead not in patterns(facts.graph, facts.staleness):
        yield f"its stages work further ahead than a staleness of {facts.staleness} allows."
    for pin in pins:
        if not pin.allows(plan.choice(pin.stage, pin.key)):
            yield f"{pin.told} is not kept."
