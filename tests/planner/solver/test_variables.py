"""Every decision has one variable, and tasks that last alike have their ticks in common."""

from __future__ import annotations

from meshwright.planner.solver import cp_model
from meshwright.planner.solver.fixed_ranks_model import add_task_variables, add_variables, places
from meshwright.planner.solver.problem import CallOptions, CallRun, Option, Place, Problem, Transfer
from tests.planner.problems import random_problem
from tests.seeds import seeds


def domain(variable: cp_model.IntVar) -> tuple[int, int]:
    low, *_, high = variable.proto.domain
    return low, high


@seeds(2, all=6)
def test_options_places_and_atoms_have_a_variable_each(seed: int) -> None:
    problem = random_problem(seed, num_ranks=4, num_calls=4, num_options=3)
    x = add_variables(cp_model.CpModel(), problem)
    names = [call.name for call in problem.calls]
    assert set(x.pick) == {(c.name, index) for c in problem.calls for index in range(len(c.options))}
    assert set(x.at) == {(c.name, p) for c in problem.calls if c.name in problem.tied for p in places(c)}
    assert set(x.covers) == {(name, atom) for name in names for atom in range(len(problem.atoms))}
    for name, place in x.shares:
        assert any(place in places(c) for c in problem.calls if c.name in problem.owners(name))


def test_a_place_is_one_whatever_runs_there() -> None:
    place = Place(0, 1, "P")
    quick, slow, apart = (
        Option(place=at, ticks=ticks) for at, ticks in ((place, 1), (place, 2), (place._replace(first_rank=1), 1))
    )
    assert places(CallOptions("a", (quick, slow, apart))) == (place, apart.place)


def test_runs_of_one_call_have_their_ticks_in_common_and_end_in_time() -> None:
    calls = tuple(CallOptions(name, (Option(place=Place(0, 1, "P"), ticks=3),)) for name in "ab")
    runs = (CallRun(name="a0", call="a"), CallRun(name="a1", call="a"), CallRun(name="b0", call="b"))
    move = Transfer(name="move", source="a", target="b", occupies="both", ticks={("P", "P", 1): 9})
    problem = Problem(num_ranks=1, device_units=1, calls=calls, tasks=(*runs, move))
    times = add_task_variables(cp_model.CpModel(), problem, 7)
    assert times.ticks["a0"] is times.ticks["a1"]
    assert times.ticks["a0"] is not times.ticks["b0"]
    assert times.start["a0"] is not times.start["a1"]
    assert set(times.happens) == {"move"}
    assert domain(times.ticks["a0"]) == (3, 3)
    assert domain(times.ticks["move"]) == (0, 7)
    assert domain(times.makespan) == (0, 7)
