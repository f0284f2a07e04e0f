"""The search when every option has its own ranks, and its proof.

    problem    = without the options that cannot beat what is asked for
    incumbent  = the best of several descents, from fixed and from seeded starts
    problem    = without the options that cannot beat the incumbent; what the relaxation suggests is descended from,
                 and where many are left what kicks lead to, until they make the answer no better
    repeat
        incumbent  = what CP-SAT finds in coarse steps of the makespan, descended from
        bound      = what CP-SAT proved
        problem    = without the options that cannot beat the incumbent, by the bounds that are known
    until the bound meets the incumbent, or the limit is reached

Steps of the makespan are coarse at first because CP-SAT otherwise improves an answer one tick at a time. Everything is
deterministic.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from meshwright.planner.solver.bounds import least_makespan, within
from meshwright.planner.solver.coarse import possible
from meshwright.planner.solver.coarse_steps import Steps
from meshwright.planner.solver.greedy import Greedy, Near, Picks
from meshwright.planner.solver.incumbent import Incumbent
from meshwright.planner.solver.place_model import Solved, makespan_model, memory_model, run
from meshwright.planner.solver.problem import Problem
from meshwright.planner.solver.reduce import Reduced, reduced
from meshwright.planner.solver.result import Effort, Limits, OutOfTimeError, Progress, Result
from meshwright.planner.solver.variables import Variables

_STEPS = 16
"""Into how many steps CP-SAT cuts the distance between the bound and the incumbent."""

_MANY = 700
"""Options in all, as in `block_search.py`."""


def search(problem: Problem, limits: Limits, progress: Progress, effort: Effort | None = None) -> Result:
    """The best answer within the limits, with the bound that was proven; every call has options.

    What it takes is added to `effort`.
    """
    effort = effort or Effort()
    incumbent, remaining = Incumbent(problem, progress, limits), possible(problem)
    if any(not call.options for call in remaining.calls):
        return Result(status="infeasible", answer=None, objective=None, bound=0)
    if limits.most is not None:
        remaining = within(remaining, limits.most)
        if any(not call.options for call in remaining.calls):
            return Result.beaten(limits.most)
    try:
        incumbent.start(remaining, limits)
        if incumbent.makespan is None:
            excluded = _start_from_least_memory(incumbent, limits, effort)
            if excluded is not None:
                return excluded
        _prove(incumbent, remaining, limits, effort)
    except OutOfTimeError:
        pass
    assert incumbent.makespan is not None
    if limits.most is not None and incumbent.makespan > limits.most:
        return _nothing_as_short(limits.most, incumbent.bound)
    if limits.seconds_left > 0:
        incumbent.polish()
    return incumbent.result()


def first_answer(problem: Problem, limits: Limits) -> Result | None:
    """The best answer of a few descents; None where none of them fits."""
    incumbent, remaining = Incumbent(problem, lambda _makespan, _bound: None, limits), possible(problem)
    if any(not call.options for call in remaining.calls):
        return None
    with suppress(OutOfTimeError):
        incumbent.start(remaining, limits)
    if incumbent.makespan is None:
        return None
    incumbent.bound = least_makespan(remaining)
    return incumbent.result()


def _prove(incumbent: Incumbent, remaining: Problem, limits: Limits, effort: Effort) -> None:
    """Improves the incumbent and its bound until they meet, or the limit is reached."""
    left = _reduced(incumbent, remaining, limits)
    while not left.is_empty and _has_many(left.problem) and incumbent.kick(left.problem):
        left = _reduced(incumbent, left.within(incumbent.target).problem, limits)
    time = limits.max_deterministic_time
    while time > 0 and limits.seconds_left > 0 and incumbent.bound <= incumbent.target:
        time -= _improve(incumbent, left.problem, replace(limits, max_deterministic_time=time), effort)
        incumbent.progress(incumbent.makespan, incumbent.bound)
        left = left.within(incumbent.target)
        if left.is_empty:
            incumbent.bound = max(incumbent.bound, incumbent.target + 1)


def _has_many(problem: Problem) -> bool:
    """Whether so many options are left that CP-SAT takes longer than descents that may leave fewer."""
    return sum(len(call.options) for call in problem.calls) > _MANY


def _nothing_as_short(most: int, bound: int) -> Result:
    """No answer is as short as asked, or none was found in time."""
    if bound > most:
        return Result.beaten(most)
    return Result(status="out_of_limit", answer=None, objective=None, bound=bound)


def _start_from_least_memory(incumbent: Incumbent, limits: Limits, effort: Effort) -> Result | None:
    """A descent from the choice that needs the least memory, or the result that there is none."""
    problem = incumbent.problem
    model, x, device = memory_model(problem)
    solved = run(model, limits, effort=effort)
    if solved.is_found and solved.solver.value(device) <= problem.device_blocks:
        incumbent.descend_from(Greedy(problem), _picks(solved, problem, x))
        return None
    is_proven = solved.is_proven or solved.solver.best_objective_bound > problem.device_blocks
    return Result(status="infeasible" if is_proven else "out_of_limit", answer=None, objective=None, bound=0)


def _reduced(incumbent: Incumbent, problem: Problem, limits: Limits) -> Reduced:
    """What is left of the problem; what the relaxation suggests is descended from."""

    def suggest(greedy: Greedy, picks: Picks, near: Near | None) -> int:
        limits.require_time()
        incumbent.consider(greedy, picks, near)
        return incumbent.target

    left = reduced(problem, incumbent.target, suggest)
    incumbent.bound = incumbent.target + 1 if left.is_empty else min(left.bound, incumbent.target + 1)
    return left


def _improve(incumbent: Incumbent, problem: Problem, limits: Limits, effort: Effort) -> float:
    """One search with CP-SAT among the options that are left: the deterministic time that was spent."""
    steps = Steps.between(incumbent.bound, incumbent.target, _STEPS)
    model, x = makespan_model(problem)
    steps.minimise(model, x.times.makespan)
    solved = run(model, limits, effort=effort)
    _learn(incumbent, problem, solved, x, steps)
    return max(float(solved.solver.deterministic_time), 1e-3)


def _learn(incumbent: Incumbent, problem: Problem, solved: Solved, x: Variables, steps: Steps) -> None:
    """Takes the answer and the bound of a search in coarse steps."""
    incumbent.bound = max(incumbent.bound, min(steps.proven(solved), steps.target + 1))
    if solved.is_found:
        picks = _picks(solved, problem, x)
        starts = {task.name: solved.solver.value(x.times.start[task.name]) for task in problem.tasks}
        options = tuple(call.options[index] for call, index in zip(problem.calls, picks, strict=True))
        incumbent.offer(options, solved.solver.value(x.times.makespan), starts)
        incumbent.descend_from(Greedy(problem), picks)


def _picks(solved: Solved, problem: Problem, x: Variables) -> Picks:
    return tuple(
        next(i for i in range(len(call.options)) if solved.solver.value(x.pick[call.name, i])) for call in problem.calls
    )
