"""Sweeps: one job planned under many settings, in as many processes as there are processors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path

from meshwright.planner.analysis.plan_summary import DEFAULT_NUM_STEPS
from meshwright.planner.analysis.sweep import (
    SharedCostModels,
    Sweep,
    SweepPoint,
    shared_costs_key,
    sweep_of,
    sweep_point,
)
from meshwright.planner.job.engine_limits import engines_of
from meshwright.planner.job.job import Facts, Job
from meshwright.planner.job.whatif_settings import SWEEP, Setting, require_known_fields, with_values
from meshwright.planner.plan.pins import parse_pins
from meshwright.planner.plan.plan import Plan
from meshwright.planner.search.parallel import map_in_processes
from meshwright.planner.solver.result import Limits
from meshwright.profiles.errors import BadInput, MeshwrightError
from meshwright.profiles.table import Table
from meshwright.runtime.api.analyses import step_interval
from meshwright.runtime.api.arguments import cost_model_builder, limits_of, require_number
from meshwright.runtime.api.planning import Progress, SearchConstraints, plan_and_model

_SOURCES = (".py", ".json", ".yaml")
"""Endings of the files that decide a plan: code, and tables of devices, models and trainers."""


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
    finished: Sweep | None = None,
    on_points: Callable[[Sweep], None] | None = None,
) -> Sweep:
    """The best plan under each of several settings, with the Pareto front of step time, ranks and GPU-hours.

    Each takes a search of its own, under these pins and to the gap of `limits`, whose deadline is that of the whole
    sweep; points that are not finished by then are left out. A point without a plan says why, also if its setting
    breaks a rule. Searches run in as many processes as there are processors, at most 8, if the program has no threads.
    `price` is that of a GPU-hour, in any currency, and costs are those of `num_steps` steps. With the `job`, each plan
    has one of the engines that it allows. Points that a `finished` or stopped sweep already has are not planned
    again. `on_points` is called with the sweep so far whenever it has more points.
    Raises BadInput for a field that the facts do not have, and for a finished sweep of other facts, costs, pins, gap,
    price or number of steps, or of another version of this program.

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
    digest = _digest(facts, table, all_pins, job, (price, num_steps, checked.gap))
    points = _known_points(finished, digest, settings)

    def swept() -> Sweep:
        in_order = [points[position] for position in sorted(points)]
        num_missing = len(settings) - len(points)
        return sweep_of(in_order, price=price, num_steps=num_steps, num_missing=num_missing, digest=digest)

    def collect(found: Mapping[int, SweepPoint | None]) -> None:
        num_known = len(points)
        points.update({missing[index]: point for index, point in found.items() if point is not None})
        if progress:
            progress("planning settings", len(points), len(settings))
        if on_points and len(points) > num_known:
            on_points(swept())

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

    missing = [position for position in _by_shared_costs(facts, settings) if position not in points]
    found = map_in_processes(
        point_of,
        [settings[position] for position in missing],
        is_stopped=lambda: checked.seconds_left <= 0,
        on_done=collect,
    )
    collect(found)
    return swept()


def _digest(
    facts: Facts, table: Table | None, pins: Iterable[str], job: Job | None, numbers: tuple[float | None, ...]
) -> str:
    """A digest of what the points of a sweep depend on besides their settings."""
    documents = [document.model_dump_json() for document in (facts, table) if document]
    engines = engines_of(job, facts) if job else ()
    return hashlib.sha256(
        json.dumps([documents, sorted(pins), engines, numbers, _program_digest()]).encode()
    ).hexdigest()


@cache
def _program_digest() -> str:
    """A digest of the sources that decide a plan and its cost, and of the solver's version."""
    found = hashlib.sha256(version("ortools").encode())
    for package in ("profiles", "cost_models", "planner"):
        folder = Path(__file__).parents[2] / package
        for path in sorted(path for path in folder.rglob("*") if path.suffix in _SOURCES):
            found.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return found.hexdigest()


def _known_points(finished: Sweep | None, digest: str, settings: Sequence[Setting]) -> dict[int, SweepPoint]:
    """The points that an earlier sweep has, by the positions of their settings. Raises BadInput for another digest."""
    if finished is None:
        return {}
    if finished.digest != digest:
        raise BadInput(
            "the finished points are those of another job, profile, pin, gap, price or --per-steps, or of another "
            "version of this program; sweep with the same ones, or begin a new file."
        )
    by_setting = {json.dumps(point.setting, sort_keys=True): point for point in finished.points}
    keys = enumerate(json.dumps(setting, sort_keys=True) for setting in settings)
    return {position: by_setting[key] for position, key in keys if key in by_setting}


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
