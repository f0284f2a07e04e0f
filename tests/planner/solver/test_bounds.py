"""Arithmetic alone drops only options that no answer in time can use."""

from __future__ import annotations

from benchmarks.search.brute_force import best_makespan
from meshwright.planner.solver.lower_bounds import least_makespan, options_within
from meshwright.planner.solver.problem import CallOptions, CallRun, Option, Place, Precedence, Problem
from tests.planner.problems import everywhere, random_blocks, random_problem
from tests.seeds import seeds


def best(problem: Problem) -> float:
    found = best_makespan(everywhere(problem)) if all(call.options for call in problem.calls) else None
    return float("inf") if found is None else found


@seeds(4, all=20, failed=(9,))
def test_options_that_cannot_meet_a_makespan_are_in_no_answer_within_it(seed: int) -> None:
    problem = random_blocks(seed, num_ranks=4, num_calls=3, num_options=3)
    shortest = best(problem)
    if shortest < float("inf"):
        assert best(options_within(problem, int(shortest))) == shortest
        assert least_makespan(problem) <= shortest


@seeds(2, all=8)
def test_a_longer_makespan_never_leaves_fewer_options(seed: int) -> None:
    problem = random_problem(seed, num_ranks=4, num_calls=4, num_options=4)
    left = [sum(len(call.options) for call in options_within(problem, makespan).calls) for makespan in range(0, 60, 6)]
    assert left == sorted(left)
    assert options_within(problem, problem.horizon) == problem
    least = least_makespan(problem)
    assert any(not call.options for call in options_within(problem, least - 1).calls)


def test_work_that_must_lie_between_two_tasks_is_spread_over_all_ranks() -> None:
    """a and d take a tick; between them b and c take 6 ticks on 2 ranks each, of 2: 1 + 12 + 1."""

    def call(name: str, ticks: int) -> CallOptions:
        return CallOptions(name, (Option(place=Place(0, 2, "P"), ticks=ticks),))

    problem = Problem(
        num_ranks=2,
        device_units=1,
        calls=(call("a", 1), call("b", 6), call("c", 6), call("d", 1)),
        tasks=tuple(CallRun(name=name, call=name) for name in "abcd"),
        precedences=(*(Precedence("a", name) for name in "bc"), *(Precedence(name, "d") for name in "bc")),
    )
    assert least_makespan(problem) == 14
