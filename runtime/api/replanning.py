"""Re-planning of a running job, from the lengths and speeds that its run measured."""

from __future__ import annotations

from pathlib import Path

from meshwright.planner.analysis.replan import Replanned
from meshwright.planner.analysis.shown import replan_from_run
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
    """The best plan for the rest of a run of `plan`, by the last steps that it measured, on the remaining nodes.

    Lengths and speeds are those of these steps; a layout that the run used earlier is as slow as it was then. `run` is
    the directory of the run, and `table` the one that the plan was made with, if any. `facts` are those of another job
    to continue with. The answer is found in the neighbourhood of the plan, without a bound; with `limits` a full search
    starts from it. The answer also has the seconds of moving to the new plan, and after how many steps they are
    regained.
    Raises BadInput for a plan that breaks a rule, a run of another plan, a trace that was not measured, and where no
    plan fits what is left.
    """
    require_valid(plan)
    search_limits = limits_of(limits) if limits else None
    return replan_from_run(plan, Path(run), table, facts=facts, lost_nodes=lost_nodes, limits=search_limits)
