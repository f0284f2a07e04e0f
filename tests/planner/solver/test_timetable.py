"""The schedules of many choices at once are those that each has by itself, activity after activity."""

from __future__ import annotations

import numpy as np

from meshwright.planner.solver.greedy_schedule import Timetable
from meshwright.planner.solver.problem import Mode, Problem, Run
from meshwright.planner.solver.rank_ranges import Crossing
from tests.planner.problems import every_choice, random_problem
from tests.seeds import seeds


def one_by_one(problem: Problem, picked: dict[str, Mode]) -> dict[str, int]:
    """When each activity ends where always the one that can start first is next, then the longest line, then the
    first."""
    ticks = {activity.name: problem.duration(activity, picked) for activity in problem.activities}
    early = {activity.name: problem.early(activity, picked) for activity in problem.activities}
    resources = {name: mode.resource for name, mode in picked.items()}
    occupied = {
        activity.name: problem.occupied(activity, resources) if ticks[activity.name] else set()
        for activity in problem.activities
    }
    line = dict(ticks)
    for name in reversed(problem.order):
        for p in problem.precedences:
            if p.before == name:
                line[name] = max(line[name], p.earliest(0, ticks[name], early[p.after]) + line[p.after])
    starts: dict[str, int] = {}
    ends: dict[str, int] = {}
    free = dict.fromkeys(range(problem.num_ranks), 0)
    while len(ends) < len(problem.activities):
        begins: dict[str, int] = {}
        for name in (activity.name for activity in problem.activities if activity.name not in ends):
            waits = [p for p in problem.precedences if p.after == name]
            if all(p.before in ends for p in waits):
                ready = [p.earliest(starts[p.before], ends[p.before], early[name]) for p in waits]
                begins[name] = max([0, *ready, *(free[rank] for rank in occupied[name])])
        name = min(begins, key=lambda one: (begins[one], -line[one]))
        starts[name], ends[name] = begins[name], begins[name] + ticks[name]
        free.update(dict.fromkeys(occupied[name], ends[name]))
    return ends


@seeds(4, all=24)
def test_schedules_are_those_of_the_choices_one_by_one(seed: int) -> None:
    problem = random_problem(seed, num_ranks=4, num_tasks=4, num_modes=3)
    names = [task.name for task in problem.tasks]
    owners = [[names.index(owner) for owner in problem.owners(name)] for name in names]
    table = Timetable(problem, owners, Crossing(problem))
    rows = list(every_choice(problem))[::7]
    columns = list(np.array(rows).T)
    lasts = table.durations(columns)
    ends, work = table.schedule(columns, lasts), table.work(columns, lasts)
    for number, picks in enumerate(rows):
        picked = {task.name: task.modes[index] for task, index in zip(problem.tasks, picks, strict=True)}
        assert dict(
            zip((activity.name for activity in problem.activities), ends[:, number].tolist(), strict=True)
        ) == one_by_one(problem, picked)
        resources = {name: mode.resource for name, mode in picked.items()}
        assert work[number] == sum(
            problem.duration(activity, picked) * len(problem.occupied(activity, resources))
            for activity in problem.activities
        )
        runs = {
            activity.name: picked[activity.task].ticks for activity in problem.activities if isinstance(activity, Run)
        }
        assert (
            runs.items()
            <= dict(zip((t.name for t in problem.activities), lasts.ticks[:, number].tolist(), strict=True)).items()
        )


def test_a_task_that_all_choices_have_alike_needs_one_index() -> None:
    problem = random_problem(3, num_ranks=4, num_tasks=4, num_modes=3)
    names = [task.name for task in problem.tasks]
    owners = [[names.index(owner) for owner in problem.owners(name)] for name in names]
    table = Timetable(problem, owners, Crossing(problem))
    every = np.arange(len(problem.tasks[1].modes))
    short = [np.zeros(1, dtype=np.int64), every, *[np.zeros(1, dtype=np.int64)] * 2]
    whole = [np.broadcast_to(column, len(every)) for column in short]
    assert (table.schedule(short, table.durations(short)) == table.schedule(whole, table.durations(whole))).all()
