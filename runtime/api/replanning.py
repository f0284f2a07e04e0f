"""A plan made anew from what a run has shown."""

from __future__ import annotations

from pathlib import Path

from meshwright.planner.analysis.replan import Replanned
from meshwright.planner.analysis.shown import replan_as_shown
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.verify import require_valid
from meshwright.planner.solver.result import Limits
from meshwright.profiles.table import Table
from meshwright.runtime.api.given import Pathname, limits_of


def replan(
    plan: Plan,
    run: Pathname,
    table: Table | None = None,
    *,
    facts: Facts | None = None,
    lost_nodes: int = 0,
    limits: Limits | None = None,
) -> Replanned:
    """The plan that is best from here, for what the last steps of a run of `plan` have shown, on the nodes left.

    Lengths and speeds are those that they met; a layout that the run had before is as slow as it was then. `run` is the
    directory of the run, and `table` the one that the plan was made with, if it was made with one. `facts` are those of
    another job to go on with. The answer is found among choices near those of the plan, without a bound; with `limits`
    a search goes on from it. It says too what moving there costs, and after how many steps that is earned.
    Raises BadInput for a plan that breaks a rule, a run of another plan, a trace that was not measured, and where no
    plan fits what is left.
    """
    require_valid(plan)
    asked = limits_of(limits) if limits else None
    return replan_as_shown(plan, Path(run), table, facts=facts, lost_nodes=lost_nodes, limits=asked)
