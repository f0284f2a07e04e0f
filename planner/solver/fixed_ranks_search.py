"""The search if every option has fixed ranks, with a proof of its lower bound.

A descent is a local search from one choice of options (`planner.solver.local_search`); a kick is a random change of the
choice from which the next descent starts.

    problem    = the options that can meet the requested makespan
    incumbent  = the best of several descents, from fixed and from seeded starts
    problem    = the options that can beat the incumbent; choices that the relaxation suggests start descents, and
                 while many options are left, random kicks do, until they no longer improve the answer
    repeat
        incumbent  = what CP-SAT finds in coarse steps of the makespan, improved by a descent
        bound      = what CP-SAT proved
        problem    = the options that can beat the incumbent, by the known bounds
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
from meshwright.planner.solver.lower_bounds import least_makespan, options_within
from meshwright.planner.solver.problem import CallOptions, Option, Problem
from meshwright.planner.solver.result import Effort, Limits, OutOfTimeError, Progress, Result

Suggest = Callable[[Greedy, Picks, Neighbours | None], int]
"""A function that takes a choice worth trying, and returns the makespan that answers have to meet from now on.

The rounded answer of the relaxation comes with the options near it; other choices come with None.
"""

_NUM_NEAR = 40
"""Number of options per call that count as near the relaxation's answer: those with the least reduced cost."""


@dataclass(frozen=True)
class Reduced:
    """The problem without the options that are in no answer within the requested makespan, and a lower bound.

    Every answer takes at least `bound` ticks or more than the requested makespan.
    `bounds` has for each call and remaining option a lower bound on the makespan of every answer with the option.
    """

    problem: Problem
    bound: int
    bounds: Mapping[str, Mapping[Option, int]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return any(not call.options for call in self.problem.calls)

    def within(self, makespan: int) -> Reduced:
        """Return what is left for a shorter makespan, by the known bounds."""
        calls = tuple(
            CallOptions(call.name, tuple(o for o in call.options if self.bounds[call.name][o] <= makespan))
            for call in self.problem.calls
        )
        return replace(self, problem=options_within(self.problem.with_calls(calls), makespan))


def reduced(problem: Problem, makespan: int, suggest: Suggest) -> Reduced:
    """Return the problem without options that are in no answer within `makespan` or what `suggest` lowers it to."""
    problem = options_within(problem, makespan)
    if any(not call.options for call in problem.calls):
        return _no_answer(problem, makespan)
    model, x = fixed_ranks_makespan_model(problem)
    relaxation = Relaxation(model, x.times.makespan)
    relaxed = relaxation.solve(makespan)
    if relaxed is None:
        return _no_answer(problem, makespan)
    greedy = Greedy(problem)
    pass_ = _Pass(problem, x, relaxation, greedy, suggest, makespan)
    pass_.makespan = suggest(greedy, rounded(problem, x, relaxed), _near(problem, x, relaxed))
    bounds: dict[str, dict[Option, int]] = {}
    for call in sorted(problem.calls, key=_least_work, reverse=True):
        bounds[call.name] = pass_.bounds(call, relaxed)
        if not bounds[call.name]:
            return _no_answer(problem, pass_.makespan)
    kept = problem.with_calls(tuple(CallOptions(call.name, tuple(bounds[call.name])) for call in problem.calls))
    return Reduced(kept, relaxed.bound, bounds).within(pass_.makespan)


def _least_work(call: CallOptions) -> int:
    """Return ticks x ranks of the smallest option, which orders the calls.

    Calls with much work come first: for them the relaxation distinguishes the pools best, and its suggestions improve
    the answer most.
    """
    return min(option.ticks * option.place.num_ranks for option in call.options)


def _no_answer(problem: Problem, makespan: int) -> Reduced:
    """Return the reduction that proves that no answer ends by the makespan."""
    return Reduced(problem.with_calls(tuple(CallOptions(call.name, ()) for call in problem.calls)), makespan + 1)


def rounded(problem: Problem, x: Variables, relaxed: RelaxationOptimum) -> Picks:
    """Return for each call the option with the largest value in the relaxation's answer."""

    def largest(call: CallOptions) -> int:
        return max(range(len(call.options)), key=lambda index: relaxed.values[x.pick[call.name, index].index])

    return tuple(largest(call) for call in problem.calls)


def _near(problem: Problem, x: Variables, relaxed: RelaxationOptimum) -> Neighbours:
    def nearest(call: CallOptions) -> list[int]:
        cost = [relaxed.reduced_costs[x.pick[call.name, index].index] for index in range(len(call.options))]
        return sorted(range(len(call.options)), key=cost.__getitem__)[:_NUM_NEAR]

    return [nearest(call) for call in problem.calls]


@dataclass
class _Pass:
    """One pass over the calls; `makespan` falls as suggestions improve the answer."""

    problem: Problem
    x: Variables
    relaxation: Relaxation
    greedy: Greedy
    suggest: Suggest
    makespan: int

    def bounds(self, call: CallOptions, relaxed: RelaxationOptimum) -> dict[Option, int]:
        """Return the options of a call that survive, tested one by one and then with the call fixed to each pool."""
        variables = [self.x.pick[call.name, index].index for index in range(len(call.options))]
        pools: dict[range, list[int]] = {}
        for index, option in enumerate(call.options):
            if relaxed.bound_with(variables[index]) <= self.makespan:
                pools.setdefault(option.place.ranks, []).append(index)
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
        for index in range(len(call.options)):
            if index not in bounds:
                self.relaxation.forbid(variables[index])
        return {call.options[index]: bounds[index] for index in sorted(bounds)}


_STEPS = 16
"""Number of steps into which the distance between the bound and the incumbent is divided for CP-SAT."""

_MANY_OPTIONS = 700
"""Number of options beyond which kicks are worth their time; see `rank_range_search.py`."""


def search(problem: Problem, limits: Limits, progress: Progress, effort: Effort | None = None) -> Result:
    """Return the best answer within the limits and the proven lower bound; every call must have options.

    The work is added to `effort`.
    """
    effort = effort or Effort()
    incumbent, remaining = Incumbent(problem, progress, limits), without_dominated(problem)
    if any(not call.options for call in remaining.calls):
        return Result(status="infeasible", answer=None, objective=None, bound=0)
    if limits.max_makespan is not None:
        remaining = options_within(remaining, limits.max_makespan)
        if any(not call.options for call in remaining.calls):
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
    if any(not call.options for call in remaining.calls):
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
    while not reduction.is_empty and _has_many_options(reduction.problem) and incumbent.kick(reduction.problem):
        reduction = _reduced(incumbent, reduction.within(incumbent.target).problem, limits)
    time_left = limits.max_deterministic_time
    while time_left > 0 and limits.seconds_left > 0 and incumbent.bound <= incumbent.target:
        time_left -= _improve(incumbent, reduction.problem, replace(limits, max_deterministic_time=time_left), effort)
        incumbent.progress(incumbent.makespan, incumbent.bound)
        reduction = reduction.within(incumbent.target)
        if reduction.is_empty:
            incumbent.bound = max(incumbent.bound, incumbent.target + 1)


def _has_many_options(problem: Problem) -> bool:
    """True if so many options are left that CP-SAT takes longer than descents that may reduce them."""
    return sum(len(call.options) for call in problem.calls) > _MANY_OPTIONS


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
    """Return the problem without excluded options, and descend from the choices that the relaxation suggests."""

    def suggest(greedy: Greedy, picks: Picks, near: Neighbours | None) -> int:
        limits.require_time()
        incumbent.try_suggestion(greedy, picks, near)
        return incumbent.target

    reduction = reduced(problem, incumbent.target, suggest)
    incumbent.bound = incumbent.target + 1 if reduction.is_empty else min(reduction.bound, incumbent.target + 1)
    return reduction


def _improve(incumbent: Incumbent, problem: Problem, limits: Limits, effort: Effort) -> float:
    """Search the remaining options with CP-SAT once; return the deterministic time spent."""
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
        starts = {task.name: solved.solver.value(x.times.start[task.name]) for task in problem.tasks}
        options = tuple(call.options[index] for call, index in zip(problem.calls, picks, strict=True))
        incumbent.offer(options, solved.solver.value(x.times.makespan), starts)
        incumbent.descend_from(Greedy(problem), picks)


def _picks(solved: Solved, problem: Problem, x: Variables) -> Picks:
    return tuple(
        next(i for i in range(len(call.options)) if solved.solver.value(x.pick[call.name, i])) for call in problem.calls
    )
