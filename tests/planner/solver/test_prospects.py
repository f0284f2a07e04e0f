"""What a choice of options promises is never above what a schedule of it takes."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.search.brute_force import best_makespan
from meshwright.planner.solver.problem import CallOptions, CallRun, Option, Place, Precedence, Problem, Transfer
from meshwright.planner.solver.prospects import Prospects
from tests.planner.problems import every_choice, only, random_problem

SEEDS = range(24)


def asked(seed: int) -> Problem:
    return random_problem(seed, num_ranks=4, num_calls=4, num_options=3)


def promised(problem: Problem, rows: list[tuple[int, ...]]) -> list[float]:
    names = [call.name for call in problem.calls]
    owners = [[names.index(owner) for owner in problem.owners(name)] for name in names]
    found: list[float] = Prospects(problem, owners).makespans(np.array(rows)).tolist()
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_no_order_of_the_tasks_ends_before_it_is_promised(seed: int) -> None:
    problem = asked(seed)
    rows = list(every_choice(problem))[::7]
    for picks, makespan in zip(rows, promised(problem, rows), strict=True):
        best = best_makespan(only(problem, picks))
        assert best is None or makespan <= best


def test_the_promise_counts_the_work_that_must_lie_between_two_tasks() -> None:
    """a (2 ticks), then b and c (3 each) on one rank, then the move of 4 that d (1) waits for: 2 + 3 + 3 + 4 + 1."""

    def call(name: str, ticks: int, layout: str = "P") -> CallOptions:
        return CallOptions(name, (Option(place=Place(0, 1, layout), ticks=ticks),))

    move = Transfer(name="move", source="a", target="d", occupies="both", ticks={("P", "Q", 1): 4})
    problem = Problem(
        num_ranks=1,
        device_blocks=1,
        calls=(call("a", 2), call("b", 3), call("c", 3), call("d", 1, "Q")),
        tasks=(*(CallRun(name=name, call=name) for name in "abcd"), move),
        precedences=(
            *(Precedence("a", name) for name in "bc"),
            *(Precedence(name, "move") for name in "bc"),
            Precedence("move", "d"),
        ),
    )
    assert promised(problem, [(0, 0, 0, 0)]) == [13]
