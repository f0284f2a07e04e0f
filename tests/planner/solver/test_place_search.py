"""The search for modes on their own ranks finds and proves what trying everything finds."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.search.brute_force import best_makespan
from meshwright.planner.solver.fixed_ranks_search import search
from meshwright.planner.solver.problem import Problem
from meshwright.planner.solver.result import Limits
from tests.planner.problems import random_problem
from tests.seeds import seeds


def silence(_makespan: int | None, _bound: int) -> None:
    pass


def asked(seed: int) -> Problem:
    return random_problem(seed, num_ranks=4, num_tasks=4, num_modes=4)


@seeds(4, all=24)
def test_the_best_is_found_and_proven(seed: int) -> None:
    result, best = search(asked(seed), Limits(), silence), best_makespan(asked(seed))
    assert result.objective == best
    assert result.status == ("infeasible" if best is None else "optimal")


@seeds(2, all=8)
def test_a_bound_holds_whatever_the_time(seed: int) -> None:
    best = best_makespan(asked(seed))
    short = search(asked(seed), Limits(max_deterministic_time=1e-9), silence)
    assert best is None or short.bound <= best <= (short.objective or best)


def test_a_device_that_holds_nothing_is_infeasible() -> None:
    """Each task alone fits into four blocks, and not all of them on one rank."""
    crowded = random_problem(5, num_ranks=1, num_tasks=6, num_modes=2)
    small = replace(crowded, device_units=9)
    assert best_makespan(small) is None
    assert search(small, Limits(), silence).status == "infeasible"
