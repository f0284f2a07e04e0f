"""Sweeps: one job planned under many settings, in as many processes as there are processors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshwright.planner.analysis.plan_summary import DEFAULT_NUM_STEPS
from meshwright.planner.analysis.sweep import (
    SharedCostModels,
    Sweep,
    SweepPoint,
    shared_costs_key,
    sweep_of,
    sweep_point,
)
from meshwright.planner.job.job import Facts, Job
from meshwright.planner.job.whatif_settings import SWEEP, Setting, require_known_fields, with_values
from meshwright.planner.plan.pins import parse_pins
from meshwright.planner.plan.plan import Plan
from meshwright.planner.search.parallel import map_in_processes
from meshwright.planner.solver.result import Limits
from meshwright.profiles.errors import MeshwrightError
from meshwright.profiles.table import Table
from meshwright.runtime.api.analyses import step_interval
from meshwright.runtime.api.arguments import cost_model_builder, limits_of, require_number
from meshwright.runtime.api.planning import Progress, SearchConstraints, plan_and_model


def sweep(
    facts: Facts,
    settings: Sequence[Setting],
    table: Table | None = None,
    *,
    pins: Iterable[str] = (),
    price: float | None = None,
    num_steps: int = DEFAULT_NUM_STEPS,
    limits: Limits | None = None,
    job: Job | None = None,
    progress: Progress | None = None,
) -> Sweep:
    """The best plan under each of several settings, with the Pareto front of step time, ranks and GPU-hours.

    Each takes a search of its own, under these pins and to the gap of `limits`, whose deadline is that of the whole
    sweep; points that are not finished by then are left out. A point without a plan says why, also if its setting
    breaks a rule. Searches run in as many processes as there are processors, at most 8, if the program has no threads.
    `price` is that of a GPU-hour, in any currency, and costs are those of `num_steps` steps. With the `job`, each plan
    has one of the engines that it allows.
    Raises BadInput for a field that the facts do not have.

    >>> grid = [{"cluster.nodes": 1}, {"cluster.nodes": 2}]
    >>> found = api.sweep(facts, grid, price=2.5, num_steps=100, limits=api.Limits(gap=0.5))
    >>> [point.plan.is_on_front for point in found.points if point.plan]
    [True, True]
    """
    require_number("price", price, minimum=0)
    require_number("num_steps", num_steps, minimum=1)
    require_known_fields(facts, settings)
    checked, all_pins = limits_of(limits), tuple(pins)
    parse_pins(all_pins, facts.graph)
    constraints = SearchConstraints(job=job, pins=all_pins, forbid=(), start=None, observed=None)
    model_of = SharedCostModels(cost_model_builder(table))

    def point_of(setting: Setting) -> SweepPoint | None:
        """The point of a setting; None if the limits end before its search does."""
        if checked.seconds_left <= 0:
            return None
        try:
            changed = with_values(facts, setting, SWEEP)
            outcome, _ = plan_and_model(changed, table, constraints, limits=checked, model_of=model_of)
        except MeshwrightError as error:
            return SweepPoint(setting=setting, plan=None, violations=(str(error),))
        is_whole = isinstance(outcome, Plan) and outcome.solver.has_requested_gap
        if checked.seconds_left <= 0 and not is_whole:
            return None
        of_step = step_interval(outcome, table) if isinstance(outcome, Plan) else None
        return sweep_point(setting, outcome, of_step, price=price, num_steps=num_steps)

    groups = _by_shared_costs(facts, settings)
    found = map_in_processes(
        point_of,
        [settings[position] for position in groups],
        is_stopped=lambda: checked.seconds_left <= 0,
        on_done=lambda number: progress("planning settings", number, len(settings)) if progress else None,
    )
    points = {groups[index]: point for index, point in found.items() if point is not None}
    return sweep_of(
        [points[position] for position in sorted(points)],
        price=price,
        num_steps=num_steps,
        num_missing=len(settings) - len(points),
    )


def _by_shared_costs(facts: Facts, settings: Sequence[Setting]) -> list[int]:
    """The positions of the settings, those with the same costs of a choice one after the other, as are
    those that break a rule."""
    first_of: dict[str, int] = {}
    order = []
    for position, setting in enumerate(settings):
        try:
            key = shared_costs_key(with_values(facts, setting, SWEEP))
        except MeshwrightError:
            key = ""
        order.append((first_of.setdefault(key, position), position))
    return [position for _, position in sorted(order)]
