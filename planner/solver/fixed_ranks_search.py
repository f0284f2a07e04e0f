"""The search if every mode has fixed ranks, with a proof of its lower bound.

A descent is a local search from one choice of modes (`planner.solver.local_search`); a kick is a random change of the
choice from which the next descent starts.

    problem    = the modes that can meet the requested makespan
    incumbent  = the best of several descents, from fixed and from seeded starts
    problem    = the modes that can beat the incumbent; choices that the relaxation suggests start descents, and
                 while many modes are left, random kicks do, until they no longer improve the answer
    repeat
        incumbent  = what CP-SAT finds in coarse steps of the makespan, improved by a descent
        bound      = what CP-SAT proved
        problem    = the modes that can beat the incumbent, by the known bounds
    until the bound meets the incumbent, or the limit is reached

Steps of the makespan are coarse at first because CP-SAT otherwise improves an answer one tick at a time. Everything is
deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from meshwright.planner.solver.coarse_problem import without_dominated
from meshwright.planner.solver.cp_sat import (
    Solved,
    Steps,
    fixed_ranks_makespan_model,
    fixed_ranks_memory_model,
    run_cp_sat,
)
from meshwright.planner.solver.fixed_ranks_model import Variables
from meshwright.planner.solver.greedy_schedule import Greedy, Neighbours, Picks
from meshwright.planner.solver.linear_relaxation import Relaxation, RelaxationOptimum
from meshwright.planner.solver.local_search import Incumbent
from meshwright.planner.solver.lower_bounds import least_makespan, modes_within
from meshwright.planner.solver.problem import Mode, Problem, Task
from meshwright.planner.solver.result import Effort, Limits, OutOfTimeError, Progress, Result

Suggest = Callable[[Greedy, Picks, Neighbours | None], int]
"""A function that takes a choice worth trying, and returns the makespan that answers have to meet from now on.

The rounded answer of the relaxation comes with the modes near it; other choices come with None.
"""

_NUM_NEAR = 40
"""Number of modes per task that count as near the relaxation's answer: those with the least reduced cost."""


@dataclass(frozen=True)
class Reduced:
    """The problem without the modes that are in no answer within the requested makespan, and a lower bound.

    Every answer takes at least `bound` ticks or more than the requested makespan.
    `bounds` has for each task and remaining mode a lower bound on the makespan of every answer with the mode.
    """

    problem: Problem
    bound: int
    bounds: Mapping[str, Mapping[Mode, int]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return any(not task.modes for task in self.problem.tasks)

    def within(self, makespan: int) -> Reduced:
        """Return what is left for a shorter makespan, by the known bounds."""
        tasks = tuple(
            Task(task.name, tuple(o for o in task.modes if self.bounds[task.name][o] <= makespan))
            for task in self.problem.tasks
        )
        return replace(self, problem=modes_within(self.problem.with_tasks(tasks), makespan))


def reduced(problem: Problem, makespan: int, suggest: Suggest) -> Reduced:
    """Return the problem without modes that are in no answer within `makespan` or what `suggest` lowers it to."""
    problem = modes_within(problem, makespan)
    if any(not task.modes for task in problem.tasks):
        return _no_answer(problem, makespan)
    model, x = fixed_ranks_makespan_model(problem)
    relaxation = Relaxation(model, x.times.makespan)
    relaxed = relaxation.solve(makespan)
    if relaxed is None:
        return _no_answer(problem, makespan)
    greedy = Greedy(problem)
    pass_ = _Pass(problem, x, relaxation, greedy, suggest, makespan)
    pass_.makespan = suggest(greedy, rounded(problem, x, relaxed), _near(problem, x, relaxed))
    bounds: dict[str, dict[Mode, int]] = {}
    for task in sorted(problem.tasks, key=_least_work, reverse=True):
        bounds[task.name] = pass_.bounds(task, relaxed)
        if not bounds[task.name]:
            return _no_answer(problem, pass_.makespan)
    kept = problem.with_tasks(tuple(Task(task.name, tuple(bounds[task.name])) for task in problem.tasks))
    return Reduced(kept, relaxed.bound, bounds).within(pass_.makespan)


def _least_work(task: Task) -> int:
    """Return ticks x ranks of the smallest mode, which orders the tasks.

    Tasks with much work come first: for them the relaxation distinguishes the pools best, and its suggestions improve
    the answer most.
    """
    return min(mode.ticks * mode.resource.num_ranks for mode in task.modes)


def _no_answer(problem: Problem, makespan: int) -> Reduced:
    """Return the reduction that proves that no answer ends by the makespan."""
    return Reduced(problem.with_tasks(tuple(Task(task.name, ()) for task in problem.tasks)), makespan + 1)


def rounded(problem: Problem, x: Variables, relaxed: RelaxationOptimum) -> Picks:
    """Return for each task the mode with the largest value in the relaxation's answer."""

    def largest(task: Task) -> int:
        return max(range(len(task.modes)), key=lambda index: relaxed.values[x.pick[task.name, index].index])

    return tuple(largest(task) for task in problem.tasks)


def _near(problem: Problem, x: Variables, relaxed: RelaxationOptimum) -> Neighbours:
    def nearest(task: Task) -> list[int]:
        cost = [relaxed.reduced_costs[x.pick[task.name, index].index] for index in range(len(task.modes))]
        return sorted(range(len(task.modes)), key=cost.__getitem__)[:_NUM_NEAR]

    return [nearest(task) for task in problem.tasks]


@dataclass
class _Pass:
    """One pass over the tasks; `makespan` falls as suggestions improve the answer."""

    problem: Problem
    x: Variables
    relaxation: Relaxation
    greedy: Greedy
    suggest: Suggest
    makespan: int

    def bounds(self, task: Task, relaxed: RelaxationOptimum) -> dict[Mode, int]:
        """Return the modes of a task that survive, tested one by one and then with the task fixed to each pool."""
        variables = [self.x.pick[task.name, index].index for index in range(len(task.modes))]
        pools: dict[range, list[int]] = {}
        for index, mode in enumerate(task.modes):
            if relaxed.bound_with(variables[index]) <= self.makespan:
                pools.setdefault(mode.resource.ranks, []).append(index)
        bounds: dict[int, int] = {}
        for indices in pools.values():
            group = [variables[index] for index in indices]
            on_pool = self.relaxation.solve_with_one_of(group, variables, self.makespan)
            if on_pool is not None:
                for index in indices:
                    bound = max(relaxed.bound_with(variables[index]), on_pool.bound_with(variables[index]))
                    if bound <= self.makespan:
                        bounds[index] = bound
                self.makespan = self.suggest(self.greedy, rounded(self.problem, self.x, on_pool), None)
        for index in range(len(task.modes)):
            if index not in bounds:
                self.relaxation.forbid(variables[index])
        return {task.modes[index]: bounds[index] for index in sorted(bounds)}


_STEPS = 16
"""Number of steps into which the distance between the bound and the incumbent is divided for CP-SAT."""

_MANY_MODES = 700
"""Number of modes beyond which kicks are worth their time; see `rank_range_search.py`."""


def search(problem: Problem, limits: Limits, progress: Progress, effort: Effort | None = None) -> Result:
    """Return the best answer within the limits and the proven lower bound; every task must have modes.

    The work is added to `effort`.
    """
    effort = effort or Effort()
    incumbent, remaining = Incumbent(problem, progress, limits), without_dominated(problem)
    if any(not task.modes for task in remaining.tasks):
        return Result(status="infeasible", answer=None, objective=None, bound=0)
    if limits.max_makespan is not None:
        remaining = modes_within(remaining, limits.max_makespan)
        if any(not task.modes for task in remaining.tasks):
            return Result.beaten(limits.max_makespan)
    try:
        incumbent.start(remaining, limits)
        if incumbent.makespan is None:
            no_answer = _start_from_least_memory(incumbent, limits, effort)
            if no_answer is not None:
                return no_answer
        _prove(incumbent, remaining, limits, effort)
    except OutOfTimeError:
        pass
    assert incumbent.makespan is not None
    if limits.max_makespan is not None and incumbent.makespan > limits.max_makespan:
        return _no_answer_within(limits.max_makespan, incumbent.bound)
    if limits.seconds_left > 0:
        incumbent.polish()
    return incumbent.result()


def first_answer(problem: Problem, limits: Limits) -> Result | None:
    """Return the best answer of a few descents, or None if none of them fits in memory."""
    incumbent, remaining = Incumbent(problem, lambda _makespan, _bound: None, limits), without_dominated(problem)
    if any(not task.modes for task in remaining.tasks):
        return None
    with suppress(OutOfTimeError):
        incumbent.start(remaining, limits)
    if incumbent.makespan is None:
        return None
    incumbent.bound = least_makespan(remaining)
    return incumbent.result()


def _prove(incumbent: Incumbent, remaining: Problem, limits: Limits, effort: Effort) -> None:
    """Improve the incumbent and its bound until they meet, or the limit is reached."""
    reduction = _reduced(incumbent, remaining, limits)
    while not reduction.is_empty and _has_many_modes(reduction.problem) and incumbent.kick(reduction.problem):
        reduction = _reduced(incumbent, reduction.within(incumbent.target).problem, limits)
    time_left = limits.max_deterministic_time
    while time_left > 0 and limits.seconds_left > 0 and incumbent.bound <= incumbent.target:
        time_left -= _improve(incumbent, reduction.problem, replace(limits, max_deterministic_time=time_left), effort)
        incumbent.progress(incumbent.makespan, incumbent.bound)
        reduction = reduction.within(incumbent.target)
        if reduction.is_empty:
            incumbent.bound = max(incumbent.bound, incumbent.target + 1)


def _has_many_modes(problem: Problem) -> bool:
    """True if so many modes are left that CP-SAT takes longer than descents that may reduce them."""
    return sum(len(task.modes) for task in problem.tasks) > _MANY_MODES


def _no_answer_within(max_makespan: int, bound: int) -> Result:
    """Return the result if no answer is as short as requested, or none was found in time."""
    if bound > max_makespan:
        return Result.beaten(max_makespan)
    return Result(status="out_of_limit", answer=None, objective=None, bound=bound)


def _start_from_least_memory(incumbent: Incumbent, limits: Limits, effort: Effort) -> Result | None:
    """Descend from the choice that needs the least memory; return a result only if there is no such choice."""
    problem = incumbent.problem
    model, x, device = fixed_ranks_memory_model(problem)
    solved = run_cp_sat(model, limits, effort=effort)
    if solved.is_found and solved.solver.value(device) <= problem.device_units:
        incumbent.descend_from(Greedy(problem), _picks(solved, problem, x))
        return None
    is_proven = solved.is_proven or solved.solver.best_objective_bound > problem.device_units
    return Result(status="infeasible" if is_proven else "out_of_limit", answer=None, objective=None, bound=0)


def _reduced(incumbent: Incumbent, problem: Problem, limits: Limits) -> Reduced:
    """Return the problem without excluded modes, and descend from the choices that the relaxation suggests."""

    def suggest(greedy: Greedy, picks: Picks, near: Neighbours | None) -> int:
        limits.require_time()
        incumbent.try_suggestion(greedy, picks, near)
        return incumbent.target

    reduction = reduced(problem, incumbent.target, suggest)
    incumbent.bound = incumbent.target + 1 if reduction.is_empty else min(reduction.bound, incumbent.target + 1)
    return reduction


def _improve(incumbent: Incumbent, problem: Problem, limits: Limits, effort: Effort) -> float:
    """Search the remaining modes with CP-SAT once; return the deterministic time spent."""
    steps = Steps.between(incumbent.bound, incumbent.target, _STEPS)
    model, x = fixed_ranks_makespan_model(problem)
    steps.minimise(model, x.times.makespan)
    solved = run_cp_sat(model, limits, effort=effort)
    _record(incumbent, problem, solved, x, steps)
    return max(float(solved.solver.deterministic_time), 1e-3)


def _record(incumbent: Incumbent, problem: Problem, solved: Solved, x: Variables, steps: Steps) -> None:
    """Record the answer and the bound of a search in coarse steps."""
    incumbent.bound = max(incumbent.bound, min(steps.proven(solved), steps.target + 1))
    if solved.is_found:
        picks = _picks(solved, problem, x)
        starts = {activity.name: solved.solver.value(x.times.start[activity.name]) for activity in problem.activities}
        modes = tuple(task.modes[index] for task, index in zip(problem.tasks, picks, strict=True))
        incumbent.offer(modes, solved.solver.value(x.times.makespan), starts)
        incumbent.descend_from(Greedy(problem), picks)


def _picks(solved: Solved, problem: Problem, x: Variables) -> Picks:
    return tuple(
        next(i for i in range(len(task.modes)) if solved.solver.value(x.pick[task.name, i])) for task in problem.tasks
    )
