"""What the directory of a run shows of its job: the lengths that its last steps met, and how slow each stage was.

A run that goes over to another plan keeps the one before with its trace (`profiles/left_plans.py`), so a layout that
was slower than predicted is known to be so when it is looked at again.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.planner.analysis.correct_table import calibrate
from meshwright.planner.analysis.replan import (
    Paced,
    Replanned,
    Simulated,
    factors_of,
    facts_from,
    of_run,
    replan,
)
from meshwright.planner.plan.calls import model_of
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.pins import parse_pins
from meshwright.planner.plan.plan import Plan, read_plan
from meshwright.planner.search.recost import recost
from meshwright.planner.simulation.sampled import Sampled
from meshwright.planner.simulation.simulate import simulate
from meshwright.planner.solver.result import Limits
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout
from meshwright.profiles.left_plans import left_plans
from meshwright.profiles.table import Table
from meshwright.profiles.trace import Span, read_last_spans

RECENT = 20
"""Steps that are looked at: what was long ago may have changed."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """The facts of a plan as its run has met them, and how many times longer stages took than is predicted, by
    themselves and in each layout that the run has had.

    `off_by` is how far the plan's period is from what it takes at these speeds and the lengths that it was made for, in
    parts of the latter; 0 of the first plan of a run, which was made before any speed was known.
    """

    facts: Facts
    factors: Mapping[str, float]
    in_layouts: Mapping[tuple[str, Layout], float]
    off_by: float
    table: Table | None

    def remodel(self, facts: Facts) -> Paced:
        """The cost model of any facts, at these speeds."""
        return Paced(model_of(facts, self.table), self.factors, self.in_layouts)

    @property
    def model(self) -> Paced:
        """What all takes as the run has met it."""
        return self.remodel(self.facts)


def shown_by(
    plan: Plan, directory: Path, table: Table | None = None, *, facts: Facts | None = None, lost_nodes: int = 0
) -> Shown:
    """What the run shows of its plan's facts, or of these.

    The table is the one that the plan was made with, if it was made with one. Raises BadInput for a directory of
    another plan, for one that shows too little, and where `facts_from` does.
    """
    if read_plan(directory / "plan.json") != plan:
        raise BadInput(f"{directory} is a run of another plan; give the plan.json that it holds.")
    spans, before = _last_steps(directory / "trace.jsonl"), tuple(_before(directory, table))
    met, factors = facts_from(plan, facts or plan.facts, spans, lost_nodes=lost_nodes), _factors(plan, spans, table)
    in_layouts: dict[tuple[str, Layout], float] = {}
    for one, then in (*before, (plan, factors)):
        in_layouts |= {(p.stage, p.layout): then[p.stage] for p in one.placements if p.stage in then}
    as_made = recost(plan, plan.facts, Paced(model_of(plan.facts, table), factors)).period_seconds
    off_by = abs(as_made - plan.period_seconds) / as_made if before else 0.0
    return Shown(facts=met, factors=factors, in_layouts=in_layouts, off_by=off_by, table=table)


def replan_as_shown(
    plan: Plan,
    directory: Path,
    table: Table | None = None,
    *,
    facts: Facts | None = None,
    lost_nodes: int = 0,
    limits: Limits | None = None,
) -> Replanned:
    """What is best from here by what the directory of the plan's run shows. Raises BadInput as `shown_by` does, and as
    `replan`."""
    return _replanned(plan, shown_by(plan, directory, table, facts=facts, lost_nodes=lost_nodes), limits)


def replan_and_simulate(plan: Plan, directory: Path, table: Table | None = None) -> Replanned:
    """The same, and where the plan found is predicted to be faster both are simulated with the same draws. Raises
    BadInput as `replan_as_shown`."""
    shown = shown_by(plan, directory, table)
    found = _replanned(plan, shown, None)
    if found.kept_seconds is None or found.earned_after(0.0) is None:
        return found
    kept, new = (
        simulate(one, Sampled(one, shown.remodel, seed=0), steps=RECENT).steps.mean
        for one in (recost(plan, shown.facts, shown.model), found.plan)
    )
    return replace(found, simulated=Simulated(kept_seconds=kept, seconds=new))


def _replanned(plan: Plan, shown: Shown, limits: Limits | None) -> Replanned:
    model = shown.model
    found = replan(plan, shown.facts, model, pins=parse_pins(plan.pins, plan.graph), limits=limits)
    return replace(found, plan=of_run(found.plan, model, shown.table), off_by=shown.off_by)


def _last_steps(trace: Path) -> tuple[Span, ...]:
    """Those that are looked at, and the one before them, which stands for the first of a run and is left out."""
    return read_last_spans(trace, RECENT + 1)


def _factors(plan: Plan, spans: tuple[Span, ...], table: Table | None) -> dict[str, float]:
    return factors_of(calibrate(plan, spans, table, date=datetime.date.today().isoformat()))


def _before(directory: Path, table: Table | None) -> Iterator[tuple[Plan, dict[str, float]]]:
    """Each plan that the run had before, and how many times longer its stages took; none that was left too soon."""
    for left in left_plans(directory):
        plan = read_plan(left.plan)
        try:
            factors = _factors(plan, _last_steps(left.trace), table)
        except BadInput:
            continue
        yield plan, factors
