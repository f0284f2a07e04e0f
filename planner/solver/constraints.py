"""The rules of the model: one function per rule, in the order and with the letters of `place_model.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

import numpy as np
from ortools.sat.python import cp_model

from meshwright.planner.solver.crossing import Crossing
from meshwright.planner.solver.problem import MAX_SUM, CallOptions, CallRun, Place, Problem, Transfer
from meshwright.planner.solver.symmetry import Swap, swaps
from meshwright.planner.solver.variables import TaskVariables, Variables, places
from meshwright.planner.solver.windows import windows


def add_choice_constraints(model: cp_model.CpModel, problem: Problem, x: Variables) -> None:
    """The rules about what is picked, whenever it runs."""
    _one_option_per_call(model, problem, x)
    _a_place_is_where_the_option_is(model, problem, x)
    _atoms_are_covered_by_the_option(model, problem, x)
    _a_shared_copy_has_an_earlier_owner(model, problem, x)
    _ranks_are_nested_or_apart(model, problem, x)
    _siblings_are_filled_from_the_left(model, problem, x)


def add_time_constraints(model: cp_model.CpModel, problem: Problem, x: Variables) -> None:
    """The rules about when tasks run."""
    _a_run_takes_its_options_ticks(model, problem, x)
    _a_transfer_takes_its_places_ticks(model, problem, x)
    add_order_constraints(model, problem, x.pick, x.times)
    _a_rank_does_one_task_at_a_time(model, problem, x)
    _work_fits_between_its_neighbours(model, problem, x)


def add_order_constraints(
    model: cp_model.CpModel, problem: Problem, pick: Mapping[tuple[str, int], cp_model.IntVar], times: TaskVariables
) -> None:
    """The rules about when tasks run, wherever that is."""
    _a_task_ends_after_its_ticks(model, problem, times)
    _tasks_wait_for_their_predecessors(model, problem, pick, times)
    _later_turns_wait_for_this_one(model, problem, pick, times)


def add_memory_constraints(
    model: cp_model.CpModel, problem: Problem, x: Variables, device: cp_model.LinearExprT
) -> None:
    """On every atom the copies that live there, and any one call's transient memory, fit in `device` blocks."""
    shared = {(call.name, o.place): o.shared_blocks for call in problem.calls for o in call.options}
    for atom, ranks in enumerate(problem.atoms):
        resident = []
        transient: dict[str, list[cp_model.LinearExprT]] = {}
        for call in problem.calls:
            for index, option in enumerate(call.options):
                if ranks.start in option.place.ranks:
                    resident.append(option.resident_blocks * x.pick[call.name, index])
                    transient.setdefault(call.name, []).append(option.transient_blocks * x.pick[call.name, index])
            for place in places(call):
                if ranks.start in place.ranks and (call.name, place) in x.shares:
                    resident.append(-shared[call.name, place] * x.shares[call.name, place])
        held = model.new_int_var(0, MAX_SUM, f"resident[{atom}]")
        model.add(held == sum(resident))
        for terms in transient.values():
            model.add(held + sum(terms) <= device)


def _one_option_per_call(model: cp_model.CpModel, problem: Problem, x: Variables) -> None:
    """Each call picks exactly one of its options."""
    for call in problem.calls:
        model.add_exactly_one(x.pick[call.name, index] for index in range(len(call.options)))


def _a_place_is_where_the_option_is(model: cp_model.CpModel, problem: Problem, x: Variables) -> None:
    """A call is at a place exactly when it picked an option there."""
    for call in problem.calls:
        for place in places(call):
            if (call.name, place) in x.at:
                here = [x.pick[call.name, i] for i, option in enumerate(call.options) if option.place == place]
                model.add(sum(here) == x.at[call.name, place])


def _atoms_are_covered_by_the_option(model: cp_model.CpModel, problem: Problem, x: Variables) -> None:
    """A call covers an atom exactly when its option's ranks contain it."""
    for call in problem.calls:
        for atom, ranks in enumerate(problem.atoms):
            over = [x.pick[call.name, i] for i, o in enumerate(call.options) if ranks.start in o.place.ranks]
            model.add(sum(over) == x.covers[call.name, atom])


def _a_shared_copy_has_an_earlier_owner(model: cp_model.CpModel, problem: Problem, x: Variables) -> None:
    """A call shares a copy only at its own place, and only when an earlier call of its group is there too."""
    for (call, place), shared in x.shares.items():
        owners = [x.at[owner, place] for owner in problem.owners(call) if (owner, place) in x.at]
        model.add(shared <= x.at[call, place])
        model.add(shared <= sum(owners))


def _ranks_are_nested_or_apart(model: cp_model.CpModel, problem: Problem, x: Variables) -> None:
    """Of two calls' ranks, some of one lie in the other's only if all do."""
    crossing = Crossing(problem)
    on: list[dict[int, list[cp_model.IntVar]]] = []
    for call, numbers in zip(problem.calls, crossing.numbers, strict=True):
        on.append({})
        for index, number in enumerate(numbers.tolist()):
            on[-1].setdefault(number, []).append(x.pick[call.name, index])
    crossed = [set(np.flatnonzero(row).tolist()) for row in crossing.crosses]
    for one, other in combinations(on, 2):
        for number, picks in one.items():
            crossing_picks = [pick for there in crossed[number] & other.keys() for pick in other[there]]
            if crossing_picks:
                model.add(sum(picks) + sum(crossing_picks) <= 1)


def _siblings_are_filled_from_the_left(model: cp_model.CpModel, problem: Problem, x: Variables) -> None:
    """Of two interchangeable blocks of ranks, the first call that is inside either is inside the left one."""

    def inside(call: str, block: range) -> list[cp_model.IntVar]:
        return [
            x.pick[call, index]
            for index, option in enumerate(problem.options(call))
            if block.start <= option.place.ranks.start and option.place.ranks.stop <= block.stop
        ]

    def fill(swap: Swap) -> None:
        earlier: list[cp_model.IntVar] = []
        for call in problem.calls:
            model.add(sum(inside(call.name, swap.right)) <= sum(earlier))
            earlier += inside(call.name, swap.left)

    for swap in swaps(problem):
        fill(swap)


def _a_run_takes_its_options_ticks(model: cp_model.CpModel, problem: Problem, x: Variables) -> None:
    """A run lasts as long as its call's option says."""
    for task in problem.tasks:
        if isinstance(task, CallRun) and problem.lasts_like[task.name] == task.name:
            options = problem.options(task.call)
            model.add(x.times.ticks[task.name] == sum(o.ticks * x.pick[task.call, i] for i, o in enumerate(options)))


def _a_transfer_takes_its_places_ticks(model: cp_model.CpModel, problem: Problem, x: Variables) -> None:
    """A transfer lasts as long as its two places say, and no time at all when its target shares a copy.

    Places from which, or to which, transfers last equally long are taken together.
    """
    by_name = {call.name: call for call in problem.calls}
    for task in problem.tasks:
        if not isinstance(task, Transfer) or problem.lasts_like[task.name] != task.name:
            continue
        model.add(x.times.ticks[task.name] == 0).only_enforce_if(~x.times.happens[task.name])
        sources, targets = (places(by_name[name]) for name in (task.source, task.target))
        lasts = [[task.ticks_between(here, there, here.overlap(there)) for there in targets] for here in sources]
        arrives = [
            (ticks, _any(model, [x.at[task.target, p] - x.shares.get((task.target, p), 0) for p in alike]))
            for ticks, alike in _grouped(targets, zip(*lasts, strict=True)).items()
        ]
        for alike in _grouped(sources, map(tuple, lasts)).values():
            first = sources.index(alike[0])
            moved = sum(ticks[first] * here for ticks, here in arrives if ticks[first])
            leaves = _any(model, [x.at[task.source, place] for place in alike])
            model.add(x.times.ticks[task.name] >= moved).only_enforce_if(leaves)


def _grouped(found: Iterable[Place], by: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], list[Place]]:
    """The places by what is said of each."""
    groups: dict[tuple[int, ...], list[Place]] = {}
    for place, key in zip(found, by, strict=True):
        groups.setdefault(key, []).append(place)
    return groups


def _any(model: cp_model.CpModel, terms: Sequence[cp_model.LinearExprT]) -> cp_model.IntVar:
    """Whether one of these is 1; no two of them are."""
    found = model.new_bool_var("any")
    model.add(sum(terms) == found)
    return found


def _a_task_ends_after_its_ticks(model: cp_model.CpModel, problem: Problem, times: TaskVariables) -> None:
    """A task that started is not interrupted, and the step ends after it."""
    for task in problem.tasks:
        model.add(times.end[task.name] == times.start[task.name] + times.ticks[task.name])
        model.add(times.makespan >= times.end[task.name])


def _tasks_wait_for_their_predecessors(
    model: cp_model.CpModel, problem: Problem, pick: Mapping[tuple[str, int], cp_model.IntVar], times: TaskVariables
) -> None:
    """A task starts after what it waits for has ended and been handed over, or earlier where that is streamed to it."""
    call = problem.runs
    for before, after, least, streamed, late in problem.precedences:
        lag = least + _late(problem, pick, call[before]) if late else least
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


def _later_turns_wait_for_this_one(
    model: cp_model.CpModel, problem: Problem, pick: Mapping[tuple[str, int], cp_model.IntVar], times: TaskVariables
) -> None:
    """What a task hands to a later turn has arrived there when the task that reads it starts."""
    call = problem.runs
    for before, after, turns, lag, late in problem.carried:
        arrival = times.end[before] + lag + (_late(problem, pick, call[before]) if late else 0)
        model.add(turns * times.makespan + times.start[after] >= arrival)


def _late(problem: Problem, pick: Mapping[tuple[str, int], cp_model.IntVar], call: str) -> cp_model.LinearExprT:
    """Ticks after the end of a run until it has all that it hands over late."""
    late = [option.late_ticks for option in problem.options(call)]
    expression: cp_model.LinearExprT = cp_model.LinearExpr.weighted_sum(
        [pick[call, index] for index in range(len(late))], late
    )
    return expression


def _a_rank_does_one_task_at_a_time(model: cp_model.CpModel, problem: Problem, x: Variables) -> None:
    """On every atom the tasks that occupy it do not overlap in time."""
    for atom in range(len(problem.atoms)):
        intervals = []
        occupies: dict[tuple[str, str], cp_model.IntVar] = {}
        for task in problem.tasks:
            if isinstance(task, CallRun):
                here = x.covers[task.call, atom]
            else:
                key = problem.lasts_like[task.name], task.occupies
                if key not in occupies:
                    occupies[key] = _occupies(model, task, atom, x)
                here = occupies[key]
            parts = x.times.start[task.name], x.times.ticks[task.name], x.times.end[task.name]
            intervals.append(model.new_optional_interval_var(*parts, here, f"{task.name}@{atom}"))
        model.add_no_overlap(intervals)


def _occupies(model: cp_model.CpModel, task: Transfer, atom: int, x: Variables) -> cp_model.IntVar:
    """Whether a transfer that happens, and those like it, are on an atom."""
    here = model.new_bool_var(f"occupies[{task.name},{atom}]")
    ends = {"source": [task.source], "target": [task.target], "both": [task.source, task.target]}
    for call in ends[task.occupies]:
        model.add_bool_or(here, ~x.times.happens[task.name], ~x.covers[call, atom])
    return here


def _work_fits_between_its_neighbours(model: cp_model.CpModel, problem: Problem, x: Variables) -> None:
    """Redundant, for the bound: between two tasks, an atom has time for all its work that must lie between them."""
    run = problem.runs
    for ranks in problem.atoms:
        load = {call.name: _load(model, x, call, ranks) for call in problem.calls}
        for window in windows(problem):
            opens = x.times.end[window.after] if window.after else 0
            closes = x.times.start[window.before] if window.before else x.times.makespan
            model.add(closes - opens >= sum(load[run[name]] for name in window.between if name in run))


def _load(model: cp_model.CpModel, x: Variables, call: CallOptions, ranks: range) -> cp_model.IntVar:
    """The ticks of one run of a call on some ranks."""
    ticks = [option.ticks if ranks.start in option.place.ranks else 0 for option in call.options]
    load = model.new_int_var(0, max(ticks), f"load[{call.name},{ranks.start}]")
    picks = [x.pick[call.name, index] for index in range(len(ticks))]
    model.add(cp_model.LinearExpr.weighted_sum(picks, ticks) == load)
    return load
