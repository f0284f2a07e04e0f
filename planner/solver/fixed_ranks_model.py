"""The problem as an integer program, if every option has fixed ranks.

Sets
    c  calls, each with options o; an option has a place p (ranks, layout), ticks d (the solver's unit of time),
       resident memory r, the part w of r that sharing saves, transient memory m, early ticks (by which it may start
       before the end of a producer that streams to it) and late ticks (from its end until all of its output exists)
    t  tasks: runs of calls, and transfers between the places of two calls
    a  atoms: groups of ranks that every option covers entirely or not at all
Variables
    x[c, o], y[c, p], z[c, a]   call c uses option o, is at place p, covers atom a
    s[c, p]                     call c shares an earlier call's copy at p
    h[t]                        transfer t takes time
    start, ticks, end [t], makespan
Objective
    minimise the makespan, or the memory units that a device needs
Constraints
    choice   sum_o x[c, o] = 1;  y and z follow x;  s[c, p] <= y[c, p] and s[c, p] <= sum of y[p]
             over the earlier calls that may own the copy
    time     ticks of a run = sum_o d x[c, o];  ticks of a transfer from p >= sum_q d(p, q) (y[q] - s[q]) if y[p]
             start[t'] >= end[t] + lag for every precedence; if t streams to t', minus the option's early ticks, and
             start[t'] >= start[t];  on every atom the tasks that occupy it do not overlap
             k makespan >= end[t] + lag - start[t'] for a precedence of t over t' of the period k later; if t
             delivers late, the late ticks of its option are part of the lag
    memory   for every atom a and call c over it: sum r x - sum w s + m of c <= device
Redundant, for a tighter bound
    between two tasks (or the ends) every atom has time for all its work that must lie there; interchangeable halves
    of aligned rank ranges are filled from the left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from meshwright.planner.solver import cp_model
from meshwright.planner.solver.lower_bounds import windows
from meshwright.planner.solver.problem import MAX_SUM, CallOptions, CallRun, Place, Problem, Task, Transfer
from meshwright.planner.solver.rank_ranges import Crossing, Swap, swaps


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
    ticks = {t.name: model.new_int_var(*_ticks_range(problem, t, horizon), f"ticks[{t.name}]") for t in representatives}
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


def _ticks_range(problem: Problem, task: Task, horizon: int) -> tuple[int, int]:
    if isinstance(task, CallRun):
        ticks = [option.ticks for option in problem.options(task.call)]
        return min(ticks), max(ticks)
    return 0, min(horizon, max(task.ticks.values(), default=0))


def add_choice_constraints(model: cp_model.CpModel, problem: Problem, x: Variables) -> None:
    """Add the rules about what is picked, which do not depend on time."""
    _one_option_per_call(model, problem, x)
    _a_place_is_where_the_option_is(model, problem, x)
    _atoms_are_covered_by_the_option(model, problem, x)
    _a_shared_copy_has_an_earlier_owner(model, problem, x)
    _ranks_are_nested_or_disjoint(model, problem, x)
    _siblings_are_filled_from_the_left(model, problem, x)


def add_time_constraints(model: cp_model.CpModel, problem: Problem, x: Variables) -> None:
    """Add the rules about when tasks run."""
    _a_run_takes_its_options_ticks(model, problem, x)
    _a_transfer_takes_its_places_ticks(model, problem, x)
    add_order_constraints(model, problem, x.pick, x.times)
    _a_rank_does_one_task_at_a_time(model, problem, x)
    _work_fits_between_its_neighbours(model, problem, x)


def add_order_constraints(
    model: cp_model.CpModel, problem: Problem, pick: Mapping[tuple[str, int], cp_model.IntVar], times: TaskVariables
) -> None:
    """Add the rules about when tasks run that do not depend on their ranks."""
    _a_task_ends_after_its_ticks(model, problem, times)
    _tasks_wait_for_their_predecessors(model, problem, pick, times)
    _later_periods_wait_for_this_one(model, problem, pick, times)


def add_memory_constraints(
    model: cp_model.CpModel, problem: Problem, x: Variables, device: cp_model.LinearExprT
) -> None:
    """Require that on every atom the copies there and any one call's transient memory fit in `device` units."""
    shared = {(call.name, o.place): o.shared_units for call in problem.calls for o in call.options}
    for atom, ranks in enumerate(problem.atoms):
        resident = []
        transient: dict[str, list[cp_model.LinearExprT]] = {}
        for call in problem.calls:
            for index, option in enumerate(call.options):
                if ranks.start in option.place.ranks:
                    resident.append(option.resident_units * x.pick[call.name, index])
                    transient.setdefault(call.name, []).append(option.transient_units * x.pick[call.name, index])
            for place in places(call):
                if ranks.start in place.ranks and (call.name, place) in x.shares:
                    resident.append(-shared[call.name, place] * x.shares[call.name, place])
        total_resident = model.new_int_var(0, MAX_SUM, f"resident[{atom}]")
        model.add(total_resident == sum(resident))
        for terms in transient.values():
            model.add(total_resident + sum(terms) <= device)


def _one_option_per_call(model: cp_model.CpModel, problem: Problem, x: Variables) -> None:
    """Each call picks exactly one of its options."""
    for call in problem.calls:
        model.add_exactly_one(x.pick[call.name, index] for index in range(len(call.options)))


def _a_place_is_where_the_option_is(model: cp_model.CpModel, problem: Problem, x: Variables) -> None:
    """A call is at a place exactly if it picked an option there."""
    for call in problem.calls:
        for place in places(call):
            if (call.name, place) in x.at:
                picks = [x.pick[call.name, i] for i, option in enumerate(call.options) if option.place == place]
                model.add(sum(picks) == x.at[call.name, place])


def _atoms_are_covered_by_the_option(model: cp_model.CpModel, problem: Problem, x: Variables) -> None:
    """A call covers an atom exactly if its option's ranks contain it."""
    for call in problem.calls:
        for atom, ranks in enumerate(problem.atoms):
            picks = [x.pick[call.name, i] for i, o in enumerate(call.options) if ranks.start in o.place.ranks]
            model.add(sum(picks) == x.covers[call.name, atom])


def _a_shared_copy_has_an_earlier_owner(model: cp_model.CpModel, problem: Problem, x: Variables) -> None:
    """A call shares a copy only at its own place, and only if an earlier call of its group is there too."""
    for (call, place), shared in x.shares.items():
        owners = [x.at[owner, place] for owner in problem.owners(call) if (owner, place) in x.at]
        model.add(shared <= x.at[call, place])
        model.add(shared <= sum(owners))


def _ranks_are_nested_or_disjoint(model: cp_model.CpModel, problem: Problem, x: Variables) -> None:
    """The ranks of two calls are disjoint or nested."""
    crossing = Crossing(problem)
    picks_on: list[dict[int, list[cp_model.IntVar]]] = []
    for call, numbers in zip(problem.calls, crossing.numbers, strict=True):
        picks_on.append({})
        for index, number in enumerate(numbers.tolist()):
            picks_on[-1].setdefault(number, []).append(x.pick[call.name, index])
    crossed_by = [set(np.flatnonzero(row).tolist()) for row in crossing.crosses]
    for one, other in combinations(picks_on, 2):
        for number, picks in one.items():
            crossing_picks = [pick for crossed in crossed_by[number] & other.keys() for pick in other[crossed]]
            if crossing_picks:
                model.add(sum(picks) + sum(crossing_picks) <= 1)


def _siblings_are_filled_from_the_left(model: cp_model.CpModel, problem: Problem, x: Variables) -> None:
    """The first call inside either of two interchangeable rank ranges is inside the left one."""

    def picks_inside(call: str, rank_range: range) -> list[cp_model.IntVar]:
        return [
            x.pick[call, index]
            for index, option in enumerate(problem.options(call))
            if rank_range.start <= option.place.ranks.start and option.place.ranks.stop <= rank_range.stop
        ]

    def order_siblings(swap: Swap) -> None:
        earlier: list[cp_model.IntVar] = []
        for call in problem.calls:
            model.add(sum(picks_inside(call.name, swap.right)) <= sum(earlier))
            earlier += picks_inside(call.name, swap.left)

    for swap in swaps(problem):
        order_siblings(swap)


def _a_run_takes_its_options_ticks(model: cp_model.CpModel, problem: Problem, x: Variables) -> None:
    """A run lasts as long as its call's option."""
    for task in problem.tasks:
        if isinstance(task, CallRun) and problem.lasts_like[task.name] == task.name:
            options = problem.options(task.call)
            model.add(x.times.ticks[task.name] == sum(o.ticks * x.pick[task.call, i] for i, o in enumerate(options)))


def _a_transfer_takes_its_places_ticks(model: cp_model.CpModel, problem: Problem, x: Variables) -> None:
    """A transfer lasts as long as its two places require, and no time if its target shares a copy.

    Places from (or to) which transfers take equally long are handled together.
    """
    by_name = {call.name: call for call in problem.calls}
    for task in problem.tasks:
        if not isinstance(task, Transfer) or problem.lasts_like[task.name] != task.name:
            continue
        model.add(x.times.ticks[task.name] == 0).only_enforce_if(~x.times.happens[task.name])
        sources, targets = (places(by_name[name]) for name in (task.source, task.target))
        durations = [
            [
                task.ticks_between(source_place, target_place, source_place.overlap(target_place))
                for target_place in targets
            ]
            for source_place in sources
        ]
        arrival_terms = [
            (
                ticks,
                _any(model, [x.at[task.target, target] - x.shares.get((task.target, target), 0) for target in group]),
            )
            for ticks, group in _grouped(targets, zip(*durations, strict=True)).items()
        ]
        for group in _grouped(sources, map(tuple, durations)).values():
            first = sources.index(group[0])
            transfer_ticks = sum(ticks[first] * is_target for ticks, is_target in arrival_terms if ticks[first])
            is_source = _any(model, [x.at[task.source, place] for place in group])
            model.add(x.times.ticks[task.name] >= transfer_ticks).only_enforce_if(is_source)


def _grouped(items: Iterable[Place], keys: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], list[Place]]:
    """Group the places by their keys."""
    groups: dict[tuple[int, ...], list[Place]] = {}
    for place, key in zip(items, keys, strict=True):
        groups.setdefault(key, []).append(place)
    return groups


def _any(model: cp_model.CpModel, terms: Sequence[cp_model.LinearExprT]) -> cp_model.IntVar:
    """Return a variable that is 1 if one of the terms is 1; at most one of them may be."""
    is_any = model.new_bool_var("any")
    model.add(sum(terms) == is_any)
    return is_any


def _a_task_ends_after_its_ticks(model: cp_model.CpModel, problem: Problem, times: TaskVariables) -> None:
    """A task that started is not interrupted, and the makespan is no earlier than its end."""
    for task in problem.tasks:
        model.add(times.end[task.name] == times.start[task.name] + times.ticks[task.name])
        model.add(times.makespan >= times.end[task.name])


def _tasks_wait_for_their_predecessors(
    model: cp_model.CpModel, problem: Problem, pick: Mapping[tuple[str, int], cp_model.IntVar], times: TaskVariables
) -> None:
    """A task starts after its inputs have ended and been transferred, or earlier if they are streamed to it."""
    call = problem.runs
    for before, after, min_lag, streamed, late in problem.precedences:
        lag = min_lag + _late_ticks(problem, pick, call[before]) if late else min_lag
        if not streamed:
            model.add(times.start[after] >= times.end[before] + lag)
            continue
        options = problem.options(call[after])
        picks = [pick[call[after], index] for index in range(len(options))]
        early = cp_model.LinearExpr.weighted_sum(picks, [option.early_ticks for option in options])
        rest = cp_model.LinearExpr.weighted_sum(picks, [option.ticks - option.early_ticks for option in options])
        model.add(times.start[after] + early >= times.end[before] + lag)
        model.add(times.end[after] >= times.end[before] + lag + rest)  # redundant, for the bound
        model.add(times.start[after] >= times.start[before])


def _later_periods_wait_for_this_one(
    model: cp_model.CpModel, problem: Problem, pick: Mapping[tuple[str, int], cp_model.IntVar], times: TaskVariables
) -> None:
    """A task starts after its inputs from earlier periods have arrived."""
    call = problem.runs
    for before, after, num_periods, lag, late in problem.carried:
        arrival = times.end[before] + lag + (_late_ticks(problem, pick, call[before]) if late else 0)
        model.add(num_periods * times.makespan + times.start[after] >= arrival)


def _late_ticks(problem: Problem, pick: Mapping[tuple[str, int], cp_model.IntVar], call: str) -> cp_model.LinearExprT:
    """Return the ticks after the end of a run until it has everything that it delivers late."""
    late = [option.late_ticks for option in problem.options(call)]
    expression: cp_model.LinearExprT = cp_model.LinearExpr.weighted_sum(
        [pick[call, index] for index in range(len(late))], late
    )
    return expression


def _a_rank_does_one_task_at_a_time(model: cp_model.CpModel, problem: Problem, x: Variables) -> None:
    """The tasks that occupy an atom do not overlap in time."""
    for atom in range(len(problem.atoms)):
        intervals = []
        occupies: dict[tuple[str, str], cp_model.IntVar] = {}
        for task in problem.tasks:
            if isinstance(task, CallRun):
                is_here = x.covers[task.call, atom]
            else:
                key = problem.lasts_like[task.name], task.occupies
                if key not in occupies:
                    occupies[key] = _occupies(model, task, atom, x)
                is_here = occupies[key]
            parts = x.times.start[task.name], x.times.ticks[task.name], x.times.end[task.name]
            intervals.append(model.new_optional_interval_var(*parts, is_here, f"{task.name}@{atom}"))
        model.add_no_overlap(intervals)


def _occupies(model: cp_model.CpModel, task: Transfer, atom: int, x: Variables) -> cp_model.IntVar:
    """Return a variable that is 1 if a transfer that happens is on an atom; transfers of equal duration share it."""
    is_here = model.new_bool_var(f"occupies[{task.name},{atom}]")
    ends = {"source": [task.source], "target": [task.target], "both": [task.source, task.target]}
    for call in ends[task.occupies]:
        model.add_bool_or(is_here, ~x.times.happens[task.name], ~x.covers[call, atom])
    return is_here


def _work_fits_between_its_neighbours(model: cp_model.CpModel, problem: Problem, x: Variables) -> None:
    """Between two tasks, an atom has time for all its work that must lie there; redundant, for a tighter bound."""
    run = problem.runs
    for ranks in problem.atoms:
        load = {call.name: _load(model, x, call, ranks) for call in problem.calls}
        for window in windows(problem):
            opens = x.times.end[window.after] if window.after else 0
            closes = x.times.start[window.before] if window.before else x.times.makespan
            model.add(closes - opens >= sum(load[run[name]] for name in window.between if name in run))


def _load(model: cp_model.CpModel, x: Variables, call: CallOptions, ranks: range) -> cp_model.IntVar:
    """Return a variable for the ticks of one run of a call on some ranks."""
    ticks = [option.ticks if ranks.start in option.place.ranks else 0 for option in call.options]
    load = model.new_int_var(0, max(ticks), f"load[{call.name},{ranks.start}]")
    picks = [x.pick[call.name, index] for index in range(len(ticks))]
    model.add(cp_model.LinearExpr.weighted_sum(picks, ticks) == load)
    return load
