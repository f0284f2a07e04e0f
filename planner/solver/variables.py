"""The variables of the model for fixed ranks, with the letters of `place_model.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ortools.sat.python import cp_model

from meshwright.planner.solver.problem import CallOptions, CallRun, Place, Problem, Task, Transfer


@dataclass(frozen=True, kw_only=True)
class TaskVariables:
    """The times of tasks, by task name."""

    happens: Mapping[str, cp_model.IntVar]  # h[t]: transfer t takes time
    start: Mapping[str, cp_model.IntVar]
    ticks: Mapping[str, cp_model.IntVar]
    end: Mapping[str, cp_model.IntVar]
    makespan: cp_model.IntVar


@dataclass(frozen=True, kw_only=True)
class Variables:
    """All variables. Calls are named, options are numbered within their call, atoms within the problem."""

    pick: Mapping[tuple[str, int], cp_model.IntVar]  # x[c, o]: call c uses its option o
    at: Mapping[tuple[str, Place], cp_model.IntVar]  # y[c, p]: call c is at place p
    covers: Mapping[tuple[str, int], cp_model.IntVar]  # z[c, a]: call c's ranks contain atom a
    shares: Mapping[tuple[str, Place], cp_model.IntVar]  # s[c, p]: call c uses an earlier call's copy at place p
    times: TaskVariables


def add_variables(model: cp_model.CpModel, problem: Problem) -> Variables:
    """Add every variable of the problem, without the rules that connect them."""
    return Variables(
        pick={
            (call.name, index): model.new_bool_var(f"x[{call.name},{index}]")
            for call in problem.calls
            for index in range(len(call.options))
        },
        at={
            (c.name, p): model.new_bool_var(f"y[{c.name},{p}]")
            for c in problem.calls
            if c.name in problem.tied
            for p in places(c)
        },
        covers={
            (call.name, atom): model.new_bool_var(f"z[{call.name},{atom}]")
            for call in problem.calls
            for atom in range(len(problem.atoms))
        },
        shares=_shares(model, problem),
        times=add_task_variables(model, problem, problem.horizon),
    )


def add_task_variables(model: cp_model.CpModel, problem: Problem, horizon: int) -> TaskVariables:
    """Add the times of tasks, all at most `horizon`, without the rules that connect them.

    Tasks that take equally long whatever is picked share the variables of their ticks and of whether they happen.
    """
    representative, representatives = (
        problem.lasts_like,
        [task for task in problem.tasks if problem.lasts_like[task.name] == task.name],
    )
    happens = {
        task.name: model.new_bool_var(f"h[{task.name}]") for task in representatives if isinstance(task, Transfer)
    }
    ticks = {t.name: model.new_int_var(*_range(problem, t, horizon), f"ticks[{t.name}]") for t in representatives}
    return TaskVariables(
        happens={t.name: happens[representative[t.name]] for t in problem.tasks if isinstance(t, Transfer)},
        start={task.name: model.new_int_var(0, horizon, f"start[{task.name}]") for task in problem.tasks},
        ticks={task.name: ticks[representative[task.name]] for task in problem.tasks},
        end={task.name: model.new_int_var(0, horizon, f"end[{task.name}]") for task in problem.tasks},
        makespan=model.new_int_var(0, horizon, "makespan"),
    )


def places(call: CallOptions) -> tuple[Place, ...]:
    """Return the distinct places of a call's options."""
    return tuple(dict.fromkeys(option.place for option in call.options))


def _shares(model: cp_model.CpModel, problem: Problem) -> dict[tuple[str, Place], cp_model.IntVar]:
    by_name = {call.name: set(places(call)) for call in problem.calls}
    return {
        (call.name, place): model.new_bool_var(f"s[{call.name},{place}]")
        for call in problem.calls
        for place in places(call)
        if any(place in by_name[owner] for owner in problem.owners(call.name))
    }


def _range(problem: Problem, task: Task, horizon: int) -> tuple[int, int]:
    if isinstance(task, CallRun):
        ticks = [option.ticks for option in problem.options(task.call)]
        return min(ticks), max(ticks)
    return 0, min(horizon, max(task.ticks.values(), default=0))
