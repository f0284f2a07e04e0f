"""Every decision has one variable, and activities that last alike have their ticks in common."""

from __future__ import annotations

from meshwright.planner.solver import cp_model
from meshwright.planner.solver.fixed_ranks_model import add_variables
from meshwright.planner.solver.model import add_activity_variables, resources
from meshwright.planner.solver.problem import Mode, Problem, Resource, Run, Task, Transfer
from meshwright.planner.solver.transfer_ticks import TransferTicks
from tests.planner.problems import random_problem
from tests.seeds import seeds


def domain(variable: cp_model.IntVar) -> tuple[int, int]:
    low, *_, high = variable.proto.domain
    return low, high


@seeds(2, all=6)
def test_modes_resources_and_atoms_have_a_variable_each(seed: int) -> None:
    problem = random_problem(seed, num_ranks=4, num_tasks=4, num_modes=3)
    x = add_variables(cp_model.CpModel(), problem, problem.horizon)
    names = [task.name for task in problem.tasks]
    assert set(x.pick) == {(c.name, index) for c in problem.tasks for index in range(len(c.modes))}
    assert set(x.at) == {(c.name, p) for c in problem.tasks if c.name in problem.tied for p in resources(c)}
    assert set(x.covers) == {(name, atom) for name in names for atom in range(len(problem.atoms))}
    for name, resource in x.shares:
        assert any(resource in resources(c) for c in problem.tasks if c.name in problem.owners(name))


def test_a_resource_is_one_whatever_runs_there() -> None:
    resource = Resource(0, 1, "P")
    quick, slow, apart = (
        Mode(resource=at, ticks=ticks)
        for at, ticks in ((resource, 1), (resource, 2), (resource._replace(first_rank=1), 1))
    )
    assert resources(Task("a", (quick, slow, apart))) == (resource, apart.resource)


def test_runs_of_one_task_have_their_ticks_in_common_and_end_in_time() -> None:
    tasks = tuple(Task(name, (Mode(resource=Resource(0, 1, "P"), ticks=3),)) for name in "ab")
    runs = (Run(name="a0", task="a"), Run(name="a1", task="a"), Run(name="b0", task="b"))
    move = Transfer(
        name="move", source="a", target="b", occupies="both", ticks=TransferTicks.from_mapping({("P", "P", 1): 9})
    )
    problem = Problem(num_ranks=1, device_units=1, tasks=tasks, activities=(*runs, move))
    times = add_activity_variables(cp_model.CpModel(), problem, 7)
    assert times.ticks["a0"] is times.ticks["a1"]
    assert times.ticks["a0"] is not times.ticks["b0"]
    assert times.start["a0"] is not times.start["a1"]
    assert set(times.happens) == {"move"}
    assert domain(times.ticks["a0"]) == (3, 3)
    assert domain(times.ticks["move"]) == (0, 7)
    assert domain(times.makespan) == (0, 7)
