"""A descent ends where no change of one task is better, whichever descents take turns with it."""

from __future__ import annotations

import random

import numpy as np

from meshwright.planner.solver.greedy_schedule import Array, Greedy
from meshwright.planner.solver.local_search import descend
from tests.planner.problems import random_problem
from tests.seeds import seeds


def begun(seed: int) -> tuple[Greedy, Array]:
    """Eight random choices."""
    problem = random_problem(seed, num_ranks=4, num_tasks=4, num_modes=3)
    rng = random.Random(seed)
    return Greedy(problem), np.array([[rng.randrange(len(task.modes)) for task in problem.tasks] for _ in range(8)])


@seeds(4, all=16)
def test_no_other_mode_of_a_single_task_is_better(seed: int) -> None:
    greedy, picks = begun(seed)
    found, scores = descend(greedy, picks.copy())
    for start, end, score in zip(picks.tolist(), found.tolist(), scores.tolist(), strict=True):
        assert tuple(score) == greedy.score(tuple(end)) <= greedy.score(tuple(start))
        for task, modes in enumerate(greedy.modes):
            for index in range(len(modes)):
                assert greedy.score((*end[:task], index, *end[task + 1 :])) >= tuple(score)


@seeds(4, all=16)
def test_descents_that_take_turns_end_where_each_ends_alone(seed: int) -> None:
    greedy, picks = begun(seed)
    together, _ = descend(greedy, picks.copy())
    assert [descend(greedy, row[np.newaxis].copy())[0][0].tolist() for row in picks] == together.tolist()
