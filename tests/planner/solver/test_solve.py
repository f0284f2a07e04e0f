"""The solver agrees with brute force, in whole ticks, on every small random problem."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

import pytest

from benchmarks.search.brute_force import best_makespan
from benchmarks.search.brute_force import least_memory as least_memory_by_brute_force
from meshwright.planner.solver.problem import (
    Mode,
    Precedence,
    Problem,
    Resource,
    Run,
    Task,
    Transfer,
    shortest_period,
)
from meshwright.planner.solver.result import Effort, Limits, Result, picked_modes
from meshwright.planner.solver.solve import least_memory, solve
from meshwright.planner.solver.transfer_ticks import TransferTicks
from tests.planner.problems import everywhere, random_blocks, random_graph, random_problem, with_carried
from tests.seeds import cases, seeds

SHAPES = (
    {"num_ranks": 4, "num_tasks": 4, "num_modes": 3},
    {"num_ranks": 8, "num_tasks": 3, "num_modes": 3},
    {"num_ranks": 5, "num_tasks": 4, "num_modes": 3, "step": 1},
    {"num_ranks": 6, "num_tasks": 3, "num_modes": 3, "step": 2},
)


def problem(seed: int) -> Problem:
    """In three of four problems modes may be anywhere, in the others each has its own ranks. In half of them pools
    are powers of two, in the others any number of steps."""
    make = random_blocks if seed % 16 < 12 else random_problem
    return make(seed, **SHAPES[seed % 4])


def check(asked: Problem, result: Result) -> None:
    """An answer fits, and ends when it says."""
    if result.answer is None:
        assert result.status == "infeasible"
        return
    picked = picked_modes(asked, result.answer)
    order = sorted(asked.order, key=lambda name: (result.answer.starts[name], asked.order.index(name)))
    assert shortest_period(asked, picked, order).makespan == result.objective
    assert max(everywhere(asked).memory(picked)) <= asked.device_units
    for name, mode in picked.items():
        assert mode in everywhere(asked).modes(name)


@seeds(16, all=640)
def test_the_solver_finds_what_brute_force_finds(seed: int) -> None:
    asked = problem(seed)
    result = solve(asked, Limits())
    assert result.objective == best_makespan(everywhere(asked))
    assert result.status == ("infeasible" if result.answer is None else "optimal")
    check(asked, result)


@seeds(7, all=300)
def test_the_solver_finds_what_brute_force_finds_on_graphs_of_any_roles(seed: int) -> None:
    asked = random_graph(seed)
    assert 3 <= len(asked.tasks) <= 9
    result = solve(asked, Limits())
    assert result.objective == best_makespan(asked)
    check(asked, result)


@seeds(4, all=96)
def test_what_is_handed_to_a_later_turn_is_part_of_the_search(seed: int) -> None:
    make = random_blocks if seed % 4 < 3 else random_problem
    asked = with_carried(seed, make(seed, num_ranks=4, num_tasks=3, num_modes=3))
    result = solve(asked, Limits())
    assert result.objective == best_makespan(everywhere(asked))
    assert result.status == ("infeasible" if result.answer is None else "optimal")
    check(asked, result)


@pytest.mark.parametrize("gap", [0.02, 0.1, 0.5])
@seeds(3, all=12)
def test_a_search_ends_within_the_gap_that_was_asked(seed: int, gap: float) -> None:
    asked = problem(seed)
    best, result = solve(asked, Limits()), solve(asked, Limits(gap=gap))
    check(asked, result)
    if best.objective is None or result.objective is None:
        assert best.objective == result.objective
        return
    assert result.bound <= best.objective <= result.objective
    assert result.objective - result.bound <= gap * result.objective


@seeds(4, all=64)
def test_a_search_answers_within_what_is_asked_or_says_that_nothing_is(seed: int) -> None:
    asked = problem(seed)
    best = best_makespan(everywhere(asked))
    if best is None:
        assert solve(asked, Limits(max_makespan=asked.horizon)).answer is None
        return
    assert solve(asked, Limits(max_makespan=best)).objective == best
    result = solve(asked, Limits(max_makespan=best - 1))
    assert (result.status, result.answer, result.bound) == ("beaten", None, best)


@seeds(4, all=16)
def test_the_least_memory_is_what_brute_force_finds(seed: int) -> None:
    asked = problem(seed)
    assert least_memory(asked, Limits()) == least_memory_by_brute_force(everywhere(asked))


@pytest.mark.parametrize("make", [random_problem, random_blocks])
def test_the_same_problem_has_the_same_answer(make: Callable[..., Problem]) -> None:
    asked = make(7, num_ranks=8, num_tasks=4, num_modes=12)
    assert solve(asked, Limits()) == solve(asked, Limits())


def test_a_task_without_modes_is_infeasible() -> None:
    asked = Problem(num_ranks=1, device_units=1, tasks=(Task("a", ()),), activities=(Run(name="a", task="a"),))
    assert solve(asked, Limits()).status == "infeasible"
    assert least_memory(asked, Limits()) is None


def mode(first: int, num: int, ticks: int, layout: str = "L", **memory: int) -> Mode:
    return Mode(resource=Resource(first, num, layout), ticks=ticks, **memory)


def test_a_transfer_is_paid_unless_the_copy_is_shared() -> None:
    """Alone, b is fastest at layout M (3 ticks); with the transfer of 5 from a, sharing a's copy at L (6) wins."""
    transfer = Transfer(
        name="a to b", source="a", target="b", occupies="both", ticks=TransferTicks.from_mapping({("L", "M", 1): 5})
    )
    asked = Problem(
        num_ranks=1,
        device_units=10,
        tasks=(Task("a", (mode(0, 1, 4),)), Task("b", (mode(0, 1, 6), mode(0, 1, 3, "M")))),
        activities=(transfer, Run(name="b", task="b"), Run(name="a", task="a")),
        precedences=(Precedence("a to b", "b"), Precedence("b", "a", 1)),
        sharing_groups=(("a", "b"),),
    )
    assert solve(asked, Limits()).objective == 11
    dear = dataclasses.replace(transfer, ticks=TransferTicks.from_mapping({("L", "M", 1): 1}))
    assert solve(dataclasses.replace(asked, activities=(dear, *asked.activities[1:])), Limits()).objective == 9


def test_a_run_that_is_streamed_to_starts_early_but_not_before_its_producer() -> None:
    """b is left with 2 of its 6 ticks when a ends at 4, unless it must share a's rank; lag 1 counts as before."""

    def streamed(*modes: Mode) -> Problem:
        return Problem(
            num_ranks=2,
            device_units=10,
            tasks=(Task("a", (mode(0, 1, 4),)), Task("b", modes)),
            activities=(Run(name="a", task="a"), Run(name="b", task="b")),
            precedences=(Precedence("a", "b", 1, streamed=True),),
        )

    early = dataclasses.replace(mode(1, 1, 6), early_ticks=4)
    assert solve(streamed(early), Limits()).objective == 7
    assert solve(streamed(dataclasses.replace(early, early_ticks=6)), Limits()).objective == 6
    assert solve(streamed(dataclasses.replace(early, resource=Resource(0, 1, "L"))), Limits()).objective == 10
    assert solve(streamed(early, mode(0, 1, 2)), Limits()).objective == 7


@pytest.mark.parametrize("make", [random_problem, random_blocks])
@cases("seed", [3, 7, 11], few=1)
def test_a_search_that_is_cut_short_still_bounds_its_answer(seed: int, make: Callable[..., Problem]) -> None:
    asked = make(seed, num_ranks=8, num_tasks=5, num_modes=14)
    full, short = solve(asked, Limits()), solve(asked, Limits(max_deterministic_time=1e-9))
    assert full.objective is not None
    assert short.objective is not None
    assert short.bound <= full.objective <= short.objective
    assert short.status == ("optimal" if short.bound == short.objective else "feasible")


@pytest.mark.parametrize("make", [random_problem, random_blocks])
def test_progress_only_gets_better(make: Callable[..., Problem]) -> None:
    told: list[tuple[int | None, int]] = []
    asked = make(5, num_ranks=8, num_tasks=5, num_modes=14)
    result = solve(asked, Limits(), lambda makespan, bound: told.append((makespan, bound)))
    makespans = [makespan for makespan, _ in told if makespan is not None]
    assert makespans == sorted(makespans, reverse=True)
    assert makespans[-1] == result.objective
    assert [makespan is None for makespan, _ in told] == sorted(
        (makespan is None for makespan, _ in told), reverse=True
    )
    assert all(bound <= result.bound for _, bound in told)


@pytest.mark.parametrize("make", [random_problem, random_blocks])
def test_what_a_search_asks_of_the_solver_is_counted_and_the_same_again(make: Callable[..., Problem]) -> None:
    asked, one, other = make(11, num_ranks=8, num_tasks=5, num_modes=14), Effort(), Effort()
    for effort in (one, other):
        solve(asked, Limits(), effort=effort)
    assert one == other
    assert one.num_models > 0


@pytest.mark.parametrize("make", [random_problem, random_blocks])
def test_a_search_that_is_asked_to_stop_says_what_it_has(make: Callable[..., Problem]) -> None:
    stop = threading.Event()
    stop.set()
    asked = make(5, num_ranks=8, num_tasks=5, num_modes=14)
    best, found = solve(asked, Limits()), solve(asked, Limits(stop=stop))
    assert best.objective is not None
    assert found.bound <= best.objective
    assert found.objective is None or found.objective >= best.objective
