"""Ranks cross where they have some in common while each has others; every pair of tasks is counted."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from meshwright.planner.solver.rank_ranges import Crossing
from tests.planner.problems import every_choice, everywhere, random_blocks


@pytest.mark.parametrize(("num_ranks", "step"), [(8, 0), (6, 2), (5, 1)])
def test_the_pairs_of_tasks_that_cross_are_counted(num_ranks: int, step: int) -> None:
    problem = everywhere(random_blocks(4, num_ranks=num_ranks, num_tasks=3, num_modes=4, step=step))
    rows = list(every_choice(problem))

    def crossing(picks: tuple[int, ...]) -> int:
        ranks = [set(task.modes[index].resource.ranks) for task, index in zip(problem.tasks, picks, strict=True)]
        return sum(bool(a & b) and not a <= b and not b <= a for a, b in combinations(ranks, 2))

    counted = Crossing(problem).count(list(np.array(rows).T)).tolist()
    assert counted == [crossing(picks) for picks in rows]
    assert any(counted) == (step > 0)
