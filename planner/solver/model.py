"""The interface of a model to the search, and the variables and constraints that both models of a problem share.

There are two models: `FixedRanksModel`, in which every mode has its own ranks, and `RankRangeModel`, in which only
relations between rank ranges count. The search (`planner.solver.search`) is the same for both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from meshwright.planner.solver import cp_model
from meshwright.planner.solver.problem import Activity, Mode, Problem, Resource, Run, Task, TimedPeriod, Transfer
from meshwright.planner.solver.result import Limits


class Program(Protocol):
    """A problem as an integer program without an objective, and how an answer is read from its solution."""

    @property
    def cp(self) -> cp_model.CpModel: ...

    @property
    def pick(self) -> Mapping[tuple[str, int], cp_model.IntVar]: ...

    @property
    def times(self) -> ActivityVariables: ...

    def first_ranks(self, solver: cp_model.CpSolver, picked: Mapping[str, Mode]) -> dict[str, int]:
        """Return the first rank of each task in a solution with these modes."""
        ...


class Incumbent(NamedTuple):
    """A mode of each task with its schedule: the length of the period and the start of each activity."""

    modes: tuple[Mode, ...]
    period: TimedPeriod


class Model(Protocol):
    """One way to state a problem as an integer program."""

    def program(self, problem: Problem, latest: int) -> Program:
        """Return the integer program of all answers that end by the tick `latest`."""
        ...

    def memory_program(self, problem: Problem) -> tuple[cp_model.CpModel, cp_model.IntVar]:
        """Return the integer program without times that minimises the memory units of a device, and their variable."""
        ...

    def local_search(self, problem: Problem, limits: Limits) -> Iterator[Incumbent]:
        """Yield better and better answers, found without an integer program; none if the model has no such search."""
        ...

    def polished(self, problem: Problem, modes: tuple[Mode, ...]) -> Incumbent | None:
        """Return the answer at which a descent from these modes ends, or None if there is none."""
        ...


@dataclass(frozen=True, kw_only=True)
class ActivityVariables:
    """The times of activities, by activity name."""

    happens: Mapping[str, cp_model.IntVar]  # h[t]: transfer t takes time
    start: Mapping[str, cp_model.IntVar]
    ticks: Mapping[str, cp_model.IntVar]
    end: Mapping[str, cp_model.IntVar]
    makespan: cp_model.IntVar


def add_activity_variables(model: cp_model.CpModel, problem: Problem, horizon: int) -> ActivityVariables:
    """Add the times of activities, all at most `horizon`, without the rules that connect them.

    Activities that take equally long whatever is picked share the variables of their ticks and of whether they happen.
    """
    representative, representatives = (
        problem.lasts_like,
        [activity for activity in problem.activities if problem.lasts_like[activity.name] == activity.name],
    )
    happens = {
        activity.name: model.new_bool_var(f"h[{activity.name}]")
        for activity in representatives
        if isinstance(activity, Transfer)
    }
    ticks = {t.name: model.new_int_var(*_ticks_range(problem, t, horizon), f"ticks[{t.name}]") for t in representatives}
    return ActivityVariables(
        happens={t.name: happens[representative[t.name]] for t in problem.activities if isinstance(t, Transfer)},
        start={
            activity.name: model.new_int_var(0, horizon, f"start[{activity.name}]") for activity in problem.activities
        },
        ticks={activity.name: ticks[representative[activity.name]] for activity in problem.activities},
        end={activity.name: model.new_int_var(0, horizon, f"end[{activity.name}]") for activity in problem.activities},
        makespan=model.new_int_var(0, horizon, "makespan"),
    )


def resources(task: Task) -> tuple[Resource, ...]:
    """Return the distinct resources of a task's modes."""
    return tuple(dict.fromkeys(mode.resource for mode in task.modes))


def modes_on(task: Task) -> dict[Resource, list[int]]:
    """Return the indices of the modes on each resource of a task."""
    indices: dict[Resource, list[int]] = {}
    for index, mode in enumerate(task.modes):
        indices.setdefault(mode.resource, []).append(index)
    return indices


def _ticks_range(problem: Problem, activity: Activity, horizon: int) -> tuple[int, int]:
    if isinstance(activity, Run):
        ticks = [mode.ticks for mode in problem.modes(activity.task)]
        return min(ticks), max(ticks)
    return 0, min(horizon, activity.ticks.longest)


def add_order_constraints(
    model: cp_model.CpModel, problem: Problem, pick: Mapping[tuple[str, int], cp_model.IntVar], times: ActivityVariables
) -> None:
    """Add the rules about when activities run that do not depend on their ranks."""
    _an_activity_ends_after_its_ticks(model, problem, times)
    _activities_wait_for_their_predecessors(model, problem, pick, times)
    _later_periods_wait_for_this_one(model, problem, pick, times)


def _an_activity_ends_after_its_ticks(model: cp_model.CpModel, problem: Problem, times: ActivityVariables) -> None:
    """An activity that started is not interrupted, and the makespan is no earlier than its end."""
    for activity in problem.activities:
        model.add(times.end[activity.name] == times.start[activity.name] + times.ticks[activity.name])
        model.add(times.makespan >= times.end[activity.name])


def _activities_wait_for_their_predecessors(
    model: cp_model.CpModel, problem: Problem, pick: Mapping[tuple[str, int], cp_model.IntVar], times: ActivityVariables
) -> None:
    """An activity starts after its inputs have ended and been transferred, or earlier if they are streamed to it."""
    task = problem.runs
    for before, after, min_lag, streamed, late in problem.precedences:
        lag = min_lag + _late_ticks(problem, pick, task[before]) if late else min_lag
        if not streamed:
            model.add(times.start[after] >= times.end[before] + lag)
            continue
        modes = problem.modes(task[after])
        picks = [pick[task[after], index] for index in range(len(modes))]
        early = cp_model.LinearExpr.weighted_sum(picks, [mode.early_ticks for mode in modes])
        rest = cp_model.LinearExpr.weighted_sum(picks, [mode.ticks - mode.early_ticks for mode in modes])
        model.add(times.start[after] + early >= times.end[before] + lag)
        model.add(times.end[after] >= times.end[before] + lag + rest)  # redundant, for the bound
        model.add(times.start[after] >= times.start[before])


def _later_periods_wait_for_this_one(
    model: cp_model.CpModel, problem: Problem, pick: Mapping[tuple[str, int], cp_model.IntVar], times: ActivityVariables
) -> None:
    """An activity starts after its inputs from earlier periods have arrived."""
    task = problem.runs
    for before, after, num_periods, lag, late in problem.carried:
        arrival = times.end[before] + lag + (_late_ticks(problem, pick, task[before]) if late else 0)
        model.add(num_periods * times.makespan + times.start[after] >= arrival)


def _late_ticks(problem: Problem, pick: Mapping[tuple[str, int], cp_model.IntVar], task: str) -> cp_model.LinearExprT:
    """Return the ticks from the end of a run until its late output is complete."""
    late = [mode.late_ticks for mode in problem.modes(task)]
    expression: cp_model.LinearExprT = cp_model.LinearExpr.weighted_sum(
        [pick[task, index] for index in range(len(late))], late
    )
    return expression
