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
    PacedCostModel,
    Replanned,
    Simulated,
    facts_of_run,
    pace_factors,
    replan,
    with_run_records,
)
from meshwright.planner.plan.calls import cost_model_of
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.pins import parse_pins
from meshwright.planner.plan.plan import Plan, read_plan
from meshwright.planner.search.recost import re_evaluate
from meshwright.planner.simulation.sampled import Sampled
from meshwright.planner.simulation.simulate import simulate
from meshwright.planner.solver.result import Limits
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout
from meshwright.profiles.left_plans import former_plans
from meshwright.profiles.table import Table
from meshwright.profiles.trace import Span, read_last_spans

RECENT_STEPS = 20
"""The number of last steps that are observed; earlier ones may be out of date."""


@dataclass(frozen=True, kw_only=True)
class ObservedRun:
    """The facts of a plan as its run observed them, and the measured / predicted ratio of each stage: `factors` for its
    current layout, and `in_layouts` for every layout that the run has used.

    `off_by` is the relative error of the plan's period against its prediction with these factors, at the lengths that
    it was made for; 0 for the first plan of a run, which was made before any speed was known.
    """

    facts: Facts
    factors: Mapping[str, float]
    layout_factors: Mapping[tuple[str, Layout], float]
    relative_error: float
    table: Table | None

    def cost_model_for(self, facts: Facts) -> PacedCostModel:
        """The cost model of any facts, scaled by these factors."""
        return PacedCostModel(cost_model_of(facts, self.table), self.factors, self.layout_factors)

    @property
    def model(self) -> PacedCostModel:
        """The cost model of the observed facts, scaled by these factors."""
        return self.cost_model_for(self.facts)


def observed_run(
    plan: Plan, directory: Path, table: Table | None = None, *, facts: Facts | None = None, lost_nodes: int = 0
) -> ObservedRun:
    """Return the observations of the plan's run, applied to the plan's facts or to `facts`.

    `table` is the one that the plan was made with, if any. Raises BadInput for a directory of another plan, for a run
    that is too short, and like `facts_from`.
    """
    if read_plan(directory / "plan.json") != plan:
        raise BadInput(f"{directory} is a run of another plan; give the plan.json in that directory.")
    spans, earlier_plans = _last_steps(directory / "trace.jsonl"), tuple(_earlier_plans(directory, table))
    observed_facts, factors = (
        facts_of_run(plan, facts or plan.facts, spans, lost_nodes=lost_nodes),
        _factors(plan, spans, table),
    )
    in_layouts: dict[tuple[str, Layout], float] = {}
    for one, plan_factors in (*earlier_plans, (plan, factors)):
        in_layouts |= {(p.stage, p.layout): plan_factors[p.stage] for p in one.placements if p.stage in plan_factors}
    predicted_again = re_evaluate(
        plan, plan.facts, PacedCostModel(cost_model_of(plan.facts, table), factors)
    ).period_seconds
    off_by = abs(predicted_again - plan.period_seconds) / predicted_again if earlier_plans else 0.0
    return ObservedRun(
        facts=observed_facts, factors=factors, layout_factors=in_layouts, relative_error=off_by, table=table
    )


def replan_from_run(
    plan: Plan,
    directory: Path,
    table: Table | None = None,
    *,
    facts: Facts | None = None,
    lost_nodes: int = 0,
    limits: Limits | None = None,
) -> Replanned:
    """Find the best plan from the observations of the plan's run. Raises BadInput like `shown_by` and `replan`."""
    return _replanned(plan, observed_run(plan, directory, table, facts=facts, lost_nodes=lost_nodes), limits)


def replan_and_simulate(plan: Plan, directory: Path, table: Table | None = None) -> Replanned:
    """Re-plan like `replan_as_shown`; if the new plan is predicted to be faster, both plans are also simulated with the
    same sampled lengths. Raises BadInput like `replan_as_shown`."""
    shown = observed_run(plan, directory, table)
    replanned = _replanned(plan, shown, None)
    if replanned.kept_seconds is None or replanned.payback_steps_with_pause(0.0) is None:
        return replanned
    kept, new = (
        simulate(one, Sampled(one, shown.cost_model_for, seed=0), steps=RECENT_STEPS).steps.mean
        for one in (re_evaluate(plan, shown.facts, shown.model), replanned.plan)
    )
    return replace(replanned, simulated=Simulated(kept_seconds=kept, seconds=new))


def _replanned(plan: Plan, shown: ObservedRun, limits: Limits | None) -> Replanned:
    model = shown.model
    replanned = replan(plan, shown.facts, model, pins=parse_pins(plan.pins, plan.graph), limits=limits)
    return replace(replanned, plan=with_run_records(replanned.plan, model, shown.table), off_by=shown.relative_error)


def _last_steps(trace: Path) -> tuple[Span, ...]:
    """The spans of the observed steps and of one step before them; an observation leaves out its first step."""
    return read_last_spans(trace, RECENT_STEPS + 1)


def _factors(plan: Plan, spans: tuple[Span, ...], table: Table | None) -> dict[str, float]:
    return pace_factors(calibrate(plan, spans, table, date=datetime.date.today().isoformat()))


def _earlier_plans(directory: Path, table: Table | None) -> Iterator[tuple[Plan, dict[str, float]]]:
    """Each earlier plan of the run with its factors, without plans that were left too soon to know them."""
    for left_plan in former_plans(directory):
        plan = read_plan(left_plan.plan)
        try:
            factors = _factors(plan, _last_steps(left_plan.trace), table)
        except BadInput:
            continue
        yield plan, factors
