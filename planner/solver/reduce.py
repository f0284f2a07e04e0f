"""Drops the options that no answer within a makespan can use, by bounds from arithmetic and from the relaxation."""

from __future__ import annotations

from meshwright.planner.solver.bounds import within
from meshwright.planner.solver.model import makespan_model
from meshwright.planner.solver.problem import Call, Problem
from meshwright.planner.solver.relaxation import Relaxation, Relaxed
from meshwright.planner.solver.variables import Variables

_WORTHWHILE = 0.9
"""Another round pays when the last one left less than this share of the options."""


def reduced(problem: Problem, makespan: int) -> Problem:
    """The problem without options that are in no answer that ends by `makespan`; a call may be left with none."""
    while True:
        smaller = _reduced_by_relaxation(within(problem, makespan), makespan)
        if num_options(smaller) == 0 or num_options(smaller) > _WORTHWHILE * num_options(problem):
            return smaller
        problem = smaller


def num_options(problem: Problem) -> int:
    """The number of options of all calls, 0 when a call has none."""
    counts = [len(call.options) for call in problem.calls]
    return sum(counts) if all(counts) else 0


def _reduced_by_relaxation(problem: Problem, makespan: int) -> Problem:
    if not num_options(problem):
        return problem
    model, x = makespan_model(problem)
    relaxation = Relaxation(model, x.makespan)
    relaxed = relaxation.solve()
    return problem.with_calls(
        tuple(
            Call(call.name, tuple(o for i, o in enumerate(call.options) if i in kept))
            for call in problem.calls
            for kept in [_kept(relaxation, relaxed, call, x, makespan)]
        )
    )


def _kept(relaxation: Relaxation, relaxed: Relaxed | None, call: Call, x: Variables, makespan: int) -> set[int]:
    """The options of a call that survive: first one by one, then with the call fixed to each pool in turn."""
    if relaxed is None:
        return set()
    variables = [x.pick[call.name, index].index for index in range(len(call.options))]
    pools: dict[range, list[int]] = {}
    for index, option in enumerate(call.options):
        if relaxed.bound_with(variables[index]) <= makespan:
            pools.setdefault(option.place.ranks, []).append(index)
    kept: set[int] = set()
    for indices in pools.values():
        there = relaxation.solve_with_one_of([variables[index] for index in indices])
        if there is not None and there.bound <= makespan:
            kept.update(index for index in indices if there.bound_with(variables[index]) <= makespan)
    for index in set(range(len(call.options))) - kept:
        relaxation.forbid(variables[index])
    return kept
