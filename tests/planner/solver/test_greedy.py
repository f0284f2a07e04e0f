"""A greedy score is that of a schedule that breaks no rule, and no better change is missed."""

from __future__ import annotations

from itertools import product

from benchmarks.search.brute_force import best_makespan
from meshwright.planner.solver.greedy_schedule import Greedy
from meshwright.planner.solver.problem import Problem, earliest_ends
from tests.planner.problems import every_choice, only, random_problem
from tests.seeds import seeds


def asked(seed: int) -> Problem:
    return random_problem(seed, num_ranks=4, num_tasks=4, num_modes=3)


@seeds(4, all=24)
def test_no_change_of_two_tasks_is_better_than_the_best_one(seed: int) -> None:
    problem = asked(seed)
    greedy, picks = Greedy(problem), tuple(0 for _ in problem.tasks)
    best, near = greedy.score(picks), [range(len(problem.tasks[task].modes)) for task in (0, 2)]
    changed, score = greedy.best_change(picks, best, (0, 2), near)
    assert score == greedy.score(changed) <= best
    assert changed == picks or score < best
    for one, other in product(*near):
        assert greedy.score((one, picks[1], other, *picks[3:])) >= score


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
