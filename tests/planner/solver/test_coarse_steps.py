"""A makespan in steps of several ticks is proven no further than its step allows."""

from __future__ import annotations

import pytest

from meshwright.planner.solver import cp_model
from meshwright.planner.solver.cp_sat import Steps, run_cp_sat
from meshwright.planner.solver.result import Limits


@pytest.mark.parametrize(("bound", "target", "number"), [(10, 100, 16), (10, 11, 16), (10, 10, 16), (0, 1000, 7)])
def test_about_as_many_steps_as_asked_reach_from_the_bound_to_the_target(bound: int, target: int, number: int) -> None:
    steps = Steps.between(bound, target, number)
    assert steps.step >= 1
    assert number * steps.step >= target - bound
    assert steps.step == 1 or number * (steps.step - 1) < target - bound


@pytest.mark.parametrize("least", range(10, 31))
def test_what_is_proven_is_never_above_the_shortest_and_at_most_a_step_below(least: int) -> None:
    steps = Steps.between(10, 30, 4)
    model = cp_model.CpModel()
    makespan = model.new_int_var(least, 100, "makespan")
    steps.minimise(model, makespan)
    solved = run_cp_sat(model, Limits())
    assert solved.is_found
    assert solved.solver.value(makespan) <= 30
    assert steps.proven(solved) <= least < steps.proven(solved) + steps.step


def test_nothing_within_the_target_proves_that_all_is_beyond_it() -> None:
    steps = Steps.between(10, 30, 4)
    model = cp_model.CpModel()
    steps.minimise(model, model.new_int_var(31, 100, "makespan"))
    assert steps.proven(run_cp_sat(model, Limits())) == 31
