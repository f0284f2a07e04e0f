"""A greedy score is that of a schedule that breaks no rule, and no promise of a change is missed."""

from __future__ import annotations

from itertools import product

import pytest

from benchmarks.search.brute_force import best_makespan
from meshwright.planner.solver.greedy import WORST, Greedy
from meshwright.planner.solver.problem import Problem, ends_of
from tests.planner.problems import every_choice, only, random_problem

SEEDS = range(24)


def asked(seed: int) -> Problem:
    return random_problem(seed, num_ranks=4, num_calls=4, num_options=3)


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


@pytest.mark.parametrize("seed", SEEDS)
def test_a_score_is_the_makespan_of_its_schedule_and_never_below_the_best(seed: int) -> None:
    problem = asked(seed)
    greedy = Greedy(problem)
    for picks in list(every_choice(problem))[::9]:
        options = dict(zip((call.name for call in problem.calls), greedy.picked(picks), strict=True))
        score, starts = greedy.score(picks), greedy.starts(picks)
        position = {name: index for index, name in enumerate(problem.order)}
        order = sorted(starts, key=lambda name: (starts[name], position[name]))
        ends = ends_of(problem, options, order)
        assert {
            name: end - problem.duration(task, options)
            for name, end in ends.items()
            for task in problem.tasks
            if task.name == name
        } == starts
        assert max(ends.values()) == score.makespan
        best = best_makespan(only(problem, picks))
        assert best is None or best <= score.makespan


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_above_the_device_is_counted_over_all_atoms(seed: int) -> None:
    problem = asked(seed)
    greedy = Greedy(problem)
    for picks in list(every_choice(problem))[::9]:
        options = dict(zip((call.name for call in problem.calls), greedy.picked(picks), strict=True))
        above = [max(0, blocks - problem.device_blocks) for blocks in problem.memory(options)]
        assert greedy.score(picks).excess_blocks == sum(above)


def test_options_and_their_indices_are_the_same_choice() -> None:
    greedy = Greedy(asked(3))
    for picks in every_choice(asked(3)):
        assert greedy.score(greedy.indices(greedy.picked(picks))) == greedy.score(picks)
