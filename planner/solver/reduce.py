"""Drops the options that no answer within a makespan can use, by bounds from arithmetic and from the linear relaxation.

The relaxation is solved once, and then with each call fixed to each of its pools in turn, calls with the most work
first, until some call has no option left. Each of these optima also suggests a choice to descend from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from meshwright.planner.solver.bounds import options_within
from meshwright.planner.solver.greedy import Greedy, Neighbours, Picks
from meshwright.planner.solver.place_model import fixed_ranks_makespan_model
from meshwright.planner.solver.problem import CallOptions, Option, Problem
from meshwright.planner.solver.relaxation import Relaxation, RelaxationOptimum
from meshwright.planner.solver.variables import Variables

Suggest = Callable[[Greedy, Picks, Neighbours | None], int]
"""Takes a choice worth trying, and returns the makespan that answers have to meet from now on.

The rounded answer of the relaxation comes with the options near it; other choices come with None.
"""

_NUM_NEAR = 40
"""Number of options per call that count as near the relaxation's answer: those with the least reduced cost."""


@dataclass(frozen=True)
class Reduced:
    """The remaining problem, and a lower bound on the makespan unless that exceeds the requested makespan.

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

    For a call with much work, the relaxation distinguishes the pools best and suggests most.
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
