"""The bounds of combinations of modes never exclude an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.search.brute_force import best_makespan
from meshwright.planner.solver.mode_combinations import Combinations, combinations_within
from meshwright.planner.solver.problem import (
    CarriedPrecedence,
    Mode,
    Precedence,
    Problem,
    Resource,
    Run,
    Task,
    Transfer,
)
from meshwright.planner.solver.transfer_ticks import TransferTicks
from tests.planner.problems import every_choice, everywhere, only, random_blocks, random_graph, random_problem
from tests.seeds import seeds

EVERY_TASK = 10**9
ONE_TASK = 0


def shortest(problem: Problem) -> int | None:
    return best_makespan(everywhere(problem) if problem.anywhere else problem)


def has(found: Combinations, problem: Problem, picks: tuple[int, ...], makespan: int) -> bool:
    """True if a combination has these modes, and its bound is not above the makespan."""
    matches = found.bounds <= makespan
    for task, index in zip(problem.tasks, picks, strict=True):
        if task.name in found.modes:
            matches = matches & (found.modes[task.name] == index)
    return bool(np.any(matches))


def holds_every_answer(problem: Problem, max_pairs: int) -> None:
    best = shortest(problem)
    if best is None:
        return
    makespan = best + 3
    found = combinations_within(problem, makespan, max_pairs=max_pairs)
    for picks in every_choice(problem):
        lasts = shortest(only(problem, picks))
        if lasts is not None and lasts <= makespan:
            assert has(found, problem, picks, lasts)


@pytest.mark.parametrize("max_pairs", [EVERY_TASK, ONE_TASK])
@seeds(6, all=150)
def test_every_answer_on_any_ranks_has_a_combination(seed: int, max_pairs: int) -> None:
    holds_every_answer(random_blocks(seed, num_ranks=4, num_tasks=3, num_modes=3), max_pairs)


@seeds(4, all=100)
def test_every_answer_on_fixed_ranks_has_a_combination(seed: int) -> None:
    holds_every_answer(random_problem(seed, num_ranks=4, num_tasks=3, num_modes=3), EVERY_TASK)


@seeds(4, all=60)
def test_every_answer_of_a_graph_of_any_roles_has_a_combination(seed: int) -> None:
    problem = random_graph(seed)
    if len(problem.tasks) <= 5:
        holds_every_answer(problem, EVERY_TASK)


@seeds(3, all=40)
def test_every_answer_that_later_periods_wait_for_has_a_combination(seed: int) -> None:
    problem = random_blocks(seed, num_ranks=4, num_tasks=3, num_modes=3)
    last, first = problem.tasks[-1].name, problem.tasks[0].name
    carried = (CarriedPrecedence(last, first, 1 + seed % 2),)
    holds_every_answer(replace(problem, carried=carried), EVERY_TASK)


def mode(ticks: int, ranks: int = 4, layout: str = "P", **units: int) -> Mode:
    return Mode(resource=Resource(0, ranks, layout), ticks=ticks, **units)


def problem_of(modes: Mapping[str, tuple[Mode, ...]], **fields: object) -> Problem:
    """Tasks that run once each, on any of four ranks, in a device of ten units."""
    arguments: dict[str, object] = {
        "num_ranks": 4,
        "device_units": 10,
        "tasks": tuple(Task(name, of_task) for name, of_task in modes.items()),
        "activities": tuple(Run(name=name, task=name) for name in modes),
        "anywhere": True,
        **fields,
    }
    return Problem(**arguments)  # type: ignore[arg-type]


def least(problem: Problem, max_pairs: int = EVERY_TASK) -> int:
    return int(combinations_within(problem, 10**6, max_pairs=max_pairs).bounds.min())


def test_runs_on_common_ranks_take_turns() -> None:
    """Two ranks each fit side by side, three ranks and two do not."""
    assert least(problem_of({"a": (mode(5, 2),), "b": (mode(4, 2),)})) == 5
    assert least(problem_of({"a": (mode(5, 3),), "b": (mode(4, 2),)}, num_ranks=4, range_step=1)) == 9


def test_a_streamed_run_on_common_ranks_starts_after_its_producer() -> None:
    modes = {"a": (mode(5),), "b": (mode(4, early_ticks=4),)}
    assert least(problem_of(modes, precedences=(Precedence("a", "b", streamed=True),))) == 9


def test_memory_that_two_tasks_leave_buys_the_others_time() -> None:
    """Seven of ten units are taken, so `c` has to take its slow mode: the prices of memory nearly say so."""
    modes = {
        "a": (mode(9, resident_units=4),),
        "b": (mode(8, resident_units=3),),
        "c": (mode(1, resident_units=6), mode(5, resident_units=2)),
    }
    problem = problem_of(modes)
    assert least(problem) == 22
    assert 20 <= least(problem, max_pairs=1) <= 22
    roomy = problem_of(modes, device_units=13)
    assert least(roomy, max_pairs=1) == 18


def test_a_transfer_takes_its_time_unless_its_target_shares_the_copy() -> None:
    ticks = {("P", "Q", 4): 3, ("P", "P", 4): 3}
    transfer = Transfer(
        name="refit", source="train", target="generate", occupies="both", ticks=TransferTicks.from_mapping(ticks)
    )
    fields = {
        "activities": (Run(name="train", task="train"), Run(name="generate", task="generate"), transfer),
        "precedences": (Precedence("refit", "generate"), Precedence("generate", "train")),
        "sharing_groups": (("train", "generate"),),
    }
    one_layout = problem_of({"train": (mode(5),), "generate": (mode(4),)}, **fields)
    two_layouts = problem_of({"train": (mode(5),), "generate": (mode(4, layout="Q"),)}, **fields)
    assert least(one_layout) == 9
    assert least(two_layouts) == 12


def test_nothing_is_left_if_no_answer_is_within_the_makespan() -> None:
    problem = problem_of({"a": (mode(5),), "b": (mode(4),)})
    assert not len(combinations_within(problem, 8, max_pairs=EVERY_TASK))
    assert len(combinations_within(problem, 9, max_pairs=EVERY_TASK)) == 1
