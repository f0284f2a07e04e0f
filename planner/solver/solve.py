"""Solves a problem: with relations between rank ranges if tasks may be anywhere, otherwise with fixed ranks.

The search itself is in `search.py`.
"""

from __future__ import annotations

from meshwright.planner.solver import search
from meshwright.planner.solver.cp_sat import run_cp_sat
from meshwright.planner.solver.fixed_ranks_model import FixedRanksModel
from meshwright.planner.solver.model import Model
from meshwright.planner.solver.problem import Problem
from meshwright.planner.solver.rank_range_model import RankRangeModel
from meshwright.planner.solver.result import Effort, Limits, Progress, Result


def solve(problem: Problem, limits: Limits, progress: Progress | None = None, effort: Effort | None = None) -> Result:
    """Return the best answer within the limits and the proven lower bound; the work is added to `effort`."""
    if any(not task.modes for task in problem.tasks):
        return Result(status="infeasible", answer=None, objective=None, bound=0)
    return search.search(_model(problem), problem, limits, progress or _ignore_progress, effort or Effort())


def first_answer(problem: Problem, limits: Limits, effort: Effort) -> Result | None:
    """Return an answer among a few modes per task, or None if none is found quickly."""
    if any(not task.modes for task in problem.tasks):
        return None
    return search.first_answer(_model(problem), problem, limits, effort)


def least_memory(problem: Problem, limits: Limits) -> int | None:
    """Return the least units of device memory with which some choice of modes fits, whatever its duration.

    None if a task has no mode or no choice was found. If the limits end the search early, the result still fits but may
    not be the least.
    """
    if any(not task.modes for task in problem.tasks):
        return None
    program, device = _model(problem).memory_program(problem)
    solved = run_cp_sat(program, limits)
    return solved.solver.value(device) if solved.is_found else None


def _model(problem: Problem) -> Model:
    return RankRangeModel() if problem.anywhere else FixedRanksModel()


def _ignore_progress(_makespan: int | None, _bound: int) -> None:
    """Ignore progress."""
