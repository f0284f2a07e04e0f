"""Taken apart, a problem loses no answer that ends in time."""

from __future__ import annotations

from itertools import product

import pytest

from benchmarks.search.brute_force import best_makespan
from meshwright.planner.solver import branches as taken_apart
from meshwright.planner.solver.branches import Branch, branches
from meshwright.planner.solver.fixed_ranks_model import FixedRanksModel
from meshwright.planner.solver.problem import Mode, Problem, Resource, Run, Task
from meshwright.planner.solver.rank_range_model import RankRangeModel
from tests.planner.problems import everywhere, only, random_blocks, without_swaps
from tests.seeds import seeds


def always() -> bool:
    return True


def shortest(problem: Problem) -> int | None:
    return best_makespan(everywhere(problem) if problem.anywhere else problem)


def split(problem: Problem, makespan: int) -> list[Branch]:
    model = RankRangeModel() if problem.anywhere else FixedRanksModel()
    return branches(problem, model.relaxation(problem), makespan, always)


@pytest.mark.parametrize("anywhere", [True, False])
@pytest.mark.parametrize("share", [0.0, 2.0])
@seeds(4, all=20)
def test_every_answer_in_time_is_in_a_branch(
    seed: int, share: float, anywhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the branches are told apart or not, with either model. Interchangeable ranks are left out: of answers
    that differ by them alone only one is in a branch."""
    monkeypatch.setattr(taken_apart, "_MAX_MEAN_SHARE", share)
    problem = random_blocks(seed, num_ranks=4, num_tasks=3, num_modes=3) if anywhere else without_swaps(seed)
    best = shortest(problem)
    if best is None:
        return
    makespan = best + 2
    found = split(problem, makespan)
    for picks in product(*(range(len(task.modes)) for task in problem.tasks)):
        one = only(problem, picks)
        lasts = shortest(one)
        if lasts is not None and lasts <= makespan:
            holds = [
                branch
                for branch in found
                if all(task.modes[0] in branch.within(makespan).modes(task.name) for task in one.tasks)
            ]
            assert holds
            assert all(branch.bound <= lasts for branch in holds)


@pytest.mark.usefixtures("apart")
def test_branches_come_with_the_least_bound_first() -> None:
    found = split(random_blocks(10, num_ranks=4, num_tasks=3, num_modes=4), 1000)
    assert [branch.bound for branch in found] == [5, 5, 8, 8]


def test_the_whole_problem_is_the_whole_when_time_ends() -> None:
    problem = random_blocks(3, num_ranks=4, num_tasks=3, num_modes=4)
    (whole,) = branches(problem, RankRangeModel().relaxation(problem), 1000, lambda: False)
    assert whole.within(1000).tasks == problem.tasks


def caches(num_ranks: int) -> Problem:
    """Of 10 blocks `a` fills 9 and takes 1 tick, or 4 and takes 6; `b` takes 1 tick with 5 blocks, or 8 with 1."""

    def mode(ticks: int, blocks: int, ranks: int = num_ranks) -> Mode:
        return Mode(resource=Resource(0, ranks, "P"), ticks=ticks, resident_units=blocks)

    return Problem(
        num_ranks=2,
        device_units=10,
        tasks=(Task("a", (mode(1, 9, 2), mode(6, 4, 2))), Task("b", (mode(1, 5), mode(8, 1)))),
        activities=tuple(Run(name=name, task=name) for name in "ab"),
        anywhere=True,
    )


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Branches are told apart however many modes they have in common."""
    monkeypatch.setattr(taken_apart, "_MAX_MEAN_SHARE", 2.0)


@pytest.mark.usefixtures("apart")
def test_what_does_not_fit_beside_an_mode_on_the_same_ranks_is_in_no_branch_of_it() -> None:
    one, other = split(caches(2), 100)
    assert (one.bound, other.bound) == (7, 9)
    assert [len(task.modes) for task in other.within(100).tasks] == [1, 1]


@pytest.mark.usefixtures("apart")
def test_ranks_that_two_tasks_must_share_decide_what_fits() -> None:
    """A part of the cluster lies inside the whole, whatever its size."""
    assert [branch.bound for branch in split(caches(1), 100)] == [7, 8]
