"""The best plans that differ in structure: in the layout, and so in the number of ranks, of some stage.

The search is asked again without the structures that are known (Lawler, Management Science 18, 1972): what is left
after a plan is cut into one part per stage, in which the stages before have that plan's layouts and the stage itself
has another. The parts overlap nowhere and leave nothing out.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from meshwright.cost_models.question import CostModel
from meshwright.planner.compile import Missing, best_plan
from meshwright.planner.plan.calls import Remodel
from meshwright.planner.plan.pins import Pin
from meshwright.planner.plan.plan import Plan
from meshwright.planner.simulation.sampled import Sampled
from meshwright.planner.simulation.simulate import simulate
from meshwright.planner.solver.result import Limits

Search: TypeAlias = Callable[[tuple[Pin, ...]], Plan | Missing | None]
"""The best plan under some pins, where there is one."""

_STEPS = 20
"""Simulated for each plan, so that drawn lengths hardly decide which is first."""


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A plan and the mean of its simulated steps with drawn lengths, in seconds."""

    plan: Plan
    simulated_seconds: float


def best_structures(
    best: Plan,
    asked: Sequence[Pin],
    search: Search,
    *,
    count: int,
    progress: Callable[[], None] | None = None,
) -> tuple[Plan, ...]:
    """The `count` best plans of different structure under the pins that were asked for; `best` is the first of them.

    Each is the best of all structures that are left, as far as `search` finds it; its bound and gap are those of the
    whole space. Fewer when there are no more. `progress` is called after each new search.
    """
    found, left = [best], []
    parts = _parts(best, tuple(asked))
    while len(found) < count:
        for part in parts:
            plan = search(part)
            if isinstance(plan, Plan):
                left.append((part, plan))
            if progress:
                progress()
        if not left:
            break
        pins, following = min(left, key=lambda one: one[1].period_seconds)
        left = [one for one in left if one[1] is not following]
        found.append(_of_the_whole_space(following, best, {*map(str, pins)} - {*map(str, asked)}))
        parts = _parts(following, pins)
    return tuple(found)


def every_plan(best: Plan, model: CostModel, limits: Limits) -> Search:
    """A search of all plans of the facts of `best`, each with the same origins."""
    return lambda part: best_plan(best.facts, model, pins=part, digests=best.origins, limits=limits)


def ranked(plans: Sequence[Plan], model_of: Remodel, *, seed: int = 0) -> tuple[Ranked, ...]:
    """The plans by their mean step under the simulator, which draws the same lengths for each."""
    means = [simulate(plan, Sampled(plan, model_of, seed=seed), steps=_STEPS).steps.mean for plan in plans]
    rows = [Ranked(plan=plan, simulated_seconds=mean) for plan, mean in zip(plans, means, strict=True)]
    return tuple(sorted(rows, key=lambda row: row.simulated_seconds))


def _parts(plan: Plan, pins: tuple[Pin, ...]) -> list[tuple[Pin, ...]]:
    """The pins of every part of what is left of the space under `pins` without the structure of a plan."""
    layouts = {name: plan.placement(name).layout for name in plan.graph.names}
    fixed = {pin.stage for pin in pins if pin.key == "layout" and not pin.forbids}
    free = [name for name in layouts if name not in fixed]
    return [
        (
            *pins,
            *(Pin(before, "layout", layouts[before]) for before in free[:index]),
            Pin(name, "layout", layouts[name], forbids=True),
        )
        for index, name in enumerate(free)
    ]


def _of_the_whole_space(plan: Plan, best: Plan, of_its_part: Container[str]) -> Plan:
    """The plan of a part as one of the space that `best` is of: with that bound, no proof of its own, and without the
    pins of its part."""
    period, bound = plan.period_seconds, min(best.solver.bound_seconds, plan.period_seconds)
    update = {"status": "feasible", "bound_seconds": bound, "gap": (period - bound) / period}
    pins = tuple(pin for pin in plan.pins if pin not in of_its_part)
    return plan.model_copy(update={"pins": pins, "solver": plan.solver.model_copy(update=update)})
