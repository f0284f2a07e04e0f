"""Between two activities lies what must, in whatever order activities are taken."""

from __future__ import annotations

import random

from meshwright.planner.solver.lower_bounds import ActivityWindow, followers, windows
from meshwright.planner.solver.problem import Mode, Precedence, Problem, Resource, Run, Task, earliest_ends
from tests.planner.problems import random_problem
from tests.seeds import seeds


def diamond(*, streamed: bool = False) -> Problem:
    """a before b and c, both before d; b may stream to d."""
    tasks = tuple(Task(name, (Mode(resource=Resource(0, 1, "P"), ticks=1),)) for name in "abcd")
    return Problem(
        num_ranks=1,
        device_units=1,
        tasks=tasks,
        activities=tuple(Run(name=name, task=name) for name in "abcd"),
        precedences=(
            Precedence("a", "b"),
            Precedence("a", "c"),
            Precedence("b", "d", streamed=streamed),
            Precedence("c", "d"),
        ),
    )


def test_activities_side_by_side_lie_in_the_window_around_them() -> None:
    found = windows(diamond())
    assert ActivityWindow("a", "d", ("b", "c")) in found
    assert all(len(window.between) > 1 for window in found)


def test_a_window_that_is_the_sum_of_two_others_is_left_out() -> None:
    """All four activities lie between the start and the end, and a comes before the others."""
    assert ActivityWindow(None, None, ("a", "b", "c", "d")) not in windows(diamond())


def test_what_is_streamed_to_does_not_wait_for_the_end_of_its_producer() -> None:
    assert followers(diamond())["b"] == {"d"}
    assert followers(diamond(streamed=True))["b"] == set()
    assert followers(diamond(streamed=True))["a"] == {"b", "c", "d"}
    assert followers(diamond())[None] == set("abcd")


@seeds(4, all=20)
def test_every_schedule_has_the_work_of_a_window_inside_it(seed: int) -> None:
    draw = random.Random(seed)
    problem = random_problem(seed, num_ranks=4, num_tasks=4, num_modes=2)
    picked = {task.name: draw.choice(task.modes) for task in problem.tasks}
    activities = {activity.name: activity for activity in problem.activities}
    ends = earliest_ends(problem, picked, problem.order)
    starts = {name: end - problem.duration(activities[name], picked) for name, end in ends.items()}
    for window in windows(problem):
        for name in window.between:
            assert window.after is None or starts[name] >= ends[window.after]
            assert window.before is None or ends[name] <= starts[window.before]
