"""The integer program of modes on their own ranks has the problem's own optimum."""

from __future__ import annotations

import pytest

from benchmarks.search.brute_force import best_makespan
from benchmarks.search.brute_force import least_memory as least_memory_by_brute_force
from meshwright.planner.solver import cp_model
from meshwright.planner.solver.cp_sat import Solved, run_cp_sat
from meshwright.planner.solver.fixed_ranks_model import FixedRanksModel, FixedRanksProgram
from meshwright.planner.solver.problem import MAX_SUM, Problem
from meshwright.planner.solver.result import Limits, Progress
from tests.planner.problems import random_problem
from tests.seeds import seeds


def asked(seed: int) -> Problem:
    return random_problem(seed, num_ranks=4, num_tasks=4, num_modes=3)


def shortest(problem: Problem, progress: Progress | None = None) -> tuple[Solved, FixedRanksProgram]:
    program = FixedRanksModel().program(problem, problem.horizon)
    program.cp.minimize(program.times.makespan)
    return run_cp_sat(program.cp, Limits(), progress), program


@seeds(4, all=12)
def test_the_least_makespan_is_what_brute_force_finds(seed: int) -> None:
    solved, program = shortest(asked(seed))
    best = best_makespan(asked(seed))
    assert solved.is_proven
    assert solved.is_found == (best is not None)
    assert best is None or solved.solver.value(program.times.makespan) == best


@seeds(4, all=12)
def test_the_least_device_is_what_brute_force_finds(seed: int) -> None:
    model, device = FixedRanksModel().memory_program(asked(seed))
    solved = run_cp_sat(model, Limits())
    assert solved.is_proven
    assert solved.solver.value(device) == least_memory_by_brute_force(asked(seed))


def test_each_better_answer_is_told_with_its_bound() -> None:
    told: list[tuple[int | None, int]] = []
    solved, program = shortest(asked(3), lambda makespan, bound: told.append((makespan, bound)))
    makespans = [makespan for makespan, _ in told if makespan is not None]
    assert makespans == sorted(set(makespans), reverse=True)
    assert makespans[-1] == solved.solver.value(program.times.makespan)
    assert all(bound <= makespans[-1] for _, bound in told)


def test_coefficients_that_are_not_summed_exactly_are_refused() -> None:
    """Only those of decisions are added up; a domain bounds the others."""
    model = cp_model.CpModel()
    few, many = ([model.new_bool_var("x") for _ in range(number)] for number in (2, 4))
    model.add(sum(MAX_SUM // 2 * x for x in few) <= MAX_SUM)
    run_cp_sat(model, Limits())
    model.add(sum(MAX_SUM // 2 * x for x in many) <= MAX_SUM)
    with pytest.raises(ValueError, match=f"coefficients of a constraint sum to {4 * (MAX_SUM // 2)}, above {MAX_SUM}"):
        run_cp_sat(model, Limits())
