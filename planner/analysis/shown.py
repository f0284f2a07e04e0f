"""Observations from the directory of a run: the lengths of its last steps, and the measured speed of every stage.

A run that changes to another plan keeps the earlier plan with its trace (`profiles/left_plans.py`), so that the speed
of an earlier layout is still known.
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
"""The number of last steps that are observed; earlier ones may be out of date."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """The facts of a plan as its run observed them, and the measured / predicted ratio of each stage: `factors` for its
    current layout, and `in_layouts` for every layout that the run has used.

    `off_by` is the relative error of the plan's period against its prediction with these factors, at the lengths that
    it was made for; 0 for the first plan of a run, which was made before any speed was known.
    """

    facts: Facts
    factors: Mapping[str, float]
    in_layouts: Mapping[tuple[str, Layout], float]
    off_by: float
    table: Table | None

    def remodel(self, facts: Facts) -> Paced:
        """The cost model of any facts, scaled by these factors."""
        return Paced(model_of(facts, self.table), self.factors, self.in_layouts)

    @property
    def model(self) -> Paced:
        """The cost model of the observed facts, scaled by these factors."""
        return self.remodel(self.facts)


def shown_by(
    plan: Plan, directory: Path, table: Table | None = None, *, facts: Facts | None = None, lost_nodes: int = 0
) -> Shown:
    """Return the observations of the plan's run, applied to the plan's facts or to `facts`.

    `table` is the one that the plan was made with, if any. Raises BadInput for a directory of another plan, for a run
    that is too short, and like `facts_from`.
    """
    if read_plan(directory / "plan.json") != plan:
        raise BadInput(f"{directory} is a run of another plan; give the plan.json in that directory.")
    spans, earlier_plans = _last_steps(directory / "trace.jsonl"), tuple(_earlier_plans(directory, table))
    observed_facts, factors = (
        facts_from(plan, facts or plan.facts, spans, lost_nodes=lost_nodes),
        _factors(plan, spans, table),
    )
    in_layouts: dict[tuple[str, Layout], float] = {}
    for one, plan_factors in (*earlier_plans, (plan, factors)):
        in_layouts |= {(p.stage, p.layout): plan_factors[p.stage] for p in one.placements if p.stage in plan_factors}
    predicted_again = recost(plan, plan.facts, Paced(model_of(plan.facts, table), factors)).period_seconds
    off_by = abs(predicted_again - plan.period_seconds) / predicted_again if earlier_plans else 0.0
    return Shown(facts=observed_facts, factors=factors, in_layouts=in_layouts, off_by=off_by, table=table)


def replan_as_shown(
    plan: Plan,
    directory: Path,
    table: Table | None = None,
    *,
    facts: Facts | None = None,
    lost_nodes: int = 0,
    limits: Limits | None = None,
) -> Replanned:
    """Find the best plan from the observations of the plan's run. Raises BadInput like `shown_by` and `replan`."""
    return _replanned(plan, shown_by(plan, directory, table, facts=facts, lost_nodes=lost_nodes), limits)


def replan_and_simulate(plan: Plan, directory: Path, table: Table | None = None) -> Replanned:
    """Re-plan like `replan_as_shown`; if the new plan is predicted to be faster, both plans are also simulated with the
    same sampled lengths. Raises BadInput like `replan_as_shown`."""
    shown = shown_by(plan, directory, table)
    replanned = _replanned(plan, shown, None)
    if replanned.kept_seconds is None or replanned.earned_after(0.0) is None:
        return replanned
    kept, new = (
        simulate(one, Sampled(one, shown.remodel, seed=0), steps=RECENT).steps.mean
        for one in (recost(plan, shown.facts, shown.model), replanned.plan)
    )
    return replace(replanned, simulated=Simulated(kept_seconds=kept, seconds=new))


def _replanned(plan: Plan, shown: Shown, limits: Limits | None) -> Replanned:
    model = shown.model
    replanned = replan(plan, shown.facts, model, pins=parse_pins(plan.pins, plan.graph), limits=limits)
    return replace(replanned, plan=of_run(replanned.plan, model, shown.table), off_by=shown.off_by)


def _last_steps(trace: Path) -> tuple[Span, ...]:
    """The spans of the observed steps and of one step before them; an observation leaves out its first step."""
    return read_last_spans(trace, RECENT + 1)


def _factors(plan: Plan, spans: tuple[Span, ...], table: Table | None) -> dict[str, float]:
    return factors_of(calibrate(plan, spans, table, date=datetime.date.today().isoformat()))


def _earlier_plans(directory: Path, table: Table | None) -> Iterator[tuple[Plan, dict[str, float]]]:
    """Each earlier plan of the run with its factors, without plans that were left too soon to know them."""
    for left_plan in left_plans(directory):
        plan = read_plan(left_plan.plan)
        try:
            factors = _factors(plan, _last_steps(left_plan.trace), table)
        except BadInput:
            continue
        yield plan, factors
