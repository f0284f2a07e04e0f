"""The schedules of many choices at once are those that each has by itself, task after task."""

from __future__ import annotations

import numpy as np

from meshwright.planner.solver.greedy_schedule import Timetable
from meshwright.planner.solver.problem import CallRun, Option, Problem
from meshwright.planner.solver.rank_ranges import Crossing
from tests.planner.problems import every_choice, random_problem
from tests.seeds import seeds


def one_by_one(problem: Problem, picked: dict[str, Option]) -> dict[str, int]:
    """When each task ends where always the one that can start first is next, then the longest line, then the first."""
    ticks = {task.name: problem.duration(task, picked) for task in problem.tasks}
    early = {task.name: problem.early(task, picked) for task in problem.tasks}
    places = {name: option.place for name, option in picked.items()}
    occupied = {task.name: problem.occupied(task, places) if ticks[task.name] else set() for task in problem.tasks}
    line = dict(ticks)
    for name in reversed(problem.order):
        for p in problem.precedences:
            if p.before == name:
                line[name] = max(line[name], p.earliest(0, ticks[name], early[p.after]) + line[p.after])
    starts: dict[str, int] = {}
    ends: dict[str, int] = {}
    free = dict.fromkeys(range(problem.num_ranks), 0)
    while len(ends) < len(problem.tasks):
        begins: dict[str, int] = {}
        for name in (task.name for task in problem.tasks if task.name not in ends):
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
    problem = random_problem(seed, num_ranks=4, num_calls=4, num_options=3)
    names = [call.name for call in problem.calls]
    owners = [[names.index(owner) for owner in problem.owners(name)] for name in names]
    table = Timetable(problem, owners, Crossing(problem))
    rows = list(every_choice(problem))[::7]
    columns = list(np.array(rows).T)
    lasts = table.durations(columns)
    ends, work = table.schedule(columns, lasts), table.work(columns, lasts)
    for number, picks in enumerate(rows):
        picked = {call.name: call.options[index] for call, index in zip(problem.calls, picks, strict=True)}
        assert dict(zip((task.name for task in problem.tasks), ends[number].tolist(), strict=True)) == one_by_one(
            problem, picked
        )
        places = {name: option.place for name, option in picked.items()}
        assert work[number] == sum(
            problem.duration(task, picked) * len(problem.occupied(task, places)) for task in problem.tasks
        )
        runs = {task.name: picked[task.call].ticks for task in problem.tasks if isinstance(task, CallRun)}
        assert (
            runs.items()
            <= dict(zip((t.name for t in problem.tasks), lasts.ticks[number].tolist(), strict=True)).items()
        )


def test_a_call_that_all_choices_have_alike_needs_one_index() -> None:
    problem = random_problem(3, num_ranks=4, num_calls=4, num_options=3)
    names = [call.name for call in problem.calls]
    owners = [[names.index(owner) for owner in problem.owners(name)] for name in names]
    table = Timetable(problem, owners, Crossing(problem))
    every = np.arange(len(problem.calls[1].options))
    short = [np.zeros(1, dtype=np.int64), every, *[np.zeros(1, dtype=np.int64)] * 2]
    whole = [np.broadcast_to(column, len(every)) for column in short]
    assert (table.schedule(short, table.durations(short)) == table.schedule(whole, table.durations(whole))).all()
