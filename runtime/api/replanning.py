"""A plan made anew from what a run has shown."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path

from meshwright.planner.analysis.correct_table import calibrate, read_run
from meshwright.planner.analysis.replan import Paced, Replanned, factors_of, facts_from, of_run
from meshwright.planner.analysis.replan import replan as planned_anew
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.pins import parse_pins
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.verify import require_valid
from meshwright.planner.solver.result import Limits
from meshwright.profiles.table import Table
from meshwright.runtime.api.given import Pathname, limits_of, remodel


def replan(
    plan: Plan,
    run: Pathname,
    table: Table | None = None,
    *,
    facts: Facts | None = None,
    lost_nodes: int = 0,
    limits: Limits | None = None,
) -> Replanned:
    """The plan that is best from here: for the lengths and the speeds that a run of `plan` has met, on the nodes left.

    `run` is the directory of the run, and `table` the one that the plan was made with, if it was made with one. `facts`
    are those of another job to go on with. The answer is found among choices near those of the plan, without a bound;
    with `limits` a search goes on from it. It says too what moving there costs, and after how many steps that is
    earned.
    Raises BadInput for a plan that breaks a rule, a run of another plan, a trace that was not measured, and where no
    plan fits what is left.
    """
    require_valid(plan)
    spans = read_run(plan, Path(run))
    seen = facts_from(plan, facts or plan.facts, spans, lost_nodes=lost_nodes)
    paces = factors_of(calibrate(plan, spans, table, date=datetime.date.today().isoformat()))
    model = Paced(remodel(table)(seen), paces)
    asked = limits_of(limits) if limits else None
    found = planned_anew(plan, seen, model, pins=parse_pins(plan.pins, plan.graph), limits=asked)
    return replace(found, plan=of_run(found.plan))
