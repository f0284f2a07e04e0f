"""Models, answers and callbacks are those of OR-Tools' own module, which `planner.solver.cp_model` stands in for."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from ortools.sat.python import cp_model as original

from meshwright.planner.solver import cp_model


def every_constraint(module: Any) -> tuple[Any, Any]:
    """Return a model with every kind of variable and constraint, and the variable that it minimises."""
    model = module.CpModel()
    a, b, c = (model.new_bool_var(name) for name in "abc")
    start, end, size = model.new_int_var(0, 20, "start"), model.new_int_var(0, 20, "end"), model.new_int_var(2, 5, "s")
    odd = model.new_int_var_from_domain(module.Domain.from_values([1, 3, 7]), "odd")
    makespan = model.new_int_var(0, 40, "makespan")
    model.add(module.LinearExpr.weighted_sum([a, b, c], [3, 5, 7]) == odd)
    model.add(makespan >= end + 2 * odd)
    model.add(start + size <= end).only_enforce_if(a)
    model.add(start != 4).only_enforce_if([~a, b])
    model.add(True)
    model.add_exactly_one([a, b, c])
    model.add_exactly_one(literal for literal in (a, b, c))
    model.add_bool_or(a, ~b)
    model.add_bool_and(a, ~b).only_enforce_if(c)
    model.add_implication(c, ~a)
    fixed = model.new_interval_var(start, size, end, "fixed")
    optional = model.new_optional_interval_var(1, 2, 3, b, "optional")
    model.add_no_overlap([fixed, optional])
    model.add_cumulative([fixed, optional], [1, odd], 7)
    model.minimize(start)
    model.minimize(makespan)
    return model, makespan


def test_a_model_is_the_one_that_or_tools_builds() -> None:
    model, _ = every_constraint(cp_model)
    assert str(model.proto) == str(every_constraint(original)[0].proto)
    assert model.validate() == ""


def test_the_answer_is_the_one_that_or_tools_finds() -> None:
    answers = []
    for module in (cp_model, original):
        model, makespan = every_constraint(module)
        solver = module.CpSolver()
        solver.parameters.num_workers = 1
        assert solver.solve(model) == module.OPTIMAL
        answers.append((solver.value(makespan), solver.objective_value, solver.best_objective_bound))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("module", [cp_model, original])
def test_a_comparison_of_numbers_that_is_false_has_no_answer(module: Any) -> None:
    model = module.CpModel()
    model.add(False)
    assert module.CpSolver().solve(model) == module.INFEASIBLE


def test_a_model_that_is_refused_says_why() -> None:
    model = cp_model.CpModel()
    model.new_int_var(0, 2**63 - 1, "large")
    assert "large" in model.validate()
    assert cp_model.CpSolver().solve(model) == cp_model.MODEL_INVALID


def test_a_search_loads_no_pandas() -> None:
    script = "import sys, meshwright.planner.solver.solve; print('ortools' in sys.modules, 'pandas' in sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert loaded.stdout == "True False\n"
