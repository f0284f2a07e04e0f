"""Descents find better and better schedules, which last as long as they say."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from benchmarks.search.brute_force import best_makespan
from meshwright.planner.solver.greedy_schedule import Array, Greedy
from meshwright.planner.solver.local_search import descent_from, descents
from meshwright.planner.solver.problem import Problem, earliest_ends
from meshwright.planner.solver.result import Limits
from tests.planner.problems import random_problem
from tests.seeds import seeds


def roomy(seed: int) -> Problem:
    """Whatever is picked fits."""
    return replace(random_problem(seed, num_ranks=4, num_tasks=4, num_modes=3), device_units=1000)


@seeds(4, all=12)
def test_descents_find_schedules_that_last_as_long_as_they_say(seed: int) -> None:
    problem = roomy(seed)
    found = list(descents(problem, Limits()))
    makespans = [incumbent.period.makespan for incumbent in found]
    assert makespans == sorted(set(makespans), reverse=True)
    position = {name: index for index, name in enumerate(problem.order)}
    for modes, period in found:
        picked = {task.name: mode for task, mode in zip(problem.tasks, modes, strict=True)}
        order = sorted(period.starts, key=lambda name: (period.starts[name], position[name]))
        assert max(earliest_ends(problem, picked, order).values()) == period.makespan
    best = best_makespan(problem)
    assert best is not None
    assert best <= makespans[-1]


def test_descents_from_many_choices_take_hardly_more_steps_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is one computation for all of them."""
    counted, steps = Greedy.best_changes, []

    def best_changes(greedy: Greedy, picks: Array, scores: Array, task: int) -> tuple[Array, Array]:
        steps.append(len(picks))
        return counted(greedy, picks, scores, task)

    monkeypatch.setattr(Greedy, "best_changes", best_changes)
    for seed in range(8):
        list(descents(roomy(seed), Limits()))
    assert max(steps) == 18
    assert len(steps) <= 8 * 16


def test_descents_end_with_the_time_once_there_is_an_answer() -> None:
    stop = threading.Event()
    stop.set()
    assert len(list(descents(roomy(3), Limits(stop=stop)))) == 1


@seeds(4, all=12)
def test_a_descent_from_an_answer_does_not_lengthen_it_and_leaves_no_more_work(seed: int) -> None:
    problem = roomy(seed)
    greedy = Greedy(problem)
    for modes, period in descents(problem, Limits()):
        polished = descent_from(problem, modes)
        assert polished is not None
        assert polished.period.makespan <= period.makespan
        assert greedy.score(greedy.indices(polished.modes)) <= greedy.score(greedy.indices(modes))
