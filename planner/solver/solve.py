"""Solves a problem: with relations between rank ranges if tasks may be anywhere, otherwise with fixed ranks."""

from __future__ import annotations

from meshwright.planner.solver import fixed_ranks_search, rank_range_search
from meshwright.planner.solver.cp_sat import fixed_ranks_memory_model, run_cp_sat
from meshwright.planner.solver.problem import Problem
from meshwright.planner.solver.rank_range_model import rank_range_memory_model
from meshwright.planner.solver.result import Effort, Limits, Progress, Result


def solve(problem: Problem, limits: Limits, progress: Progress | None = None, effort: Effort | None = None) -> Result:
    """Return the best answer within the limits and the proven lower bound; the work is added to `effort`."""
    if any(not task.modes for task in problem.tasks):
        return Result(status="infeasible", answer=None, objective=None, bound=0)
    search = rank_range_search.search if problem.anywhere else fixed_ranks_search.search
    return search(problem, limits, progress or _ignore_progress, effort or Effort())


def first_answer(problem: Problem, limits: Limits, effort: Effort) -> Result | None:
    """Return an answer among a few modes per task, or None if none is found at once."""
    if any(not task.modes for task in problem.tasks):
        return None
    if problem.anywhere:
        return rank_range_search.first_answer(problem, limits, effort)
    return fixed_ranks_search.first_answer(problem, limits)


def least_memory(problem: Problem, limits: Limits) -> int | None:
    """Return the least units of device memory with which some choice of modes fits, whatever its duration.

    None if a task has no mode. If the limits end the search early, the result still fits but may not be the least.
    """
    if any(not task.modes for task in problem.tasks):
        return None
    model, _, device = rank_range_memory_model(problem) if problem.anywhere else fixed_ranks_memory_model(problem)
    solved = run_cp_sat(model, limits)
    return solved.solver.value(device) if solved.is_found else None


def _ignore_progress(_makespan: int | None, _bound: int) -> None:
    """Ignore progress."""
