"""A greedy score is that of a schedule that breaks no rule, and no better change is missed."""

from __future__ import annotations

from itertools import product

from benchmarks.search.brute_force import best_makespan
from meshwright.planner.solver.greedy_schedule import Greedy
from meshwright.planner.solver.problem import Problem, earliest_ends
from tests.planner.problems import every_choice, only, random_problem
from tests.seeds import seeds


def asked(seed: int) -> Problem:
    return random_problem(seed, num_ranks=4, num_calls=4, num_options=3)


@seeds(4, all=24)
def test_no_change_of_two_calls_is_better_than_the_best_one(seed: int) -> None:
    problem = asked(seed)
    greedy, picks = Greedy(problem), tuple(0 for _ in problem.calls)
    best, near = greedy.score(picks), [range(len(problem.calls[call].options)) for call in (0, 2)]
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
        options = dict(zip((call.name for call in problem.calls), greedy.picked(picks), strict=True))
        score, starts = greedy.score(picks), greedy.timed_period(picks).starts
        position = {name: index for index, name in enumerate(problem.order)}
        order = sorted(starts, key=lambda name: (starts[name], position[name]))
        ends = earliest_ends(problem, options, order)
        assert {
            name: end - problem.duration(task, options)
            for name, end in ends.items()
            for task in problem.tasks
            if task.name == name
        } == starts
        assert max(ends.values()) == score.makespan
        best = best_makespan(only(problem, picks))
        assert best is None or best <= score.makespan


@seeds(4, all=24)
def test_what_is_above_the_device_is_counted_over_all_atoms(seed: int) -> None:
    problem = asked(seed)
    greedy = Greedy(problem)
    for picks in list(every_choice(problem))[::9]:
        options = dict(zip((call.name for call in problem.calls), greedy.picked(picks), strict=True))
        above = [max(0, blocks - problem.device_units) for blocks in problem.memory(options)]
        assert greedy.score(picks).excess_units == sum(above)


def test_options_and_their_indices_are_the_same_choice() -> None:
    greedy = Greedy(asked(3))
    for picks in every_choice(asked(3)):
        assert greedy.score(greedy.indices(greedy.picked(picks))) == greedy.score(picks)
