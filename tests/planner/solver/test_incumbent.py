"""The best answer so far only gets better, and what it says of itself is so."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.search.brute_force import best_makespan
from meshwright.planner.solver.greedy_schedule import Greedy
from meshwright.planner.solver.local_search import Incumbent
from meshwright.planner.solver.problem import Problem, earliest_ends
from meshwright.planner.solver.result import Limits, picked_modes
from tests.planner.problems import random_problem
from tests.seeds import seeds


def roomy(seed: int) -> Problem:
    """Whatever is picked fits."""
    return replace(random_problem(seed, num_ranks=4, num_tasks=4, num_modes=3), device_units=1000)


def begun(seed: int) -> tuple[Incumbent, list[int]]:
    """After its first descents, with the makespans that it told."""
    told: list[int] = []
    incumbent = Incumbent(roomy(seed), lambda makespan, _bound: told.append(makespan))
    incumbent.start(incumbent.problem, Limits())
    return incumbent, told


@seeds(4, all=12)
def test_the_first_descents_find_a_schedule_that_lasts_as_long_as_they_say(seed: int) -> None:
    incumbent, told = begun(seed)
    assert told == sorted(set(told), reverse=True)
    assert told[-1] == incumbent.makespan
    result = incumbent.result()
    assert result.answer is not None
    starts, position = result.answer.starts, {name: i for i, name in enumerate(incumbent.problem.order)}
    order = sorted(starts, key=lambda name: (starts[name], position[name]))
    ends = earliest_ends(incumbent.problem, picked_modes(incumbent.problem, result.answer), order)
    assert max(ends.values()) == result.objective
    best = best_makespan(incumbent.problem)
    assert best is not None
    assert best <= told[-1]


@seeds(4, all=12)
def test_an_answer_that_is_no_better_is_not_taken(seed: int) -> None:
    incumbent, told = begun(seed)
    known = incumbent.makespan, incumbent.modes, list(told)
    assert incumbent.makespan is not None
    incumbent.offer((), incumbent.makespan, {})
    assert (incumbent.makespan, incumbent.modes, told) == known


@seeds(4, all=12)
def test_kicks_make_the_answer_shorter_or_leave_it(seed: int) -> None:
    incumbent, told = begun(seed)
    known, modes = incumbent.makespan, incumbent.modes
    is_better = incumbent.kick(incumbent.problem)
    assert incumbent.makespan is not None
    assert known is not None
    assert is_better == (incumbent.makespan < known) == (told[-1] < known)
    best = best_makespan(incumbent.problem)
    assert best is not None
    assert best <= incumbent.makespan
    assert is_better or incumbent.modes == modes


@seeds(4, all=12)
def test_polishing_does_not_lengthen_and_leaves_no_more_work(seed: int) -> None:
    incumbent, _ = begun(seed)
    greedy = Greedy(incumbent.problem)
    before = greedy.score(greedy.indices(incumbent.modes))
    incumbent.polish()
    after = greedy.score(greedy.indices(incumbent.modes))
    assert after <= before
    assert incumbent.makespan == after.makespan


def test_an_answer_is_optimal_where_the_bound_meets_it() -> None:
    incumbent, _ = begun(3)
    assert incumbent.makespan is not None
    assert incumbent.result().status == "feasible"
    incumbent.bound = incumbent.makespan
    assert incumbent.result().status == "optimal"
