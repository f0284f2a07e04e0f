"""What a choice of options promises is never above what a schedule of it takes."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from benchmarks.search.brute_force import best_makespan
from meshwright.planner.solver.greedy import WORST, Greedy
from meshwright.planner.solver.problem import CallOptions, CallRun, Option, Place, Precedence, Problem, Transfer
from meshwright.planner.solver.prospects import Prospects
from tests.planner.problems import random_problem

SEEDS = range(24)


def asked(seed: int) -> Problem:
    return random_problem(seed, num_ranks=4, num_calls=4, num_options=3)


def promised(problem: Problem, rows: list[tuple[int, ...]]) -> list[float]:
    names = [call.name for call in problem.calls]
    owners = [[names.index(owner) for owner in problem.owners(name)] for name in names]
    found: list[float] = Prospects(problem, owners).makespans(np.array(rows)).tolist()
    return found


def only(problem: Problem, picks: tuple[int, ...]) -> Problem:
    return problem.with_calls(
        tuple(CallOptions(c.name, (c.options[index],)) for c, index in zip(problem.calls, picks, strict=True))
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_no_order_of_the_tasks_ends_before_it_is_promised(seed: int) -> None:
    problem = asked(seed)
    rows = list(product(*(range(len(call.options)) for call in problem.calls)))[::7]
    for picks, makespan in zip(rows, promised(problem, rows), strict=True):
        best = best_makespan(only(problem, picks))
        assert best is None or makespan <= best


@pytest.mark.parametrize("seed", SEEDS)
def test_a_change_that_is_better_is_among_the_promising(seed: int) -> None:
    problem = asked(seed)
    greedy, picks = Greedy(problem), tuple(0 for _ in problem.calls)
    best, near = greedy.score(picks), [range(len(problem.calls[call].options)) for call in (0, 2)]
    promising = greedy.promising(picks, (0, 2), near, best)
    for one, other in product(*near):
        changed = (one, picks[1], other, *picks[3:])
        score = greedy.score(changed)
        assert score >= best or changed in promising
        assert greedy.score(changed, best) in (score, WORST)
        assert score >= best or greedy.score(changed, best) == score


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


def test_runs_of_one_call_and_equal_moves_last_alike() -> None:
    def move(name: str, ticks: int) -> Transfer:
        return Transfer(name=name, source="a", target="b", occupies="both", ticks={("P", "Q", 0): ticks})

    calls = tuple(CallOptions(name, (Option(place=Place(0, 1, "P"), ticks=1),)) for name in "ab")
    tasks = (
        CallRun(name="a0", call="a"),
        CallRun(name="b0", call="b"),
        CallRun(name="a1", call="a"),
        move("m", 4),
        move("n", 4),
    )
    problem = Problem(num_ranks=1, device_blocks=1, calls=calls, tasks=(*tasks, move("o", 5)))
    assert problem.lasts_like == {"a0": "a0", "b0": "b0", "a1": "a0", "m": "m", "n": "m", "o": "o"}
