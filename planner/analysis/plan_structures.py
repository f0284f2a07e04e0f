"""The best plans of different structure: some stage has another layout, and so perhaps another number of ranks.

The search is repeated without the known structures (Lawler, Management Science 18, 1972). When a plan is found, the
plans of other structure are split into one subspace for each stage: the stages before it have the layouts of the plan
found, and the stage itself has another layout. The subspaces are disjoint and cover all plans of other structure.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from meshwright.cost_models.protocol import CostModel
from meshwright.planner.compile import Missing, best_plan
from meshwright.planner.plan.cost_queries import CostModelBuilder
from meshwright.planner.plan.pins import Pin
from meshwright.planner.plan.plan import Plan
from meshwright.planner.simulation.sampled_durations import Sampled
from meshwright.planner.simulation.simulate import simulate
from meshwright.planner.solver.result import Limits

SubspaceSearch: TypeAlias = Callable[[tuple[Pin, ...]], Plan | Missing | None]
"""A function that finds the best plan under some pins, if there is one."""

_SIMULATED_STEPS = 20
"""Simulated steps for each plan, enough that sampled lengths hardly change the ranking."""


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A plan and the mean seconds of its simulated steps with sampled lengths."""

    plan: Plan
    simulated_seconds: float


def best_structures(
    best: Plan,
    requested_pins: Sequence[Pin],
    search: SubspaceSearch,
    *,
    count: int,
    progress: Callable[[], None] | None = None,
) -> tuple[Plan, ...]:
    """Return the `count` best plans of different structure under `requested_pins`; `best` is the first of them.

    Each is the best plan that `search` finds among the remaining structures; its bound and gap are those of the whole
    space. There are fewer if no more exist. `progress` is called after each new search.
    """
    plans, candidates = [best], []
    subspaces = _subspaces(best, tuple(requested_pins))
    while len(plans) < count:
        for subspace in subspaces:
            plan = search(subspace)
            if isinstance(plan, Plan):
                candidates.append((subspace, plan))
            if progress:
                progress()
        if not candidates:
            break
        pins, next_best = min(candidates, key=lambda one: one[1].period_seconds)
        candidates = [one for one in candidates if one[1] is not next_best]
        plans.append(_with_bound_of(next_best, best, {*map(str, pins)} - {*map(str, requested_pins)}))
        subspaces = _subspaces(next_best, pins)
    return tuple(plans)


def whole_space_search(best: Plan, model: CostModel, limits: Limits) -> SubspaceSearch:
    """A search over all plans for the facts of `best`, with the same digests of inputs."""
    return lambda subspace: best_plan(best.facts, model, pins=subspace, digests=best.origins, limits=limits)


def ranked_by_simulation(plans: Sequence[Plan], model_of: CostModelBuilder, *, seed: int = 0) -> tuple[Ranked, ...]:
    """Return the plans sorted by their mean simulated step; the simulator samples the same lengths for each."""
    means = [simulate(plan, Sampled(plan, model_of, seed=seed), steps=_SIMULATED_STEPS).steps.mean for plan in plans]
    rows = [Ranked(plan=plan, simulated_seconds=mean) for plan, mean in zip(plans, means, strict=True)]
    return tuple(sorted(rows, key=lambda row: row.simulated_seconds))


def _subspaces(plan: Plan, pins: tuple[Pin, ...]) -> list[tuple[Pin, ...]]:
    """The pins of each subspace of the plans under `pins` without the structure of `plan`."""
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


def _with_bound_of(plan: Plan, best: Plan, subspace_pins: Container[str]) -> Plan:
    """The plan of a subspace as a plan of the whole space of `best`: with its bound, status feasible, and without the
    pins of the subspace."""
    period, bound = plan.period_seconds, min(best.solver.bound_seconds, plan.period_seconds)
    update = {"status": "feasible", "bound_seconds": bound, "gap": (period - bound) / period}
    pins = tuple(pin for pin in plan.pins if pin not in subspace_pins)
    return plan.model_copy(update={"pins": pins, "solver": plan.solver.model_copy(update=update)})
