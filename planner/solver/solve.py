"""The search for the best answer to a problem, and its proof: by blocks where calls may be anywhere, else by places."""

from __future__ import annotations

from meshwright.planner.solver import block_search, place_search
from meshwright.planner.solver.block_model import block_memory_model
from meshwright.planner.solver.place_model import memory_model, run
from meshwright.planner.solver.problem import Problem
from meshwright.planner.solver.result import Effort, Limits, Progress, Result


def solve(problem: Problem, limits: Limits, progress: Progress | None = None, effort: Effort | None = None) -> Result:
    """The best answer within the limits, with the bound that was proven; what it takes is added to `effort`."""
    if any(not call.options for call in problem.calls):
        return Result(status="infeasible", answer=None, objective=None, bound=0)
    search = block_search.search if problem.anywhere else place_search.search
    return search(problem, limits, progress or _silence, effort or Effort())


def first_answer(problem: Problem, limits: Limits, effort: Effort) -> Result | None:
    """An answer among a few options; none where it was not found at once."""
    if any(not call.options for call in problem.calls):
        return None
    if problem.anywhere:
        return block_search.first_answer(problem, limits, effort)
    return place_search.first_answer(problem, limits)


def least_memory(problem: Problem, limits: Limits) -> int | None:
    """The least blocks a device can have so that some choice of options fits, whatever its duration.

    None when a call has no option. The limits may cut the search short; the answer is then still one that fits.
    """
    if any(not call.options for call in problem.calls):
        return None
    model, _, device = block_memory_model(problem) if problem.anywhere else memory_model(problem)
    solved = run(model, limits)
    return solved.solver.value(device) if solved.is_found else None


def _silence(_makespan: int | None, _bound: int) -> None:
    """For callers who do not ask for progress."""
