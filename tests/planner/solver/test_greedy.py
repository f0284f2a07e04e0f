"""A greedy score is that of a schedule that breaks no rule, and no better change is missed."""

from __future__ import annotations

import numpy as np

from benchmarks.search.brute_force import best_makespan
from meshwright.planner.solver.greedy_schedule import Greedy
from meshwright.planner.solver.problem import Problem, earliest_ends
from tests.planner.problems import every_choice, only, random_problem
from tests.seeds import seeds


def asked(seed: int) -> Problem:
    return random_problem(seed, num_ranks=4, num_tasks=4, num_modes=3)


@seeds(4, all=24)
def test_no_change_of_a_task_is_better_than_the_best_one(seed: int) -> None:
    """For all choices at once; of equally good changes the first is taken."""
    problem = asked(seed)
    greedy, picks = Greedy(problem), np.array(list(every_choice(problem)))[::5]
    for task, modes in enumerate(greedy.modes):
        changed, scores = greedy.best_changes(picks, greedy.scores(picks), task)
        for start, end, score in zip(picks.tolist(), changed.tolist(), scores.tolist(), strict=True):
            each = [greedy.score((*start[:task], index, *start[task + 1 :])) for index in range(len(modes))]
            assert tuple(score) == min(each)
            is_better = min(each) < greedy.score(tuple(start))
            assert end == [*start[:task], each.index(min(each)) if is_better else start[task], *start[task + 1 :]]


@seeds(4, all=24)
def test_a_score_is_the_makespan_of_its_schedule_and_never_below_the_best(seed: int) -> None:
    problem = asked(seed)
    greedy = Greedy(problem)
    for picks in list(every_choice(problem))[::9]:
        modes = dict(zip((task.name for task in problem.tasks), greedy.picked(picks), strict=True))
        score, starts = greedy.score(picks), greedy.timed_period(picks).starts
        position = {name: index for index, name in enumerate(problem.order)}
        order = sorted(starts, key=lambda name: (starts[name], position[name]))
        ends = earliest_ends(problem, modes, order)
        assert {
            name: end - problem.duration(activity, modes)
            for name, end in ends.items()
            for activity in problem.activities
            if activity.name == name
        } == starts
        assert max(ends.values()) == score.makespan
        best = best_makespan(only(problem, picks))
        assert best is None or best <= score.makespan


@seeds(4, all=24)
def test_what_is_above_the_device_is_counted_over_all_atoms(seed: int) -> None:
    problem = asked(seed)
    greedy = Greedy(problem)
    for picks in list(every_choice(problem))[::9]:
        modes = dict(zip((task.name for task in problem.tasks), greedy.picked(picks), strict=True))
        above = [max(0, blocks - problem.device_units) for blocks in problem.memory(modes)]
        assert greedy.score(picks).excess_units == sum(above)


def test_modes_and_their_indices_are_the_same_choice() -> None:
    greedy = Greedy(asked(3))
    for picks in every_choice(asked(3)):
        assert greedy.score(greedy.indices(greedy.picked(picks))) == greedy.score(picks)
