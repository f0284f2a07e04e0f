"""The problem as an integer program in which every task may be on any aligned rank range of its size.

The size of the program does not depend on the number of ranks: `fixed_ranks_model.py` has variables for resources and
atoms, this model for the relations between rank ranges instead.

Sets
    c  tasks, each with modes o; a mode has a shape p (number of ranks, layout), ticks d, resident memory r, the
       part w of r that sharing saves, and transient memory m
    t  activities: runs of tasks, and transfers between the shapes of two tasks
Variables
    x[c, o], y[c, p]            task c uses mode o, has shape p
    inside, equal, intersect [c, c']  relations of the rank ranges of two tasks
    s[c, p]                     task c, of shape p, shares an earlier task's copy
    h[t]                        transfer t takes time
    start, ticks, end [t], makespan
Objective
    minimise the makespan, in coarse steps, or the memory units that a device needs
Constraints
    choice   sum_o x[c, o] = 1;  y follows x;  rank ranges are nested or disjoint, and parts fit
             s[c, p] only if an earlier owner has shape p and an equal rank range
    time     as in `fixed_ranks_model.py`; two activities whose rank ranges intersect do not overlap in time
    memory   on the rank range of every task c: sum of r - w s over the tasks around it, plus m of any of them,
             <= device; the ranks of a range that are in none of its parts hold no more
Redundant, for a tighter bound
    between two activities (or an activity and an end of the period) the cluster, and the rank range of every task, have
    time for all work that must lie there; at no time do the running tasks have more ranks than there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, permutations, product

from meshwright.planner.solver import cp_model
from meshwright.planner.solver.lower_bounds import followers, windows
from meshwright.planner.solver.model import (
    ActivityVariables,
    Incumbent,
    add_activity_variables,
    add_order_constraints,
    modes_on,
    resources,
)
from meshwright.planner.solver.problem import MAX_SUM, Activity, Mode, Problem, Resource, Run, Task, Transfer
from meshwright.planner.solver.result import Limits


@dataclass(frozen=True, kw_only=True)
class RankRanges:
    """The number of ranks of each task, and the relations of the rank ranges of two tasks, by task names."""

    size: Mapping[str, cp_model.IntVar]
    inside: Mapping[tuple[str, str], cp_model.IntVar]  # the first range is part of the second, or equal to it
    equal: Mapping[tuple[str, str], cp_model.IntVar]
    intersect: Mapping[tuple[str, str], cp_model.IntVar]  # one range is inside the other


def add_rank_ranges(model: cp_model.CpModel, problem: Problem, size: Mapping[str, cp_model.IntVar]) -> RankRanges:
    """Add the variables, and the rules that make them rank ranges of one cluster."""
    names = [task.name for task in problem.tasks]
    inside = {pair: model.new_bool_var("inside[{},{}]".format(*pair)) for pair in permutations(names, 2)}
    equal, intersect = {}, {}
    for one, other in combinations(names, 2):
        equal[one, other] = equal[other, one] = model.new_bool_var(f"equal[{one},{other}]")
        intersect[one, other] = intersect[other, one] = model.new_bool_var(f"meet[{one},{other}]")
    ranges = RankRanges(size=size, inside=inside, equal=equal, intersect=intersect)
    _equal_and_intersect_follow_inside(model, names, ranges)
    _a_part_is_smaller(model, names, ranges)
    _ranges_are_nested_or_disjoint(model, names, ranges)
    _parts_fit(model, problem, names, ranges)
    return ranges


def first_ranks(sizes: Mapping[str, int], inside: Mapping[tuple[str, str], bool]) -> dict[str, int]:
    """Lay the ranges out on ranks: every range holds its parts from its first rank on, the larger ones first."""
    first_free = {"": 0}  # the first rank of each range, and of the cluster (""), that no part occupies yet
    firsts: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        enclosing = [other for other in firsts if inside[name, other]]
        if equal := [other for other in enclosing if inside[other, name]]:
            firsts[name] = firsts[equal[0]]
            continue
        innermost = min(enclosing, key=lambda other: sizes[other], default="")
        firsts[name] = first_free[innermost]
        first_free[innermost] += sizes[name]
        first_free[name] = firsts[name]
    return firsts


def _equal_and_intersect_follow_inside(model: cp_model.CpModel, names: list[str], ranges: RankRanges) -> None:
    """Ranges are equal if each is inside the other, and intersect if one is."""
    for one, other in combinations(names, 2):
        forward, backward = ranges.inside[one, other], ranges.inside[other, one]
        equal, intersect = ranges.equal[one, other], ranges.intersect[one, other]
        model.add_bool_and(forward, backward).only_enforce_if(equal)
        model.add_bool_or(equal, ~forward, ~backward)
        model.add_bool_or(forward, backward).only_enforce_if(intersect)
        model.add_implication(forward, intersect)
        model.add_implication(backward, intersect)


def _a_part_is_smaller(model: cp_model.CpModel, names: list[str], ranges: RankRanges) -> None:
    """A range inside another has no more ranks, and fewer unless they are equal."""
    for one, other in permutations(names, 2):
        model.add(ranges.size[one] <= ranges.size[other]).only_enforce_if(ranges.inside[one, other])
        proper = (ranges.inside[one, other], ~ranges.inside[other, one])
        model.add(ranges.size[one] < ranges.size[other]).only_enforce_if(*proper)


def _ranges_are_nested_or_disjoint(model: cp_model.CpModel, names: list[str], ranges: RankRanges) -> None:
    """The inside relation is transitive, and two ranges around a third intersect."""
    for one, other, third in permutations(names, 3):
        model.add_bool_or(~ranges.inside[one, other], ~ranges.inside[other, third], ranges.inside[one, third])
        if other < third:
            model.add_bool_or(~ranges.inside[one, other], ~ranges.inside[one, third], ranges.intersect[other, third])


def _parts_fit(model: cp_model.CpModel, problem: Problem, names: list[str], ranges: RankRanges) -> None:
    """Together, the parts of a range, or of the cluster, have no more ranks than it.

    Parts of other parts do not count, and equal parts count once.
    """
    first = {name: model.new_bool_var(f"first[{name}]") for name in names}  # the first task among equal ranges
    for index, name in enumerate(names):
        earlier = [ranges.equal[other, name] for other in names[:index]]
        model.add_bool_or(first[name], *earlier)
        for equal in earlier:
            model.add_implication(equal, ~first[name])
    proper = {}
    for one, other in permutations(names, 2):
        proper[one, other] = model.new_bool_var(f"proper[{one},{other}]")
        model.add_implication(proper[one, other], ranges.inside[one, other])
        model.add_implication(proper[one, other], ~ranges.inside[other, one])
        model.add_bool_or(proper[one, other], ~ranges.inside[one, other], ranges.inside[other, one])
    for whole in (*names, None):
        part_ranks = []
        for part in names:
            if part == whole:
                continue
            between = [_between(model, proper, part, third, whole) for third in names if third not in (part, whole)]
            counts = model.new_bool_var(f"counts[{part},{whole}]")
            exempt = [] if whole is None else [~first[whole], ~proper[part, whole]]
            model.add_bool_or(counts, ~first[part], *exempt, *between)
            ranks = model.new_int_var(0, problem.num_ranks, f"taken[{part},{whole}]")
            model.add(ranks >= ranges.size[part]).only_enforce_if(counts)
            part_ranks.append(ranks)
        model.add(sum(part_ranks) <= (problem.num_ranks if whole is None else ranges.size[whole]))


def _between(
    model: cp_model.CpModel,
    proper: Mapping[tuple[str, str], cp_model.IntVar],
    part: str,
    third: str,
    whole: str | None,
) -> cp_model.IntVar:
    """Return a variable for whether a third range lies between a part and a whole.

    If the whole is the cluster, the third range only has to lie around the part.
    """
    if whole is None:
        return proper[part, third]
    between = model.new_bool_var(f"between[{part},{third},{whole}]")
    model.add_implication(between, proper[part, third])
    model.add_implication(between, proper[third, whole])
    return between


@dataclass(frozen=True, kw_only=True)
class Relations:
    """The variables of the picks and of the relations between rank ranges.

    Tasks are named; modes are numbered within their task.
    """

    pick: Mapping[tuple[str, int], cp_model.IntVar]
    has: Mapping[tuple[str, Resource], cp_model.IntVar]  # y: the task has the shape, a resource that starts at rank 0
    shares: Mapping[tuple[str, Resource], cp_model.IntVar]
    ranges: RankRanges


def add_relations(model: cp_model.CpModel, problem: Problem) -> Relations:
    """Add the variables of the picked modes, and the rules about them that do not depend on time."""
    pick = {
        (task.name, index): model.new_bool_var(f"x[{task.name},{index}]")
        for task in problem.tasks
        for index in range(len(task.modes))
    }
    for task in problem.tasks:
        model.add_exactly_one(_picks(pick, task))
    has = {
        (task.name, shape): model.new_bool_var(f"y[{task.name},{shape}]")
        for task in problem.tasks
        for shape in resources(task)
    }
    for task in problem.tasks:
        for shape, indices in modes_on(task).items():
            model.add(sum(pick[task.name, index] for index in indices) == has[task.name, shape])
    size = {c.name: _amount(model, pick, c, "size", lambda mode: mode.resource.num_ranks) for c in problem.tasks}
    ranges = add_rank_ranges(model, problem, size)
    return Relations(pick=pick, has=has, shares=_shares(model, problem, has, ranges), ranges=ranges)


def add_times(model: cp_model.CpModel, problem: Problem, x: Relations, latest: int) -> ActivityVariables:
    """Add the variables of when activities run, and the rules about them."""
    times = add_activity_variables(model, problem, latest)
    _a_run_takes_its_modes_ticks(model, problem, x, times)
    _a_transfer_takes_its_shapes_ticks(model, problem, x, times, latest)
    add_order_constraints(model, problem, x.pick, times)
    _activities_on_common_ranks_do_not_overlap(model, problem, x, times)
    _work_fits_between_its_neighbours(model, problem, x, times)
    _running_tasks_fit_into_the_cluster(model, problem, x, times)
    return times


def add_memory(model: cp_model.CpModel, problem: Problem, x: Relations, device: cp_model.LinearExprT) -> None:
    """Limit the copies on the rank range of every task, plus any one task's transient memory, to `device` units."""
    resident, transient = {}, {}
    for task in problem.tasks:
        saved = [
            next(mode.shared_units for mode in task.modes if mode.resource == shape) * shared
            for (name, shape), shared in x.shares.items()
            if name == task.name
        ]
        max_units = max(mode.resident_units for mode in task.modes)
        resident[task.name] = model.new_int_var(0, max_units, f"kept[{task.name}]")
        model.add(
            resident[task.name] == _amount(model, x.pick, task, "resident", lambda o: o.resident_units) - sum(saved)
        )
        transient[task.name] = _amount(model, x.pick, task, "transient", lambda mode: mode.transient_units)
    for name, range_resident in resident.items():
        others = [other for other in resident if other != name]
        outer_resident = []
        for other in others:
            units = model.new_int_var(0, MAX_SUM, f"there[{name},{other}]")
            model.add(units >= resident[other]).only_enforce_if(x.ranges.inside[name, other])
            outer_resident.append(units)
        held = model.new_int_var(0, MAX_SUM, f"held[{name}]")
        model.add(held == range_resident + sum(outer_resident))
        model.add(held + transient[name] <= device)
        for other in others:
            model.add(held + transient[other] <= device).only_enforce_if(x.ranges.inside[name, other])


def _picks(pick: Mapping[tuple[str, int], cp_model.IntVar], task: Task) -> list[cp_model.IntVar]:
    return [pick[task.name, index] for index in range(len(task.modes))]


def _amount(
    model: cp_model.CpModel,
    pick: Mapping[tuple[str, int], cp_model.IntVar],
    task: Task,
    name: str,
    amount_of: Callable[[Mode], int],
) -> cp_model.IntVar:
    """Return a variable that equals an amount of the picked mode."""
    amounts = [amount_of(mode) for mode in task.modes]
    variable = model.new_int_var_from_domain(cp_model.Domain.from_values(amounts), f"{name}[{task.name}]")
    model.add(cp_model.LinearExpr.weighted_sum(_picks(pick, task), amounts) == variable)
    return variable


def _shares(
    model: cp_model.CpModel, problem: Problem, has: Mapping[tuple[str, Resource], cp_model.IntVar], ranges: RankRanges
) -> dict[tuple[str, Resource], cp_model.IntVar]:
    """Return the variables s: a task shares an earlier task's copy only at an equal range and shape."""
    shares = {}
    for task in problem.tasks:
        for shape in resources(task):
            owner_choices = []
            for owner in problem.owners(task.name):
                if (owner, shape) in has:
                    shares_with_owner = model.new_bool_var(f"s[{task.name},{owner},{shape}]")
                    for condition in (ranges.equal[owner, task.name], has[owner, shape], has[task.name, shape]):
                        model.add_implication(shares_with_owner, condition)
                    owner_choices.append(shares_with_owner)
            if owner_choices:
                shared = shares[task.name, shape] = model.new_bool_var(f"s[{task.name},{shape}]")
                model.add_bool_or(*owner_choices, ~shared)
    return shares


def _a_run_takes_its_modes_ticks(
    model: cp_model.CpModel, problem: Problem, x: Relations, times: ActivityVariables
) -> None:
    """A run lasts as long as its task's mode."""
    by_name = {task.name: task for task in problem.tasks}
    for activity in problem.activities:
        if isinstance(activity, Run):
            task = by_name[activity.task]
            ticks = [mode.ticks for mode in task.modes]
            model.add(cp_model.LinearExpr.weighted_sum(_picks(x.pick, task), ticks) == times.ticks[activity.name])


def _a_transfer_takes_its_shapes_ticks(
    model: cp_model.CpModel, problem: Problem, x: Relations, times: ActivityVariables, latest: int
) -> None:
    """A transfer lasts as long as its shapes and common ranks require, and no time if its target shares a copy.

    Durations are clipped just above `latest`, because longer ones are too long in any case.
    """
    by_name = {task.name: task for task in problem.tasks}
    for activity in problem.activities:
        if not isinstance(activity, Transfer):
            continue
        happens, intersect = times.happens[activity.name], x.ranges.intersect[activity.source, activity.target]
        model.add(times.ticks[activity.name] == 0).only_enforce_if(~happens)
        for source, intersects in product(resources(by_name[activity.source]), (False, True)):
            terms = []
            for target in resources(by_name[activity.target]):
                if ticks := activity.ticks_between(source, target, source.overlap(target) if intersects else 0):
                    shared = x.shares.get((activity.target, target), 0)
                    terms.append(min(ticks, latest + 1) * (x.has[activity.target, target] - shared))
            if terms:
                conditions = (x.has[activity.source, source], intersect if intersects else ~intersect)
                model.add(times.ticks[activity.name] >= sum(terms)).only_enforce_if(*conditions)


def _activities_on_common_ranks_do_not_overlap(
    model: cp_model.CpModel, problem: Problem, x: Relations, times: ActivityVariables
) -> None:
    """Two activities on intersecting rank ranges do not overlap in time.

    Pairs that the precedences order already are skipped.
    """
    after = followers(problem)
    for one, other in combinations(problem.activities, 2):
        if other.name in after[one.name] or one.name in after[other.name]:
            continue
        not_happening = [~times.happens[activity.name] for activity in (one, other) if activity.name in times.happens]
        meet = model.new_bool_var(f"meet[{one.name},{other.name}]")
        for one_task, other_task in product(_tasks_of(one), _tasks_of(other)):
            disjoint = [] if one_task == other_task else [~x.ranges.intersect[one_task, other_task]]
            model.add_bool_or(meet, *disjoint, *not_happening)
        is_first = model.new_bool_var(f"before[{one.name},{other.name}]")
        model.add(times.start[other.name] >= times.end[one.name]).only_enforce_if(meet, is_first)
        model.add(times.start[one.name] >= times.end[other.name]).only_enforce_if(meet, ~is_first)


def _tasks_of(activity: Activity) -> tuple[str, ...]:
    """Return the tasks whose ranks an activity occupies."""
    if isinstance(activity, Run):
        return (activity.task,)
    return {"source": (activity.source,), "target": (activity.target,), "both": (activity.source, activity.target)}[
        activity.occupies
    ]


def _work_fits_between_its_neighbours(
    model: cp_model.CpModel, problem: Problem, x: Relations, times: ActivityVariables
) -> None:
    """In every window between activities, the cluster and every rank range have time for the work that lies there."""
    run = problem.runs
    share = {task.name: _share_of_work(problem, x, task) for task in problem.tasks}
    load = {task.name: _load(model, problem, x, times, task.name) for task in problem.tasks}
    for window in windows(problem):
        opens: cp_model.LinearExprT = times.end[window.after] if window.after else 0
        closes: cp_model.LinearExprT = times.start[window.before] if window.before else times.makespan
        inside = [run[name] for name in window.between if name in run]
        model.add(closes - opens >= sum(share[task] for task in inside))
        for ticks in load.values():
            model.add(closes - opens >= sum(ticks[task] for task in inside))


def _share_of_work(problem: Problem, x: Relations, task: Task) -> cp_model.LinearExprT:
    """Return the ticks that a task would take if its work were spread over all ranks, rounded down."""
    shares = [mode.ticks * mode.resource.num_ranks // problem.num_ranks for mode in task.modes]
    expression: cp_model.LinearExprT = cp_model.LinearExpr.weighted_sum(_picks(x.pick, task), shares)
    return expression


def _load(
    model: cp_model.CpModel, problem: Problem, x: Relations, times: ActivityVariables, name: str
) -> dict[str, cp_model.IntVar]:
    """Return for each task the ticks for which its run occupies all ranks of the named task's range."""
    ticks = {activity.task: times.ticks[activity.name] for activity in problem.activities if isinstance(activity, Run)}
    load = {name: ticks[name]} if name in ticks else {}
    for other, run_ticks in ticks.items():
        if other != name:
            load[other] = model.new_int_var(0, problem.horizon, f"load[{name},{other}]")
            model.add(load[other] >= run_ticks).only_enforce_if(x.ranges.inside[name, other])
    return load


def _running_tasks_fit_into_the_cluster(
    model: cp_model.CpModel, problem: Problem, x: Relations, times: ActivityVariables
) -> None:
    """At no time do the running tasks have more ranks than the cluster."""
    runs = [activity for activity in problem.activities if isinstance(activity, Run)]
    model.add_cumulative(
        [_interval(model, times, run.name) for run in runs],
        [x.ranges.size[run.task] for run in runs],
        problem.num_ranks,
    )


def _interval(model: cp_model.CpModel, times: ActivityVariables, name: str) -> cp_model.IntervalVar:
    return model.new_interval_var(times.start[name], times.ticks[name], times.end[name], f"run[{name}]")


@dataclass(frozen=True)
class RankRangeProgram:
    """The integer program of a problem in which every task may be on any rank range of its size."""

    cp: cp_model.CpModel
    x: Relations
    times: ActivityVariables

    @property
    def pick(self) -> Mapping[tuple[str, int], cp_model.IntVar]:
        return self.x.pick

    def first_ranks(self, solver: cp_model.CpSolver, picked: Mapping[str, Mode]) -> dict[str, int]:
        """Return the first rank of each task in a solution with these modes."""
        sizes = {name: mode.resource.num_ranks for name, mode in picked.items()}
        inside = {pair: bool(solver.value(variable)) for pair, variable in self.x.ranges.inside.items()}
        return first_ranks(sizes, inside)


class RankRangeModel:
    """The model of a problem in which every task may be on any rank range of its size."""

    def program(self, problem: Problem, latest: int) -> RankRangeProgram:
        """Return the integer program of all answers that end by the tick `latest`."""
        cp = cp_model.CpModel()
        x = add_relations(cp, problem)
        times = add_times(cp, problem, x, latest)
        add_memory(cp, problem, x, problem.device_units)
        return RankRangeProgram(cp, x, times)

    def memory_program(self, problem: Problem) -> tuple[cp_model.CpModel, cp_model.IntVar]:
        """Return the integer program without times that minimises the memory units of a device, and their variable."""
        cp = cp_model.CpModel()
        x = add_relations(cp, problem)
        device = cp.new_int_var(0, MAX_SUM, "device")
        add_memory(cp, problem, x, device)
        cp.minimize(device)
        return cp, device

    def local_search(self, _problem: Problem, _limits: Limits) -> Iterator[Incumbent]:
        """Yield nothing: without ranks there are no schedules to compare."""
        return iter(())

    def polished(self, _problem: Problem, _modes: tuple[Mode, ...]) -> Incumbent | None:
        """Return None: there is no local search."""
        return None
