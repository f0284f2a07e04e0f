"""The problem as an integer program in which every call may be on any aligned rank range of its size.

The size of the program does not depend on the number of ranks: `fixed_ranks_model.py` has variables for places and
atoms, this model for the relations between rank ranges instead.

Sets
    c  calls, each with options o; an option has a shape p (number of ranks, layout), ticks d, resident memory r, the
       part w of r that sharing saves, and transient memory m
    t  tasks: runs of calls, and transfers between the shapes of two calls
Variables
    x[c, o], y[c, p]            call c uses option o, has shape p
    inside, equal, intersect [c, c']  relations of the rank ranges of two calls
    s[c, p]                     call c, of shape p, shares an earlier call's copy
    h[t]                        transfer t takes time
    start, ticks, end [t], makespan
Objective
    minimise the makespan, in coarse steps, or the memory units that a device needs
Constraints
    choice   sum_o x[c, o] = 1;  y follows x;  rank ranges are nested or disjoint, and parts fit
             s[c, p] only if an earlier owner has shape p and an equal rank range
    time     as in `fixed_ranks_model.py`; two tasks whose rank ranges intersect do not overlap in time
    memory   on the rank range of every call c: sum of r - w s over the calls around it, plus m of any of them,
             <= device; the ranks of a range that are in none of its parts hold no more
Redundant, for a tighter bound
    between two tasks (or the ends) the cluster, and the rank range of every call, have time for all work that must
    lie there; at no time do the running calls have more ranks than there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations, permutations, product

from meshwright.planner.solver import cp_model
from meshwright.planner.solver.fixed_ranks_model import TaskVariables, add_order_constraints, add_task_variables, places
from meshwright.planner.solver.lower_bounds import followers, windows
from meshwright.planner.solver.problem import MAX_SUM, CallOptions, CallRun, Option, Place, Problem, Task, Transfer


@dataclass(frozen=True, kw_only=True)
class RankRanges:
    """The number of ranks of each call, and the relations of the rank ranges of two calls, by call names."""

    size: Mapping[str, cp_model.IntVar]
    inside: Mapping[tuple[str, str], cp_model.IntVar]  # the first range is part of the second, or equal to it
    equal: Mapping[tuple[str, str], cp_model.IntVar]
    intersect: Mapping[tuple[str, str], cp_model.IntVar]  # one range is inside the other


def add_rank_ranges(model: cp_model.CpModel, problem: Problem, size: Mapping[str, cp_model.IntVar]) -> RankRanges:
    """Add the variables, and the rules that make them rank ranges of one cluster."""
    names = [call.name for call in problem.calls]
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
    """The largest parts of a range, or of the cluster, together have no more ranks than it; equal parts count once."""
    first = {name: model.new_bool_var(f"first[{name}]") for name in names}  # the first call among equal ranges
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

    Calls are named; options are numbered within their call.
    """

    pick: Mapping[tuple[str, int], cp_model.IntVar]
    has: Mapping[tuple[str, Place], cp_model.IntVar]  # y: the call has the shape, a place that starts at rank 0
    shares: Mapping[tuple[str, Place], cp_model.IntVar]
    ranges: RankRanges


def add_relations(model: cp_model.CpModel, problem: Problem) -> Relations:
    """Add the variables of the picked options, and the rules about them that do not depend on time."""
    pick = {
        (call.name, index): model.new_bool_var(f"x[{call.name},{index}]")
        for call in problem.calls
        for index in range(len(call.options))
    }
    for call in problem.calls:
        model.add_exactly_one(_picks(pick, call))
    has = {
        (call.name, shape): model.new_bool_var(f"y[{call.name},{shape}]")
        for call in problem.calls
        for shape in places(call)
    }
    for call in problem.calls:
        for shape in places(call):
            picks = [pick[call.name, index] for index, option in enumerate(call.options) if option.place == shape]
            model.add(sum(picks) == has[call.name, shape])
    size = {c.name: _amount(model, pick, c, "size", lambda option: option.place.num_ranks) for c in problem.calls}
    ranges = add_rank_ranges(model, problem, size)
    return Relations(pick=pick, has=has, shares=_shares(model, problem, has, ranges), ranges=ranges)


def add_times(model: cp_model.CpModel, problem: Problem, x: Relations, latest: int) -> TaskVariables:
    """Add the variables of when tasks run, and the rules about them."""
    times = add_task_variables(model, problem, latest)
    _a_run_takes_its_options_ticks(model, problem, x, times)
    _a_transfer_takes_its_shapes_ticks(model, problem, x, times, latest)
    add_order_constraints(model, problem, x.pick, times)
    _tasks_on_common_ranks_do_not_overlap(model, problem, x, times)
    _work_fits_between_its_neighbours(model, problem, x, times)
    _running_calls_fit_into_the_cluster(model, problem, x, times)
    return times


def add_memory(model: cp_model.CpModel, problem: Problem, x: Relations, device: cp_model.LinearExprT) -> None:
    """Limit the copies on the rank range of every call, plus any one call's transient memory, to `device` units."""
    resident, transient = {}, {}
    for call in problem.calls:
        saved = [
            next(option.shared_units for option in call.options if option.place == shape) * shared
            for (name, shape), shared in x.shares.items()
            if name == call.name
        ]
        max_units = max(option.resident_units for option in call.options)
        resident[call.name] = model.new_int_var(0, max_units, f"kept[{call.name}]")
        model.add(
            resident[call.name] == _amount(model, x.pick, call, "resident", lambda o: o.resident_units) - sum(saved)
        )
        transient[call.name] = _amount(model, x.pick, call, "transient", lambda option: option.transient_units)
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


def _picks(pick: Mapping[tuple[str, int], cp_model.IntVar], call: CallOptions) -> list[cp_model.IntVar]:
    return [pick[call.name, index] for index in range(len(call.options))]


def _amount(
    model: cp_model.CpModel,
    pick: Mapping[tuple[str, int], cp_model.IntVar],
    call: CallOptions,
    name: str,
    amount_of: Callable[[Option], int],
) -> cp_model.IntVar:
    """Return a variable that equals an amount of the picked option."""
    amounts = [amount_of(option) for option in call.options]
    variable = model.new_int_var_from_domain(cp_model.Domain.from_values(amounts), f"{name}[{call.name}]")
    model.add(cp_model.LinearExpr.weighted_sum(_picks(pick, call), amounts) == variable)
    return variable


def _shares(
    model: cp_model.CpModel, problem: Problem, has: Mapping[tuple[str, Place], cp_model.IntVar], ranges: RankRanges
) -> dict[tuple[str, Place], cp_model.IntVar]:
    """Return the variables s: a call shares an earlier call's copy only at an equal range and shape."""
    shares = {}
    for call in problem.calls:
        for shape in places(call):
            owner_choices = []
            for owner in problem.owners(call.name):
                if (owner, shape) in has:
                    shares_with_owner = model.new_bool_var(f"s[{call.name},{owner},{shape}]")
                    for condition in (ranges.equal[owner, call.name], has[owner, shape], has[call.name, shape]):
                        model.add_implication(shares_with_owner, condition)
                    owner_choices.append(shares_with_owner)
            if owner_choices:
                shared = shares[call.name, shape] = model.new_bool_var(f"s[{call.name},{shape}]")
                model.add_bool_or(*owner_choices, ~shared)
    return shares


def _a_run_takes_its_options_ticks(
    model: cp_model.CpModel, problem: Problem, x: Relations, times: TaskVariables
) -> None:
    """A run lasts as long as its call's option."""
    by_name = {call.name: call for call in problem.calls}
    for task in problem.tasks:
        if isinstance(task, CallRun):
            call = by_name[task.call]
            ticks = [option.ticks for option in call.options]
            model.add(cp_model.LinearExpr.weighted_sum(_picks(x.pick, call), ticks) == times.ticks[task.name])


def _a_transfer_takes_its_shapes_ticks(
    model: cp_model.CpModel, problem: Problem, x: Relations, times: TaskVariables, latest: int
) -> None:
    """A transfer lasts as long as its shapes and common ranks require, and no time if its target shares a copy.

    Durations are clipped just above `latest`, because longer ones are too long in any case.
    """
    by_name = {call.name: call for call in problem.calls}
    for task in problem.tasks:
        if not isinstance(task, Transfer):
            continue
        happens, intersect = times.happens[task.name], x.ranges.intersect[task.source, task.target]
        model.add(times.ticks[task.name] == 0).only_enforce_if(~happens)
        for source, intersects in product(places(by_name[task.source]), (False, True)):
            terms = []
            for target in places(by_name[task.target]):
                if ticks := task.ticks_between(source, target, source.overlap(target) if intersects else 0):
                    shared = x.shares.get((task.target, target), 0)
                    terms.append(min(ticks, latest + 1) * (x.has[task.target, target] - shared))
            if terms:
                conditions = (x.has[task.source, source], intersect if intersects else ~intersect)
                model.add(times.ticks[task.name] >= sum(terms)).only_enforce_if(*conditions)


def _tasks_on_common_ranks_do_not_overlap(
    model: cp_model.CpModel, problem: Problem, x: Relations, times: TaskVariables
) -> None:
    """Two tasks on intersecting rank ranges do not overlap in time.

    Pairs that the precedences order already are skipped.
    """
    after = followers(problem)
    for one, other in combinations(problem.tasks, 2):
        if other.name in after[one.name] or one.name in after[other.name]:
            continue
        not_happening = [~times.happens[task.name] for task in (one, other) if task.name in times.happens]
        meet = model.new_bool_var(f"meet[{one.name},{other.name}]")
        for one_call, other_call in product(_calls_of(one), _calls_of(other)):
            disjoint = [] if one_call == other_call else [~x.ranges.intersect[one_call, other_call]]
            model.add_bool_or(meet, *disjoint, *not_happening)
        is_first = model.new_bool_var(f"before[{one.name},{other.name}]")
        model.add(times.start[other.name] >= times.end[one.name]).only_enforce_if(meet, is_first)
        model.add(times.start[one.name] >= times.end[other.name]).only_enforce_if(meet, ~is_first)


def _calls_of(task: Task) -> tuple[str, ...]:
    """Return the calls whose ranks a task occupies."""
    if isinstance(task, CallRun):
        return (task.call,)
    return {"source": (task.source,), "target": (task.target,), "both": (task.source, task.target)}[task.occupies]


def _work_fits_between_its_neighbours(
    model: cp_model.CpModel, problem: Problem, x: Relations, times: TaskVariables
) -> None:
    """Between two tasks, or the ends, the cluster and every rank range have time for the work that lies there."""
    run = problem.runs
    share = {call.name: _share_of_work(problem, x, call) for call in problem.calls}
    load = {call.name: _load(model, problem, x, times, call.name) for call in problem.calls}
    for window in windows(problem):
        opens: cp_model.LinearExprT = times.end[window.after] if window.after else 0
        closes: cp_model.LinearExprT = times.start[window.before] if window.before else times.makespan
        inside = [run[name] for name in window.between if name in run]
        model.add(closes - opens >= sum(share[call] for call in inside))
        for ticks in load.values():
            model.add(closes - opens >= sum(ticks[call] for call in inside))


def _share_of_work(problem: Problem, x: Relations, call: CallOptions) -> cp_model.LinearExprT:
    """Return the ticks that a call would take if its work were spread over all ranks, rounded down."""
    shares = [option.ticks * option.place.num_ranks // problem.num_ranks for option in call.options]
    expression: cp_model.LinearExprT = cp_model.LinearExpr.weighted_sum(_picks(x.pick, call), shares)
    return expression


def _load(
    model: cp_model.CpModel, problem: Problem, x: Relations, times: TaskVariables, name: str
) -> dict[str, cp_model.IntVar]:
    """Return for each call the ticks for which its run occupies all ranks of the named call's range."""
    ticks = {task.call: times.ticks[task.name] for task in problem.tasks if isinstance(task, CallRun)}
    load = {name: ticks[name]} if name in ticks else {}
    for other, run_ticks in ticks.items():
        if other != name:
            load[other] = model.new_int_var(0, problem.horizon, f"load[{name},{other}]")
            model.add(load[other] >= run_ticks).only_enforce_if(x.ranges.inside[name, other])
    return load


def _running_calls_fit_into_the_cluster(
    model: cp_model.CpModel, problem: Problem, x: Relations, times: TaskVariables
) -> None:
    """At no time do the running calls have more ranks than the cluster."""
    runs = [task for task in problem.tasks if isinstance(task, CallRun)]
    model.add_cumulative(
        [_interval(model, times, run.name) for run in runs],
        [x.ranges.size[run.call] for run in runs],
        problem.num_ranks,
    )


def _interval(model: cp_model.CpModel, times: TaskVariables, name: str) -> cp_model.IntervalVar:
    return model.new_interval_var(times.start[name], times.ticks[name], times.end[name], f"run[{name}]")


def rank_range_makespan_model(problem: Problem, latest: int) -> tuple[cp_model.CpModel, Relations, TaskVariables]:
    """Build the model of all solutions that end by the tick `latest`; the caller sets the objective."""
    model = cp_model.CpModel()
    x = add_relations(model, problem)
    times = add_times(model, problem, x, latest)
    add_memory(model, problem, x, problem.device_units)
    return model, x, times


def rank_range_memory_model(problem: Problem) -> tuple[cp_model.CpModel, Relations, cp_model.IntVar]:
    """Build the model of the picked options, without times, that minimises the memory units of a device."""
    model = cp_model.CpModel()
    x = add_relations(model, problem)
    device = model.new_int_var(0, MAX_SUM, "device")
    add_memory(model, problem, x, device)
    model.minimize(device)
    return model, x, device
