"""With work and memory spread over all ranks, every answer still has its place in the relaxation."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from benchmarks.search.brute_force import best_makespan
from meshwright.planner.solver.linear_relaxation import OptionMask, SpreadRelaxation
from meshwright.planner.solver.problem import CallOptions, CallRun, Option, Place, Problem
from tests.planner.problems import everywhere, only, random_blocks
from tests.seeds import seeds


def every(problem: Problem) -> OptionMask:
    return {call.name: np.ones(len(call.options), dtype=bool) for call in problem.calls}


@seeds(4, all=30)
def test_no_answer_ends_before_the_bound_of_any_of_its_options(seed: int) -> None:
    problem = random_blocks(seed, num_ranks=4, num_calls=3, num_options=3)
    bounds = SpreadRelaxation(problem).bounds(every(problem))
    for picks in product(*(range(len(call.options)) for call in problem.calls)):
        best = best_makespan(everywhere(only(problem, picks)))
        if best is not None:
            assert bounds is not None
            assert bounds.least <= best
            assert all(bounds.each[c.name][i] <= best for c, i in zip(problem.calls, picks, strict=True))


@seeds(3, all=10)
def test_options_that_were_left_out_come_back(seed: int) -> None:
    problem = random_blocks(seed, num_ranks=4, num_calls=3, num_options=4)
    again, once = SpreadRelaxation(problem), SpreadRelaxation(problem).bounds(every(problem))
    again.bounds({call.name: np.arange(len(call.options)) == 0 for call in problem.calls})
    found = again.bounds(every(problem))
    assert (found is None) == (once is None)
    if found and once:
        assert found.least == once.least


def test_memory_that_is_left_decides_how_fast_a_call_may_be() -> None:
    """Of 10 blocks a takes 8 on both ranks; b takes 2 ticks with 6 blocks, or 9 with none: a mix of a third and two
    thirds would fit."""
    a = CallOptions("a", (Option(place=Place(0, 2, "P"), ticks=5, resident_units=8),))
    fast = Option(place=Place(0, 2, "P"), ticks=2, resident_units=6)
    slow = Option(place=Place(0, 2, "P"), ticks=9)
    problem = Problem(
        num_ranks=2,
        device_units=10,
        calls=(a, CallOptions("b", (fast, slow))),
        tasks=tuple(CallRun(name=name, call=name) for name in "ab"),
    )
    bounds = SpreadRelaxation(problem).bounds(every(problem))
    assert bounds is not None
    assert bounds.least == pytest.approx(5 + 2 / 3 * 9 + 1 / 3 * 2, abs=1)
    assert SpreadRelaxation(problem).bounds({"a": np.array([True]), "b": np.array([False, False])}) is None
