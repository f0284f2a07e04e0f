"""The problem as an integer program, if every mode has fixed ranks.

Sets
    c  tasks, each with modes o; a mode has a resource p (ranks, layout), ticks d (the solver's unit of time),
       resident memory r, the part w of r that sharing saves, transient memory m, early ticks (by which it may start
       before the end of a producer that streams to it) and late ticks (from its end until all of its output exists)
    t  activities: runs of tasks, and transfers between the resources of two tasks
    a  atoms: groups of ranks that every mode covers entirely or not at all
Variables
    x[c, o], y[c, p], z[c, a]   task c uses mode o, is on resource p, covers atom a
    s[c, p]                     task c shares an earlier task's copy at p
    h[t]                        transfer t takes time
    start, ticks, end [t], makespan
Objective
    minimise the makespan, or the memory units that a device needs
Constraints
    choice   sum_o x[c, o] = 1;  y and z follow x;  s[c, p] <= y[c, p] and s[c, p] <= sum of y[p]
             over the earlier tasks that may own the copy;  the ranks of two tasks are disjoint or nested
    time     ticks of a run = sum_o d x[c, o];  ticks of a transfer from p >= sum_q d(p, q) (y[q] - s[q]) if y[p]
             start[t'] >= end[t] + lag for every precedence; if t streams to t', minus the mode's early ticks, and
             start[t'] >= start[t];  on every atom the activities that occupy it do not overlap
             k makespan >= end[t] + lag - start[t'] for a precedence of t over t' of the period k later, since the
             makespan is the length of a period; if t delivers late, the late ticks of its mode are part of the lag
    memory   for every atom a and task c over it: sum r x - sum w s + m of c <= device
Redundant, for a tighter bound
    between two activities (or the ends) every atom has time for all its work that must lie there; interchangeable
    halves of aligned rank ranges are filled from the left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from meshwright.planner.solver import cp_model
from meshwright.planner.solver.local_search import descent_from, descents
from meshwright.planner.solver.lower_bounds import windows
from meshwright.planner.solver.model import (
    ActivityVariables,
    Incumbent,
    add_activity_variables,
    add_order_constraints,
    modes_on,
    resources,
)
from meshwright.planner.solver.problem import MAX_SUM, Mode, Problem, Resource, Run, Task, Transfer
from meshwright.planner.solver.rank_ranges import Crossing, Swap, swaps
from meshwright.planner.solver.result import Limits


@dataclass(frozen=True, kw_only=True)
class Variables:
    """All variables. Tasks are named, modes are numbered within their task, atoms within the problem."""

    pick: Mapping[tuple[str, int], cp_model.IntVar]  # x[c, o]: task c uses its mode o
    at: Mapping[tuple[str, Resource], cp_model.IntVar]  # y[c, p]: task c is at resource p
    covers: Mapping[tuple[str, int], cp_model.IntVar]  # z[c, a]: task c's ranks contain atom a
    shares: Mapping[tuple[str, Resource], cp_model.IntVar]  # s[c, p]: task c uses an earlier task's copy at resource p
    times: ActivityVariables


def add_variables(model: cp_model.CpModel, problem: Problem, latest: int) -> Variables:
    """Add every variable of the problem, all times at most `latest`, without the rules that connect them."""
    return Variables(
        pick={
            (task.name, index): model.new_bool_var(f"x[{task.name},{index}]")
            for task in problem.tasks
            for index in range(len(task.modes))
        },
        at={
            (c.name, p): model.new_bool_var(f"y[{c.name},{p}]")
            for c in problem.tasks
            if c.name in problem.tied
            for p in resources(c)
        },
        covers={
            (task.name, atom): model.new_bool_var(f"z[{task.name},{atom}]")
            for task in problem.tasks
            for atom in range(len(problem.atoms))
        },
        shares=_shares(model, problem),
        times=add_activity_variables(model, problem, latest),
    )


def _shares(model: cp_model.CpModel, problem: Problem) -> dict[tuple[str, Resource], cp_model.IntVar]:
    by_name = {task.name: set(resources(task)) for task in problem.tasks}
    return {
        (task.name, resource): model.new_bool_var(f"s[{task.name},{resource}]")
        for task in problem.tasks
        for resource in resources(task)
        if any(resource in by_name[owner] for owner in problem.owners(task.name))
    }


def add_choice_constraints(model: cp_model.CpModel, problem: Problem, x: Variables) -> None:
    """Add the rules about what is picked, which do not depend on time."""
    _one_mode_per_task(model, problem, x)
    _a_resource_is_where_the_mode_is(model, problem, x)
    _atoms_are_covered_by_the_mode(model, problem, x)
    _a_shared_copy_has_an_earlier_owner(model, problem, x)
    _ranks_are_nested_or_disjoint(model, problem, x)
    _siblings_are_filled_from_the_left(model, problem, x)


def add_time_constraints(model: cp_model.CpModel, problem: Problem, x: Variables) -> None:
    """Add the rules about when activities run."""
    _a_run_takes_its_modes_ticks(model, problem, x)
    _a_transfer_takes_its_resources_ticks(model, problem, x)
    add_order_constraints(model, problem, x.pick, x.times)
    _a_rank_does_one_activity_at_a_time(model, problem, x)
    _work_fits_between_its_neighbours(model, problem, x)


def add_memory_constraints(
    model: cp_model.CpModel, problem: Problem, x: Variables, device: cp_model.LinearExprT
) -> None:
    """Require that on every atom the copies there and any one task's transient memory fit in `device` units."""
    shared = {(task.name, o.resource): o.shared_units for task in problem.tasks for o in task.modes}
    for atom, ranks in enumerate(problem.atoms):
        resident = [
            -shared[task, resource] * shares
            for (task, resource), shares in x.shares.items()
            if resource.first_rank <= ranks.start < resource.first_rank + resource.num_ranks
        ]
        transient = []
        for task in problem.tasks:
            if over := problem.modes_over[task.name, atom]:
                picks, modes = [x.pick[task.name, index] for index in over], [task.modes[index] for index in over]
                resident.append(cp_model.LinearExpr.weighted_sum(picks, [mode.resident_units for mode in modes]))
                transient.append(cp_model.LinearExpr.weighted_sum(picks, [mode.transient_units for mode in modes]))
        total_resident = model.new_int_var(0, MAX_SUM, f"resident[{atom}]")
        model.add(total_resident == sum(resident))
        for units in transient:
            model.add(total_resident + units <= device)


def _one_mode_per_task(model: cp_model.CpModel, problem: Problem, x: Variables) -> None:
    """Each task picks exactly one of its modes."""
    for task in problem.tasks:
        model.add_exactly_one(x.pick[task.name, index] for index in range(len(task.modes)))


def _a_resource_is_where_the_mode_is(model: cp_model.CpModel, problem: Problem, x: Variables) -> None:
    """A task is on a resource exactly if it picked a mode there."""
    for task in problem.tasks:
        if task.name in problem.tied:
            for resource, indices in modes_on(task).items():
                model.add(sum(x.pick[task.name, index] for index in indices) == x.at[task.name, resource])


def _atoms_are_covered_by_the_mode(model: cp_model.CpModel, problem: Problem, x: Variables) -> None:
    """A task covers an atom exactly if its mode's ranks contain it."""
    for task in problem.tasks:
        for atom in range(len(problem.atoms)):
            picks = [x.pick[task.name, index] for index in problem.modes_over[task.name, atom]]
            model.add(sum(picks) == x.covers[task.name, atom])


def _a_shared_copy_has_an_earlier_owner(model: cp_model.CpModel, problem: Problem, x: Variables) -> None:
    """A task shares a copy only at its own resource, and only if an earlier task of its group is there too."""
    for (task, resource), shared in x.shares.items():
        owners = [x.at[owner, resource] for owner in problem.owners(task) if (owner, resource) in x.at]
        model.add(shared <= x.at[task, resource])
        model.add(shared <= sum(owners))


def _ranks_are_nested_or_disjoint(model: cp_model.CpModel, problem: Problem, x: Variables) -> None:
    """The ranks of two tasks are disjoint or nested."""
    crossing = Crossing(problem)
    picks_on: list[dict[int, list[cp_model.IntVar]]] = []
    for task, numbers in zip(problem.tasks, crossing.numbers, strict=True):
        picks_on.append({})
        for index, number in enumerate(numbers.tolist()):
            picks_on[-1].setdefault(number, []).append(x.pick[task.name, index])
    crossed_by = [set(np.flatnonzero(row).tolist()) for row in crossing.crosses]
    for one, other in combinations(picks_on, 2):
        for number, picks in one.items():
            crossing_picks = [pick for crossed in crossed_by[number] & other.keys() for pick in other[crossed]]
            if crossing_picks:
                model.add(sum(picks) + sum(crossing_picks) <= 1)


def _siblings_are_filled_from_the_left(model: cp_model.CpModel, problem: Problem, x: Variables) -> None:
    """The first task inside either of two interchangeable rank ranges is inside the left one."""

    picks_on: dict[str, dict[range, list[cp_model.IntVar]]] = {task.name: {} for task in problem.tasks}
    for task in problem.tasks:
        for resource, indices in modes_on(task).items():
            picks_on[task.name].setdefault(resource.ranks, []).extend(x.pick[task.name, index] for index in indices)

    def picks_inside(task: str, rank_range: range) -> list[cp_model.IntVar]:
        inside = (
            picks
            for ranks, picks in picks_on[task].items()
            if rank_range.start <= ranks.start and ranks.stop <= rank_range.stop
        )
        return [pick for picks in inside for pick in picks]

    def order_siblings(swap: Swap) -> None:
        earlier: list[cp_model.IntVar] = []
        for task in problem.tasks:
            model.add(sum(picks_inside(task.name, swap.right)) <= sum(earlier))
            earlier += picks_inside(task.name, swap.left)

    for swap in swaps(problem):
        order_siblings(swap)


def _a_run_takes_its_modes_ticks(model: cp_model.CpModel, problem: Problem, x: Variables) -> None:
    """A run lasts as long as its task's mode."""
    for activity in problem.activities:
        if isinstance(activity, Run) and problem.lasts_like[activity.name] == activity.name:
            modes = problem.modes(activity.task)
            model.add(
                x.times.ticks[activity.name] == sum(o.ticks * x.pick[activity.task, i] for i, o in enumerate(modes))
            )


def _a_transfer_takes_its_resources_ticks(model: cp_model.CpModel, problem: Problem, x: Variables) -> None:
    """A transfer lasts as long as its two resources require, and no time if its target shares a copy.

    Resources from (or to) which transfers take equally long are handled together.
    """
    by_name = {task.name: task for task in problem.tasks}
    for activity in problem.activities:
        if not isinstance(activity, Transfer) or problem.lasts_like[activity.name] != activity.name:
            continue
        model.add(x.times.ticks[activity.name] == 0).only_enforce_if(~x.times.happens[activity.name])
        sources, targets = (resources(by_name[name]) for name in (activity.source, activity.target))
        durations = [
            [
                activity.ticks_between(source_resource, target_resource, source_resource.overlap(target_resource))
                for target_resource in targets
            ]
            for source_resource in sources
        ]
        arrival_terms = [
            (
                ticks,
                _any(
                    model,
                    [x.at[activity.target, target] - x.shares.get((activity.target, target), 0) for target in group],
                ),
            )
            for ticks, group in _grouped(targets, zip(*durations, strict=True)).items()
        ]
        for group in _grouped(sources, map(tuple, durations)).values():
            first = sources.index(group[0])
            transfer_ticks = sum(ticks[first] * is_target for ticks, is_target in arrival_terms if ticks[first])
            is_source = _any(model, [x.at[activity.source, resource] for resource in group])
            model.add(x.times.ticks[activity.name] >= transfer_ticks).only_enforce_if(is_source)


def _grouped(items: Iterable[Resource], keys: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], list[Resource]]:
    """Group the resources by their keys."""
    groups: dict[tuple[int, ...], list[Resource]] = {}
    for resource, key in zip(items, keys, strict=True):
        groups.setdefault(key, []).append(resource)
    return groups


def _any(model: cp_model.CpModel, terms: Sequence[cp_model.LinearExprT]) -> cp_model.IntVar:
    """Return a variable that is 1 if one of the terms is 1; at most one of them may be."""
    is_any = model.new_bool_var("any")
    model.add(sum(terms) == is_any)
    return is_any


def _a_rank_does_one_activity_at_a_time(model: cp_model.CpModel, problem: Problem, x: Variables) -> None:
    """The activities that occupy an atom do not overlap in time."""
    for atom in range(len(problem.atoms)):
        intervals = []
        occupies: dict[tuple[str, str], cp_model.IntVar] = {}
        for activity in problem.activities:
            if isinstance(activity, Run):
                is_here = x.covers[activity.task, atom]
            else:
                key = problem.lasts_like[activity.name], activity.occupies
                if key not in occupies:
                    occupies[key] = _occupies(model, activity, atom, x)
                is_here = occupies[key]
            parts = x.times.start[activity.name], x.times.ticks[activity.name], x.times.end[activity.name]
            intervals.append(model.new_optional_interval_var(*parts, is_here, f"{activity.name}@{atom}"))
        model.add_no_overlap(intervals)


def _occupies(model: cp_model.CpModel, activity: Transfer, atom: int, x: Variables) -> cp_model.IntVar:
    """Return a variable that is 1 if a transfer that happens is on an atom; transfers of equal duration share it."""
    is_here = model.new_bool_var(f"occupies[{activity.name},{atom}]")
    ends = {"source": [activity.source], "target": [activity.target], "both": [activity.source, activity.target]}
    for task in ends[activity.occupies]:
        model.add_bool_or(is_here, ~x.times.happens[activity.name], ~x.covers[task, atom])
    return is_here


def _work_fits_between_its_neighbours(model: cp_model.CpModel, problem: Problem, x: Variables) -> None:
    """Between two activities, an atom has time for all its work that must lie there; redundant, for a tighter bound."""
    run = problem.runs
    for atom in range(len(problem.atoms)):
        load = {task.name: _load(model, problem, x, task, atom) for task in problem.tasks}
        for window in windows(problem):
            opens = x.times.end[window.after] if window.after else 0
            closes = x.times.start[window.before] if window.before else x.times.makespan
            model.add(closes - opens >= sum(load[run[name]] for name in window.between if name in run))


def _load(model: cp_model.CpModel, problem: Problem, x: Variables, task: Task, atom: int) -> cp_model.IntVar:
    """Return a variable for the ticks of one run of a task on an atom."""
    over = problem.modes_over[task.name, atom]
    ticks = [task.modes[index].ticks for index in over]
    load = model.new_int_var(0, max(ticks, default=0), f"load[{task.name},{atom}]")
    picks = [x.pick[task.name, index] for index in over]
    model.add(cp_model.LinearExpr.weighted_sum(picks, ticks) == load)
    return load


@dataclass(frozen=True)
class FixedRanksProgram:
    """The program of a problem in which every mode has its own ranks."""

    cp: cp_model.CpModel
    x: Variables

    @property
    def pick(self) -> Mapping[tuple[str, int], cp_model.IntVar]:
        return self.x.pick

    @property
    def times(self) -> ActivityVariables:
        return self.x.times

    def first_ranks(self, _solver: cp_model.CpSolver, picked: Mapping[str, Mode]) -> dict[str, int]:
        """Return the first rank of each task: that of its mode."""
        return {name: mode.resource.first_rank for name, mode in picked.items()}


class FixedRanksModel:
    """The model of a problem in which every mode has its own ranks."""

    def program(self, problem: Problem, latest: int) -> FixedRanksProgram:
        """Return the program of all answers that end by the tick `latest`."""
        cp = cp_model.CpModel()
        x = add_variables(cp, problem, latest)
        add_choice_constraints(cp, problem, x)
        add_time_constraints(cp, problem, x)
        add_memory_constraints(cp, problem, x, problem.device_units)
        return FixedRanksProgram(cp, x)

    def memory_program(self, problem: Problem) -> tuple[cp_model.CpModel, cp_model.IntVar]:
        """Return the program without times, which minimises the memory units of a device, and their variable."""
        cp = cp_model.CpModel()
        x = add_variables(cp, problem, problem.horizon)
        device = cp.new_int_var(0, MAX_SUM, "device")
        add_choice_constraints(cp, problem, x)
        add_memory_constraints(cp, problem, x, device)
        cp.minimize(device)
        return cp, device

    def local_search(self, problem: Problem, limits: Limits) -> Iterator[Incumbent]:
        """Yield better and better answers of descents from the fastest, the smallest and random modes."""
        return descents(problem, limits)

    def polished(self, problem: Problem, modes: tuple[Mode, ...]) -> Incumbent | None:
        """Return the answer at which a descent from these modes ends, or None if it does not fit in memory."""
        return descent_from(problem, modes)
