"""The search for the best answer to a problem, and its proof.

    incumbent  = the best of several descents, from fixed and from seeded starts
    repeat
        problem    = without the options that cannot beat the incumbent; what the relaxation suggests is descended from
        incumbent  = what CP-SAT finds in coarse steps of the makespan, descended from
        bound      = what CP-SAT proved
    until the bound meets the incumbent, or the limit is reached

Steps of the makespan are coarse at first because CP-SAT otherwise improves an answer one tick at a time. Everything is
deterministic.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from meshwright.planner.solver.greedy import Greedy, Near, Picks
from meshwright.planner.solver.incumbent import Incumbent
from meshwright.planner.solver.model import Solved, makespan_model, memory_model, run
from meshwright.planner.solver.problem import Problem
from meshwright.planner.solver.reduce import reduced
from meshwright.planner.solver.result import Limits, Progress, Result
from meshwright.planner.solver.variables import Variables

_STEPS = 16
"""Into how many steps CP-SAT cuts the distance between the bound and the incumbent."""


class _Scale(NamedTuple):
    """The makespan in coarse steps: within `below + step * steps`."""

    below: int
    step: int

    def bound(self, steps: int) -> int:
        """The bound on the makespan that follows from a bound on the steps."""
        return self.below + self.step * (steps - 1) + 1 if steps else 0


def solve(problem: Problem, limits: Limits, progress: Progress | None = None) -> Result:
    """The best answer within the limits, with the bound that was proven."""
    if any(not call.options for call in problem.calls):
        return Result(status="infeasible", answer=None, objective=None, bound=0)
    incumbent = Incumbent(problem, progress or _silence)
    incumbent.start(limits.seed)
    if incumbent.makespan is None:
        excluded = _start_from_least_memory(incumbent, limits)
        if excluded is not None:
            return excluded
    left = limits.max_deterministic_time
    remaining = problem
    while left > 0:
        remaining, spent = _improve(incumbent, remaining, replace(limits, max_deterministic_time=left))
        left -= spent
        if incumbent.bound == incumbent.makespan:
            break
    incumbent.polish()
    return incumbent.result()


def least_memory(problem: Problem, limits: Limits) -> int | None:
    """The least blocks a device can have so that some choice of options fits, whatever its duration.

    None when a call has no option. The limits may cut the search short; the answer is then still one that fits.
    """
    if any(not call.options for call in problem.calls):
        return None
    model, _, device = memory_model(problem)
    solved = run(model, limits)
    return solved.solver.value(device) if solved.is_found else None


def _start_from_least_memory(incumbent: Incumbent, limits: Limits) -> Result | None:
    """A descent from the choice that needs the least memory, or the result that there is none."""
    problem = incumbent.problem
    model, x, device = memory_model(problem)
    solved = run(model, limits)
    if solved.is_found and solved.solver.value(device) <= problem.device_blocks:
        incumbent.descend_from(Greedy(problem), _picks(solved, problem, x))
        return None
    is_proven = solved.is_proven or solved.solver.best_objective_bound > problem.device_blocks
    return Result(status="infeasible" if is_proven else "out_of_limit", answer=None, objective=None, bound=0)


def _improve(incumbent: Incumbent, problem: Problem, limits: Limits) -> tuple[Problem, float]:
    """One round of the search: what is left of the problem, and the deterministic time that was spent."""

    def suggest(greedy: Greedy, picks: Picks, near: Near | None) -> int:
        incumbent.consider(greedy, picks, near)
        assert incumbent.makespan is not None
        return incumbent.makespan - 1

    assert incumbent.makespan is not None
    left = reduced(problem, incumbent.makespan - 1, suggest)
    incumbent.bound = min(max(incumbent.bound, left.bound), incumbent.makespan)
    if left.is_empty:
        incumbent.bound = incumbent.makespan
        return left.problem, 0.0
    scale = _Scale(incumbent.bound, max(1, (incumbent.makespan - incumbent.bound) // _STEPS))
    model, x = makespan_model(left.problem)
    steps = model.new_int_var(0, 2 * _STEPS, "steps")
    model.add(x.makespan <= scale.below + scale.step * steps)
    model.add(x.makespan <= incumbent.makespan - 1)
    model.minimize(steps)
    solved = run(model, limits)
    _learn(incumbent, left.problem, solved, x, scale)
    return left.problem, max(solved.solver.deterministic_time, 1e-3)


def _learn(incumbent: Incumbent, problem: Problem, solved: Solved, x: Variables, scale: _Scale) -> None:
    """Takes the answer and the bound of a search in coarse steps."""
    assert incumbent.makespan is not None
    if not solved.is_found and solved.is_proven:
        incumbent.bound = incumbent.makespan
        return
    proven = scale.bound(round(solved.solver.best_objective_bound))
    incumbent.bound = max(incumbent.bound, min(proven, incumbent.makespan))
    if solved.is_found:
        picks = _picks(solved, problem, x)
        starts = {task.name: solved.solver.value(x.start[task.name]) for task in problem.tasks}
        options = tuple(call.options[index] for call, index in zip(problem.calls, picks, strict=True))
        incumbent.offer(options, solved.solver.value(x.makespan), starts)
        incumbent.descend_from(Greedy(problem), picks)


def _picks(solved: Solved, problem: Problem, x: Variables) -> Picks:
    return tuple(
        next(i for i in range(len(call.options)) if solved.solver.value(x.pick[call.name, i])) for call in problem.calls
    )


def _silence(_makespan: int, _bound: int) -> None:
    """For callers who do not ask for progress."""
