"""What a plan states of its costs beside what they are: everything asked again of the model that it was made with."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.cost_models.cost import Cost
from meshwright.cost_models.question import CostModel
from meshwright.planner.analysis.replan import as_paced
from meshwright.planner.plan.evaluate import name_of
from meshwright.planner.plan.plan import Edge, Placement, Plan, Refit
from meshwright.planner.search.recost import recost

_TOLERANCE = 1e-9
"""Relative: what adding the same numbers in another order may change."""

_WAY_OUT = "plan the job again"


def misstated(plan: Plan, model: CostModel) -> tuple[str, ...]:
    """One sentence for each cost that the plan states otherwise than the model has it of the plan's facts and choices,
    at the paces that it names.

    The plan breaks none of the laws of `planner.plan.verify`.
    """
    again = recost(plan, plan.facts, as_paced(plan, model))
    return tuple(_differences(plan, again))


def _differences(plan: Plan, again: Plan) -> Iterator[str]:
    for stated in plan.placements:
        yield from _of_placement(stated, again.placement(stated.stage))
    edges = {(edge.producer, edge.consumer): edge for edge in again.edges}
    for edge in plan.edges:
        yield from _of_message(
            f"the edge {edge.producer} -> {edge.consumer}", edge, edges[edge.producer, edge.consumer]
        )
    refits = {name_of(refit): refit for refit in again.refits}
    for refit in plan.refits:
        yield from _of_message(f"the refit of {refit.target}", refit, refits[name_of(refit)])


def _of_placement(stated: Placement, found: Placement) -> Iterator[str]:
    yield from _of_cost(f"{stated.stage}: its cost", "s", stated.cost, found.cost)
    for what in ("resident", "transient", "host"):
        yield from _of_cost(f"{stated.stage}: what is {what}", "bytes", getattr(stated, what), getattr(found, what))
    if not _equal(stated.tail_seconds, found.tail_seconds):
        yield f"{stated.stage}: {_is('its tail', stated.tail_seconds, found.tail_seconds, 's')}"


def _of_message(name: str, stated: Edge | Refit, found: Edge | Refit) -> Iterator[str]:
    yield from _of_cost(f"{name}: its cost", "s", stated.cost, found.cost)
    if not _equal(stated.bytes, found.bytes):
        yield f"{name}: {_is('what it moves', stated.bytes, found.bytes, 'bytes')}"


def _of_cost(what: str, unit: str, stated: Cost, found: Cost) -> Iterator[str]:
    """Term by term: names and sources are stated too."""
    names, expected = ([term.name for term in cost.terms] for cost in (stated, found))
    if names != expected:
        told, listed = (", ".join(some) or "nothing" for some in (names, expected))
        yield f"{what} is stated as {told} and the cost model makes it {listed}; {_WAY_OUT}."
        return
    for one, other in zip(stated.terms, found.terms, strict=True):
        if not _equal(one.amount, other.amount):
            yield f"{what}: {_is(f'the term {one.name!r}', one.amount, other.amount, unit)}"
        elif one.source is not other.source:
            told = f"stated as {one.source} and the cost model has it as {other.source}"
            yield f"{what}: the term {one.name!r} is {told}; {_WAY_OUT}."


def _is(what: str, stated: float, found: float, unit: str) -> str:
    return f"{what} is stated as {stated:.12g} {unit} and the cost model makes it {found:.12g} {unit}; {_WAY_OUT}."


def _equal(one: float, other: float) -> bool:
    return abs(one - other) <= _TOLERANCE * max(abs(one), abs(other))
