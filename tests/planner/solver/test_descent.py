"""A descent ends where no change of one call, or of two, is better."""

from __future__ import annotations

import random
import threading
from itertools import combinations, product

import pytest

from meshwright.planner.solver.greedy_schedule import Greedy
from meshwright.planner.solver.local_search import descend, descend_in_pairs
from meshwright.planner.solver.result import Limits, OutOfTimeError
from tests.planner.problems import random_problem
from tests.seeds import seeds


def begun(seed: int) -> tuple[Greedy, tuple[int, ...]]:
    problem = random_problem(seed, num_ranks=4, num_calls=4, num_options=3)
    draw = random.Random(seed)
    return Greedy(problem), tuple(draw.randrange(len(call.options)) for call in problem.calls)


@seeds(4, all=16)
def test_no_other_option_of_a_single_call_is_better(seed: int) -> None:
    greedy, picks = begun(seed)
    found, score = descend(greedy, picks, greedy.score(picks))
    assert score == greedy.score(found) <= greedy.score(picks)
    for call, options in enumerate(greedy.options):
        for index in range(len(options)):
            assert greedy.score((*found[:call], index, *found[call + 1 :])) >= score


@seeds(4, all=16)
def test_no_other_options_of_two_calls_are_better(seed: int) -> None:
    greedy, picks = begun(seed)
    near = [range(len(options)) for options in greedy.options]
    found, score = descend_in_pairs(greedy, *descend(greedy, picks, greedy.score(picks)), near, Limits())
    assert score == greedy.score(found)
    for one, other in combinations(range(len(near)), 2):
        for here, there in product(near[one], near[other]):
            changed = list(found)
            changed[one], changed[other] = here, there
            assert greedy.score(changed) >= score


def test_a_descent_in_pairs_ends_with_the_time() -> None:
    stop = threading.Event()
    stop.set()
    greedy, picks = begun(1)
    near = [range(len(options)) for options in greedy.options]
    with pytest.raises(OutOfTimeError):
        descend_in_pairs(greedy, picks, greedy.score(picks), near, Limits(stop=stop))
