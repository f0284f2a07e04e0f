"""The search finds and proves the best with either model, whatever it rounds on the way."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from itertools import product

import pytest

from benchmarks.search.brute_force import best_makespan
from meshwright.planner.solver import coarse_problem
from meshwright.planner.solver import search as driver
from meshwright.planner.solver.coarse_problem import MergedLayouts
from meshwright.planner.solver.problem import Mode, Problem, Resource, Run, Task, Transfer
from meshwright.planner.solver.result import Effort, Limits
from meshwright.planner.solver.solve import solve
from meshwright.planner.solver.transfer_ticks import TransferTicks
from tests.planner.problems import everywhere, random_blocks, random_problem
from tests.seeds import seeds


def asked_of(seed: int, anywhere: bool) -> Problem:
    """A problem for either model that is small enough to try everything."""
    if anywhere:
        return random_blocks(seed, num_ranks=4, num_tasks=3, num_modes=4)
    return random_problem(seed, num_ranks=4, num_tasks=4, num_modes=4)


def best_of(problem: Problem) -> int | None:
    return best_makespan(everywhere(problem) if problem.anywhere else problem)


either_model = pytest.mark.parametrize("anywhere", [True, False], ids=["rank ranges", "fixed ranks"])


@either_model
@seeds(4, all=24)
def test_the_best_is_found_and_proven(seed: int, anywhere: bool) -> None:
    asked = asked_of(seed, anywhere)
    result, best = solve(asked, Limits()), best_of(asked)
    assert result.objective == best
    assert result.status == ("infeasible" if best is None else "optimal")


@either_model
@seeds(2, all=8)
def test_a_bound_holds_whatever_the_time(seed: int, anywhere: bool) -> None:
    asked = asked_of(seed, anywhere)
    best, short = best_of(asked), solve(asked, Limits(max_deterministic_time=1e-9))
    assert best is None or short.bound <= best <= (short.objective or best)


def test_a_device_that_holds_nothing_is_infeasible() -> None:
    """Each task alone fits into nine units, and not all of them on one rank."""
    crowded = random_problem(5, num_ranks=1, num_tasks=6, num_modes=2)
    small = dataclasses.replace(crowded, device_units=9)
    assert best_makespan(small) is None
    assert solve(small, Limits()).status == "infeasible"


@seeds(2, all=8)
def test_modes_that_may_be_anywhere_are_as_good_as_modes_on_every_block(seed: int) -> None:
    """On more ranks and tasks than can be tried one by one."""
    asked = random_blocks(seed, num_ranks=16, num_tasks=5, num_modes=4)
    result = solve(asked, Limits())
    assert result.objective == solve(everywhere(asked), Limits()).objective


@either_model
@pytest.mark.parametrize("gap", [0.0, 0.02, 0.3])
@seeds(3, all=12)
def test_rounds_of_the_search_keep_what_was_asked(seed: int, gap: float, anywhere: bool) -> None:
    """An answer is within the gap of a bound that holds, and there is none only where the best takes longer than the
    most that is asked for."""
    asked = asked_of(seed, anywhere)
    best = best_of(asked)
    if best is None:
        assert solve(asked, Limits(gap=gap, max_makespan=10**6)).status == "beaten"
        return
    for most in (best - 1, best, 2 * best):
        result = solve(asked, Limits(gap=gap, max_makespan=most))
        if result.objective is None:
            assert (result.status, result.bound) == ("beaten", most + 1)
            assert best > most
        else:
            assert result.bound <= best <= result.objective <= most
            assert result.objective - result.bound <= gap * result.objective


@pytest.mark.parametrize("gap", [0.1, 0.4])
@seeds(2, all=8)
def test_stand_ins_for_short_tasks_keep_what_was_asked(seed: int, gap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever counts as short."""
    asked = random_blocks(seed, num_ranks=4, num_tasks=3, num_modes=4)
    best = best_makespan(everywhere(asked))
    for times in (2, 1000):
        monkeypatch.setattr(driver, "_SHORT_TASK_GAPS", times)
        result = solve(asked, Limits(gap=gap))
        if best is None:
            assert result.status == "infeasible"
        else:
            assert result.objective is not None
            assert result.bound <= best <= result.objective
            assert result.objective - result.bound <= gap * result.objective


def with_layouts_alike(problem: Problem) -> Problem:
    """The problem in hundredths of its ticks, each layout twice: transfers of the second last a tick less."""

    def twice(o: Mode) -> tuple[Mode, Mode]:
        long = dataclasses.replace(o, ticks=100 * o.ticks, early_ticks=100 * o.early_ticks)
        return long, dataclasses.replace(long, resource=long.resource._replace(layout=f"{long.resource.layout}2"))

    def slower(activity: Run | Transfer) -> Run | Transfer:
        if isinstance(activity, Run):
            return activity
        known = activity.ticks
        ticks = {
            (a + x, b + y, n): 100 * known.between(a, b, n) + 3 - len(x + y)
            for a, b, n in product(known.sources, known.targets, known.overlaps)
            for x, y in product(("", "2"), ("", "2"))
        }
        return dataclasses.replace(activity, ticks=TransferTicks.from_mapping(ticks))

    return dataclasses.replace(
        problem,
        tasks=tuple(Task(c.name, tuple(new for o in c.modes for new in twice(o))) for c in problem.tasks),
        activities=tuple(map(slower, problem.activities)),
        precedences=tuple(p._replace(lag=100 * p.lag) for p in problem.precedences),
    )


@pytest.mark.parametrize("seed", [10, 13, 19])
def test_a_proof_that_begins_with_fewer_layouts_is_within_the_gap(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does where there are many modes, which no problem has that can be tried one by one."""
    merged = []

    def coarsened(problem: Problem, *, parts: int, ticks: int, merge_ticks: int = 0) -> MergedLayouts:
        found = coarse_problem.coarsened(problem, parts=parts, ticks=ticks, merge_ticks=merge_ticks)
        merged.append(any(layout != other for (_, layout), other in found.representative.items()))
        return found

    monkeypatch.setattr(driver, "_MANY_MODES", 0)
    monkeypatch.setattr(driver, "_MAX_PAIRS", 0)  # with combinations of all tasks nothing is left to prove
    monkeypatch.setattr(driver, "coarsened", coarsened)
    asked = with_layouts_alike(random_blocks(seed, num_ranks=8, num_tasks=4, num_modes=6))
    best, result = solve(asked, Limits()), solve(asked, Limits(gap=0.05))
    assert any(merged)
    assert best.objective is not None
    assert result.objective is not None
    assert result.bound <= best.objective <= result.objective
    assert result.objective - result.bound <= 0.05 * result.objective


def taking_turns_on_two_ranks(**layouts: tuple[int, int]) -> Problem:
    """Four tasks of one rank each; the last has several layouts, each of some ticks and blocks, of which others may
    share the copy. With 530 ticks it all takes 1,030."""
    fixed = {"a": 530, "b": 500, "c": 440}
    tasks = [Task(n, (Mode(resource=Resource(0, 1, n), ticks=t, resident_units=5),)) for n, t in fixed.items()]
    last = (
        Mode(resource=Resource(0, 1, layout), ticks=ticks, resident_units=blocks, shared_units=blocks)
        for layout, (ticks, blocks) in layouts.items()
    )
    return Problem(
        num_ranks=2,
        device_units=64,
        tasks=(*tasks, Task("d", tuple(last))),
        activities=tuple(Run(name=name, task=name) for name in (*fixed, "d")),
        sharing_groups=(("a", "d"),),
        anywhere=True,
    )


def test_an_answer_within_the_gap_is_accepted_beyond_the_largest_makespan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best takes 1,060, and 1,055 is asked for. The bound of 1,021 would have to be raised beyond it; instead 1,060
    is accepted, if it is acceptable."""
    monkeypatch.setattr(driver, "_MANY_MODES", 0)
    monkeypatch.setattr(driver, "_MAX_PAIRS", 0)
    monkeypatch.setattr(driver, "_MEMORY_PARTS", 2)
    problem = taking_turns_on_two_ranks(P=(530, 60), Q=(620, 10))
    asked = Limits(gap=0.05, max_makespan=1055)
    assert solve(problem, asked).status == "beaten"
    accepted = solve(problem, replace(asked, max_acceptable_makespan=1100))
    assert (accepted.objective, accepted.bound) == (1060, 1021)
    assert solve(problem, replace(asked, max_acceptable_makespan=1059)).status == "beaten"


def test_an_answer_just_beyond_an_aim_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first aim is 1,050. In halves of a device a layout fits that does not: 1,021 is proven, which is 1,030 less a
    step. With the other layout 1,060 is the best, and that is within the gap: nothing is spent on what lies between the
    bound and the aim."""
    monkeypatch.setattr(driver, "_MANY_MODES", 0)
    monkeypatch.setattr(driver, "_MAX_PAIRS", 0)  # combinations of both tasks would prove 1,060
    monkeypatch.setattr(driver, "_MEMORY_PARTS", 2)
    effort = Effort()
    problem = taking_turns_on_two_ranks(P=(530, 60), Q=(620, 10))
    result = solve(problem, Limits(gap=0.05, max_makespan=2000), effort=effort)
    assert (result.objective, result.bound) == (1060, 1021)
    assert effort.num_models == 3, "one for the bound, one for the layouts that it has, one for all"
