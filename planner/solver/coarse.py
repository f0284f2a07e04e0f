"""Fewer options for a call: without those that another can always stand in for, and with amounts that are rounded.

possible                     the same best answers
coarsened                    every answer has one here that is no longer and no larger
with_stand_ins               so has it here: of a short call it matters on how many ranks it is, and hardly how
fastest_few, around, like    some of the answers
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace

from meshwright.planner.solver.alike import Alike, alike
from meshwright.planner.solver.dominance import undominated
from meshwright.planner.solver.problem import CallOptions, Option, Place, Precedence, Problem, Transfer

_FEW = 8
"""Parts of a device: in each a few options are chosen for a first answer."""


def possible(problem: Problem) -> Problem:
    """The problem without options that are alone too large, or that another can always stand in for."""
    calls = []
    for call in problem.calls:
        fitting = [o for o in call.options if _blocks_of(o) <= problem.device_blocks]
        calls.append(CallOptions(call.name, tuple(fitting[index] for index in _kept(problem, call.name, fitting))))
    return problem.with_calls(tuple(calls))


def coarsened(problem: Problem, *, parts: int, ticks: int, apart: int = 0) -> Alike:
    """The problem with memory in whole parts of a device and times in multiples of some ticks, rounded down.

    The ticks by which an option may start early are rounded up. Layouts are one when their transfers and copies differ
    by less than `apart` ticks and a part; with 0 each is one of its own and copies keep their size.
    """
    part, calls = max(1, problem.device_blocks // parts), []
    found = alike(problem, ticks=apart, blocks=part) if apart else Alike(problem, {}, {})
    for call in found.problem.calls:
        rounded = [_rounded(option, part, ticks) for option in call.options]
        calls.append(
            CallOptions(call.name, tuple(rounded[index] for index in _kept(found.problem, call.name, rounded)))
        )
    return replace(found, problem=found.problem.with_calls(tuple(calls)))


def fastest_few(problem: Problem) -> Problem:
    """The problem with a few options of each size per call: the smallest, the fastest in each part of a device."""

    def few(call: CallOptions) -> tuple[Option, ...]:
        chosen: set[Option] = set()
        by_size: dict[int, list[Option]] = {}
        for option in call.options:
            by_size.setdefault(option.place.num_ranks, []).append(option)
        for same in by_size.values():
            chosen.add(min(same, key=_blocks_of))
            for part in range(1, _FEW + 1):
                within_part = [option for option in same if _blocks_of(option) * _FEW <= problem.device_blocks * part]
                chosen.update(sorted(within_part, key=lambda option: option.ticks)[:1])
                chosen.update(sorted(within_part, key=lambda option: option.ticks + option.late_ticks)[:1])
        return tuple(option for option in call.options if option in chosen)

    return problem.with_calls(tuple(CallOptions(call.name, few(call)) for call in problem.calls))


def around(problem: Problem, picked: Sequence[Option], coarse: Alike) -> Problem:
    """The problem with the options that are like those picked: of as many ranks and, where it matters, a layout that
    the one picked stands for."""
    calls = []
    for call, option in zip(problem.calls, picked, strict=True):
        is_tied, place = call.name in problem.tied, option.place
        like = (
            o
            for o in call.options
            if (coarse.place(call.name, o.place) == place if is_tied else o.place.num_ranks == place.num_ranks)
        )
        calls.append(CallOptions(call.name, tuple(like)))
    return problem.with_calls(tuple(calls))


def short_calls(problem: Problem, ticks: float) -> frozenset[str]:
    """The calls whose fastest option takes no more ticks, and from which nothing streams."""
    runs = problem.runs
    streamed_from = {runs[p.before] for p in problem.precedences if p.streamed and p.before in runs}
    return frozenset(
        call.name
        for call in problem.calls
        if call.name not in streamed_from and min(option.ticks for option in call.options) <= ticks
    )


def with_stand_ins(problem: Problem, names: Collection[str]) -> Problem:
    """The problem in which each of these calls has one option for each number of ranks, with the least of every amount.

    Its weights take no room, as if another call had them, nor do those of a call that may share them, and no time to be
    moved. Options may be anywhere.
    """
    calls = tuple(_with_stand_ins(problem, call, names) for call in problem.calls)
    tasks = tuple(
        replace(task, ticks={}) if isinstance(task, Transfer) and {task.source, task.target} & set(names) else task
        for task in problem.tasks
    )
    return replace(problem, calls=calls, tasks=tasks)


def like(problem: Problem, picked: Mapping[str, Option], names: Collection[str]) -> Problem:
    """The problem with the options that are on as many ranks as those picked and, but for calls that had stand-ins,
    have their layout."""

    def alike(call: CallOptions) -> tuple[Option, ...]:
        place = picked[call.name].place
        same = (option for option in call.options if option.place.num_ranks == place.num_ranks)
        return tuple(option for option in same if call.name in names or option.place.layout == place.layout)

    return problem.with_calls(tuple(CallOptions(call.name, alike(call)) for call in problem.calls))


def _blocks_of(option: Option) -> int:
    """What an option needs if it is alone."""
    return option.resident_blocks + option.transient_blocks


def _rounded(option: Option, part: int, ticks: int) -> Option:
    lasts = option.ticks // ticks * ticks
    return replace(
        option,
        ticks=lasts,
        early_ticks=min(lasts, -(-option.early_ticks // ticks) * ticks),
        late_ticks=option.late_ticks // ticks * ticks,
        resident_blocks=option.shared_blocks + (option.resident_blocks - option.shared_blocks) // part * part,
        transient_blocks=option.transient_blocks // part * part,
    )


def _kept(problem: Problem, call: str, options: Sequence[Option]) -> list[int]:
    """The indices of the options that no other of the call beats in ranks, ticks, early ticks and memory.

    A smaller block can always take the place of a larger one, inside it, where options may be anywhere; elsewhere they
    are compared with those on their own ranks. Where the layout matters to others, it is with those that serve alike.
    """
    amounts, serves = _amounts_for(problem, call), _serving(problem, call, options)
    groups: dict[Hashable, list[int]] = {}
    for index, option in enumerate(options):
        groups.setdefault(serves(option.place), []).append(index)
    return [
        same[index] for same in groups.values() for index in undominated([amounts(options[index]) for index in same])
    ]


def _serving(problem: Problem, call: str, options: Sequence[Option]) -> Callable[[Place], Hashable]:
    """What is the same for places of a call that serve the others alike.

    A place where another call may share its copy is one of its own; others are alike when every transfer from and to
    them is. Where calls cannot be anywhere each place is one of its own: few others serve alike.
    """
    if call not in problem.tied:
        return lambda place: None if problem.anywhere else place.ranks
    if not problem.anywhere:
        return lambda place: place
    sharers = {name for group in problem.copies if call in group for name in group} - {call}
    shared = {o.place for other in problem.calls if other.name in sharers for o in other.options}
    alone = {option.place.layout for option in options if option.place not in shared}
    moves: dict[str, set[Hashable]] = {layout: set() for layout in alone}
    for task in problem.tasks:
        if isinstance(task, Transfer) and call in (task.source, task.target):
            for (one, other, overlap), lasts in task.ticks.items():
                if task.source == call and one in alone:
                    moves[one].add((task.name, "to", other, overlap, lasts))
                if task.target == call and other in alone:
                    moves[other].add((task.name, "from", one, overlap, lasts))
    known = {layout: frozenset(found) for layout, found in moves.items()}
    return lambda place: place if place in shared else (place.ranks, known[place.layout])


def _amounts_for(problem: Problem, call: str) -> Callable[[Option], tuple[int, ...]]:
    """What has to be small in an option of a call.

    Options with more ranks than what streams to the call leaves meet all of it, and can start early by no more than its
    hand-over takes. What streams from a call waits for its start, so that a short option that starts late cannot stand
    in for a long one.
    """
    room = problem.num_ranks - _least_ranks_of_producers(problem, call)
    runs = {name for name, of in problem.runs.items() if of == call}
    lag = max((_longest_lag(problem, p) for p in problem.precedences if p.streamed and p.after in runs), default=0)
    is_streamed_from = any(p.streamed and p.before in runs for p in problem.precedences)

    def amounts(option: Option) -> tuple[int, ...]:
        early = option.early_ticks if option.place.num_ranks <= room else min(option.early_ticks, lag)
        memory = option.resident_blocks, option.transient_blocks
        arrives = option.ticks + option.late_ticks, option.ticks - early + option.late_ticks
        return option.place.num_ranks, option.ticks, option.ticks - early, -early * is_streamed_from, *arrives, *memory

    return amounts


def _longest_lag(problem: Problem, precedence: Precedence) -> int:
    if not precedence.late:
        return max(0, precedence.lag)
    latest = max((option.late_ticks for option in problem.options(problem.runs[precedence.before])), default=0)
    return max(0, precedence.lag + latest)


def _least_ranks_of_producers(problem: Problem, call: str) -> int:
    """The ranks that what streams to a call has at least, whichever of it is the smallest."""
    run = problem.runs
    before = {run[p.before] for p in problem.precedences if p.streamed and run[p.after] == call and p.before in run}
    sizes = [min((o.place.num_ranks for o in problem.options(name)), default=0) for name in before]
    return min(sizes, default=problem.num_ranks)


def _with_stand_ins(problem: Problem, call: CallOptions, names: Collection[str]) -> CallOptions:
    if call.name in names:
        return _least(call)
    if set(problem.owners(call.name)).isdisjoint(names):
        return call
    own = (replace(o, resident_blocks=o.resident_blocks - o.shared_blocks, shared_blocks=0) for o in call.options)
    return CallOptions(call.name, tuple(own))


def _least(call: CallOptions) -> CallOptions:
    by_size: dict[int, list[Option]] = {}
    for option in call.options:
        by_size.setdefault(option.place.num_ranks, []).append(option)
    return CallOptions(call.name, tuple(_stand_in(size, options) for size, options in by_size.items()))


def _stand_in(num_ranks: int, options: Sequence[Option]) -> Option:
    """It may be done in the last ticks of the time in which any of them is."""
    ticks = min(option.ticks for option in options)
    rest = min(option.ticks - option.early_ticks for option in options)
    early = max(0, ticks - rest)
    arrives = min(option.ticks + option.late_ticks for option in options)
    arrives_behind = min(option.ticks - option.early_ticks + option.late_ticks for option in options)
    return Option(
        place=Place(0, num_ranks, f"any of {num_ranks}"),
        ticks=ticks,
        early_ticks=early,
        late_ticks=max(0, min(arrives - ticks, arrives_behind - (ticks - early))),
        resident_blocks=min(option.resident_blocks - option.shared_blocks for option in options),
        transient_blocks=min(option.transient_blocks for option in options),
    )
