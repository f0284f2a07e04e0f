"""The record that a plan keeps of the search that found it: solver, status, lower bound, gap and work."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from meshwright.planner.plan.plan import Plan, SearchWork, Solver
from meshwright.planner.search.costing import TOO_SLOW
from meshwright.planner.search.frontier import Frontier
from meshwright.planner.solver.result import Effort, Limits

_DIGITS = 9
"""Decimal places of the recorded deterministic time."""


def solver_record(
    limits: Limits, *, is_whole: bool, statuses: Collection[str], bound_seconds: float, work: SearchWork
) -> Solver:
    """Return the record of a search; objective and gap are added by `with_gap` once the plan has been timed.

    `statuses` are those of the search cases that were searched, which are all of them if the search `is_whole`.
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


def count_work(costed: Sequence[Frontier], effort: Effort) -> SearchWork:
    """Count the work of costing these frontiers and of solving."""
    counts = [frontier.questions for frontier in costed]
    return SearchWork(
        timed=sum(count.timed for count in counts),
        weighed=sum(count.weighed for count in counts),
        generations=sum(count.generations for count in counts),
        too_slow=sum(frontier.rejected[TOO_SLOW] for frontier in costed),
        models=effort.num_models,
        deterministic_time=round(effort.deterministic_time, _DIGITS),
    )


def with_gap(plan: Plan) -> Plan:
    """Return the plan with its timed period as the objective, and with its gap to the lower bound.

    The timed period can exceed the solver's makespan, because rewards on hosts arrive later or ticks were coarse. The
    status then becomes feasible if the gap is wider than requested.
    """
    solver, period = plan.solver, plan.period_seconds
    bound = min(solver.bound_seconds, period)
    gap = (period - bound) / period
    timed = solver.model_copy(update={"objective_seconds": period, "bound_seconds": bound, "gap": gap})
    status = "feasible" if solver.status == "optimal" and not timed.has_requested_gap else solver.status
    return plan.model_copy(update={"solver": timed.model_copy(update={"status": status})})
