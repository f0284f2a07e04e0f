"""What a plan says of the search that found it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from meshwright.planner.plan.plan import Plan, SearchWork, Solver
from meshwright.planner.search.costing import TOO_SLOW
from meshwright.planner.search.frontier import Frontier
from meshwright.planner.solver.result import Effort, Limits

_DIGITS = 9
"""Of the solver's deterministic time."""


def solver_record(
    limits: Limits, *, is_whole: bool, statuses: Collection[str], bound_seconds: float, work: SearchWork
) -> Solver:
    """How the answer was found; objective and gap follow when the plan has been timed.

    `statuses` are those of the scopes that were searched, of all of them where the search `is_whole`.
    """
    from meshwright.planner.solver.place_model import NAME, VERSION

    exact = {"optimal", "infeasible"} if limits.tolerance else {"optimal", "infeasible", "beaten"}
    return Solver(
        name=NAME,
        version=VERSION,
        seed=limits.seed,
        num_workers=limits.num_workers,
        max_deterministic_time=limits.max_deterministic_time,
        asked_gap=limits.tolerance,
        status="optimal" if is_whole and exact.issuperset(statuses) else "feasible",
        objective_seconds=0.0,
        bound_seconds=bound_seconds,
        gap=0.0,
        work=work,
    )


def work_of(costed: Sequence[Frontier], effort: Effort) -> SearchWork:
    """What costing these took, and what the solver did."""
    asked = [found.asked for found in costed]
    return SearchWork(
        timed=sum(one.timed for one in asked),
        weighed=sum(one.weighed for one in asked),
        generations=sum(one.generations for one in asked),
        too_slow=sum(found.rejected[TOO_SLOW] for found in costed),
        models=effort.num_models,
        deterministic_time=round(effort.deterministic_time, _DIGITS),
    )


def with_gap(plan: Plan) -> Plan:
    """The plan with its objective, as it was timed, and how far that may be from the best. One that takes longer than
    the search has counted, for rewards on hosts keep it waiting or its ticks were coarse, is not proven to be the
    best."""
    solver, period = plan.solver, plan.period_seconds
    bound = min(solver.bound_seconds, period)
    gap = (period - bound) / period
    timed = solver.model_copy(update={"objective_seconds": period, "bound_seconds": bound, "gap": gap})
    status = "feasible" if solver.status == "optimal" and not timed.has_asked_gap else solver.status
    return plan.model_copy(update={"solver": timed.model_copy(update={"status": status})})
