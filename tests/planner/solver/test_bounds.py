"""Arithmetic alone drops only modes that no answer in time can use."""

from __future__ import annotations

from benchmarks.search.brute_force import best_makespan
from meshwright.planner.solver.lower_bounds import least_makespan, modes_within
from meshwright.planner.solver.problem import Mode, Precedence, Problem, Resource, Run, Task
from tests.planner.problems import everywhere, random_blocks, random_problem
from tests.seeds import seeds


def best(problem: Problem) -> float:
    found = best_makespan(everywhere(problem)) if all(task.modes for task in problem.tasks) else None
    return float("inf") if found is None else found


@seeds(4, all=20, failed=(9,))
def test_modes_that_cannot_meet_a_makespan_are_in_no_answer_within_it(seed: int) -> None:
    problem = random_blocks(seed, num_ranks=4, num_tasks=3, num_modes=3)
    shortest = best(problem)
    if shortest < float("inf"):
        assert best(modes_within(problem, int(shortest))) == shortest
        assert least_makespan(problem) <= shortest


@seeds(2, all=8)
def test_a_longer_makespan_never_leaves_fewer_modes(seed: int) -> None:
    problem = random_problem(seed, num_ranks=4, num_tasks=4, num_modes=4)
    left = [sum(len(task.modes) for task in modes_within(problem, makespan).tasks) for makespan in range(0, 60, 6)]
    assert left == sorted(left)
    assert modes_within(problem, problem.horizon) == problem
    least = least_makespan(problem)
    assert any(not task.modes for task in modes_within(problem, least - 1).tasks)


def test_work_that_must_lie_between_two_activities_is_spread_over_all_ranks() -> None:
    """a and d take a tick; between them b and c take 6 ticks on 2 ranks each, of 2: 1 + 12 + 1."""

    def task(name: str, ticks: int) -> Task:
        return Task(name, (Mode(resource=Resource(0, 2, "P"), ticks=ticks),))

    problem = Problem(
        num_ranks=2,
        device_units=1,
        tasks=(task("a", 1), task("b", 6), task("c", 6), task("d", 1)),
        activities=tuple(Run(name=name, task=name) for name in "abcd"),
        precedences=(*(Precedence("a", name) for name in "bc"), *(Precedence(name, "d") for name in "bc")),
    )
    assert least_makespan(problem) == 14
