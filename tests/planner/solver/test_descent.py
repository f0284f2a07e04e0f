"""A descent ends where no change of one task, or of two, is better."""

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
    problem = random_problem(seed, num_ranks=4, num_tasks=4, num_modes=3)
    draw = random.Random(seed)
    return Greedy(problem), tuple(draw.randrange(len(task.modes)) for task in problem.tasks)


@seeds(4, all=16)
def test_no_other_mode_of_a_single_task_is_better(seed: int) -> None:
    greedy, picks = begun(seed)
    found, score = descend(greedy, picks, greedy.score(picks))
    assert score == greedy.score(found) <= greedy.score(picks)
    for task, modes in enumerate(greedy.modes):
        for index in range(len(modes)):
            assert greedy.score((*found[:task], index, *found[task + 1 :])) >= score


@seeds(4, all=16)
def test_no_other_modes_of_two_tasks_are_better(seed: int) -> None:
    greedy, picks = begun(seed)
    near = [range(len(modes)) for modes in greedy.modes]
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
    near = [range(len(modes)) for modes in greedy.modes]
    with pytest.raises(OutOfTimeError):
        descend_in_pairs(greedy, picks, greedy.score(picks), near, Limits(stop=stop))
