"""The integer program of blocks anywhere has the optimum of the problem with every block a resource of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.search.brute_force import best_makespan
from benchmarks.search.brute_force import least_memory as least_memory_by_brute_force
from meshwright.planner.solver.cp_sat import run_cp_sat
from meshwright.planner.solver.problem import Problem
from meshwright.planner.solver.rank_range_model import RankRangeModel
from meshwright.planner.solver.result import Limits
from tests.planner.problems import everywhere, random_blocks
from tests.seeds import seeds


def asked(seed: int) -> Problem:
    return random_blocks(seed, num_ranks=4, num_tasks=3, num_modes=3)


@seeds(4, all=12)
def test_the_shortest_answer_is_the_best_on_every_block_and_none_is_within_less(seed: int) -> None:
    best = best_makespan(everywhere(asked(seed)))
    program = RankRangeModel().program(asked(seed), asked(seed).horizon)
    program.cp.minimize(program.times.makespan)
    solved = run_cp_sat(program.cp, Limits())
    assert solved.is_found == (best is not None)
    if best is not None:
        assert solved.solver.value(program.times.makespan) == best
        assert not run_cp_sat(RankRangeModel().program(asked(seed), best - 1).cp, Limits()).is_found


@seeds(4, all=12)
def test_the_least_device_is_that_on_every_block(seed: int) -> None:
    model, device = RankRangeModel().memory_program(asked(seed))
    solved = run_cp_sat(model, Limits())
    assert solved.solver.value(device) == least_memory_by_brute_force(everywhere(asked(seed)))


@pytest.mark.parametrize("num_ranks", [4, 64])
def test_the_size_of_the_program_does_not_depend_on_how_many_ranks_there_are(num_ranks: int) -> None:
    problem = asked(3)
    problems = problem, replace(problem, num_ranks=num_ranks)
    model, wider = (RankRangeModel().program(one, one.horizon).cp for one in problems)
    assert len(wider.proto.variables) == len(model.proto.variables)
    assert len(wider.proto.constraints) == len(model.proto.constraints)
