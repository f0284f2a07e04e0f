"""Check of the costs that a plan records against a new evaluation by the cost model that it was made with."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.cost_models.cost import Cost
from meshwright.cost_models.protocol import CostModel
from meshwright.planner.analysis.replan import paced_model
from meshwright.planner.plan.evaluate import task_name_of
from meshwright.planner.plan.plan import Edge, Placement, Plan, Refit
from meshwright.planner.search.re_evaluate import re_evaluate

_TOLERANCE = 1e-9
"""The relative error that summing the same numbers in another order may cause."""

_REMEDY = "plan the job again"


def mismatched_costs(plan: Plan, model: CostModel) -> tuple[str, ...]:
    """Return one sentence for each recorded cost that differs from the cost model's, scaled by the paces (measured over
    predicted seconds) that the plan records.

    The plan must be valid by `planner.plan.verify`.
    """
    evaluated = re_evaluate(plan, plan.facts, paced_model(plan, model))
    return tuple(_differences(plan, evaluated))


def _differences(plan: Plan, evaluated: Plan) -> Iterator[str]:
    for recorded in plan.placements:
        yield from _placement_differences(recorded, evaluated.placement(recorded.stage))
    edges = {(edge.producer, edge.consumer): edge for edge in evaluated.edges}
    for edge in plan.edges:
        yield from _transfer_differences(
            f"the edge {edge.producer} -> {edge.consumer}", edge, edges[edge.producer, edge.consumer]
        )
    refits = {task_name_of(refit): refit for refit in evaluated.refits}
    for refit in plan.refits:
        yield from _transfer_differences(f"the refit of {refit.target}", refit, refits[task_name_of(refit)])


def _placement_differences(recorded: Placement, evaluated: Placement) -> Iterator[str]:
    yield from _cost_differences(f"{recorded.stage}: its cost", "s", recorded.cost, evaluated.cost)
    for what in ("resident", "transient", "host"):
        yield from _cost_differences(
            f"{recorded.stage}: its {what} memory", "bytes", getattr(recorded, what), getattr(evaluated, what)
        )
    if not _equal(recorded.tail_seconds, evaluated.tail_seconds):
        yield f"{recorded.stage}: {_mismatch('its tail', recorded.tail_seconds, evaluated.tail_seconds, 's')}"


def _transfer_differences(name: str, recorded: Edge | Refit, evaluated: Edge | Refit) -> Iterator[str]:
    yield from _cost_differences(f"{name}: its cost", "s", recorded.cost, evaluated.cost)
    if not _equal(recorded.bytes, evaluated.bytes):
        yield f"{name}: {_mismatch('what it moves', recorded.bytes, evaluated.bytes, 'bytes')}"


def _cost_differences(what: str, unit: str, recorded: Cost, evaluated: Cost) -> Iterator[str]:
    """Compare two costs term by term: names, amounts and sources."""
    names, expected = ([term.name for term in cost.terms] for cost in (recorded, evaluated))
    if names != expected:
        recorded_terms, expected_terms = (", ".join(some) or "nothing" for some in (names, expected))
        yield f"{what} is recorded as {recorded_terms}, and the cost model computes {expected_terms}; {_REMEDY}."
        return
    for one, other in zip(recorded.terms, evaluated.terms, strict=True):
        if not _equal(one.amount, other.amount):
            yield f"{what}: {_mismatch(f'the term {one.name!r}', one.amount, other.amount, unit)}"
        elif one.source is not other.source:
            mismatch = f"recorded as {one.source}, and is {other.source} in the cost model"
            yield f"{what}: the term {one.name!r} is {mismatch}; {_REMEDY}."


def _mismatch(what: str, recorded: float, evaluated: float, unit: str) -> str:
    return (
        f"{what} is recorded as {recorded:.12g} {unit}, and the cost model computes {evaluated:.12g} {unit}; {_REMEDY}."
    )


def _equal(one: float, other: float) -> bool:
    return abs(one - other) <= _TOLERANCE * max(abs(one), abs(other))
