"""Re-evaluates an earlier plan under new facts, so that a search can start from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwright.cost_models.question import CostModel
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.pins import Pin
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.steps_ahead import steps_ahead_patterns
from meshwright.planner.plan.verify import verify
from meshwright.planner.search.recost import re_evaluate, violations_under


def start_from(plan: Plan, facts: Facts, model: CostModel, pins: Sequence[Pin]) -> Plan | str:
    """Return the plan costed under these facts, or a sentence naming the first rule or pin that it violates."""
    violation = next(_start_violations(plan, facts, pins), None)
    if violation is None:
        re_evaluated = re_evaluate(plan, facts, model).model_copy(update={"pins": tuple(map(str, pins))})
        violation = next(iter(verify(re_evaluated)), None)
        if violation is None:
            return re_evaluated
    return violation


def _start_violations(plan: Plan, facts: Facts, pins: Sequence[Pin]) -> Iterator[str]:
    if plan.graph != facts.graph:
        yield f"it is a plan for {plan.facts.algorithm}, and its stages differ from those of {facts.algorithm}."
        return
    yield from violations_under(plan, facts)
    if plan.ahead not in steps_ahead_patterns(facts.graph, facts.staleness):
        yield f"its stages work further ahead than a staleness of {facts.staleness} allows."
    for pin in pins:
        if not pin.allows(plan.choice(pin.stage, pin.key)):
            yield f"{pin.quoted} is not kept."
