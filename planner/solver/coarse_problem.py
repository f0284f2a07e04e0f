"""Smaller versions of a problem: without dominated options, with rounded amounts and merged layouts, or with
representatives.

Layouts are merged if their transfers and copies are of about the same size; one representative of each equivalence
class stays in the problem, with the smallest amounts (ticks, units of memory) of the class. Every answer has a
counterpart in the smaller problem with at most its makespan and memory. The exceptions are `fastest_few`,
`similar_to_coarse` and `similar_to_picked`, which drop options to find some answers quickly.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.planner.solver.pareto import undominated
from meshwright.planner.solver.problem import CallOptions, Option, Place, Precedence, Problem, Transfer


@dataclass(frozen=True)
class MergedLayouts:
    """A problem with fewer layouts, and the representative of each (family of calls, layout)."""

    problem: Problem
    family: Mapping[str, str]
    representative: Mapping[tuple[str, str], str]

    def place(self, call: str, place: Place) -> Place:
        """Return a place of a call with its layout replaced by the representative."""
        if call not in self.family:
            return place
        return place._replace(layout=self.representative[self.family[call], place.layout])


def merge_layouts(problem: Problem, *, ticks: int, units: int) -> MergedLayouts:
    """Merge layouts whose transfers and copies are equal when divided by `ticks` and `units` and rounded down.

    Every answer to the problem has a counterpart in the result with at most its makespan and memory.
    """
    family = _families(problem)
    representative_of: dict[tuple[str, str], str] = {}
    first: dict[Hashable, str] = {}
    for (family_name, layout), layout_properties in _properties(problem, family, ticks, units).items():
        representative_of[family_name, layout] = first.setdefault((family_name, frozenset(layout_properties)), layout)
    merged = MergedLayouts(problem, family, representative_of)
    calls = tuple(_merged_call(merged, call) for call in problem.calls)
    tasks = tuple(_merged_transfer(merged, task) if isinstance(task, Transfer) else task for task in problem.tasks)
    return replace(merged, problem=replace(problem, calls=calls, tasks=tasks))


def _families(problem: Problem) -> dict[str, str]:
    """Return a family name for each call whose layout matters to others: calls tied to each other are in one family."""
    family = {name: {name} for name in problem.tied}
    for tie in (*problem.sharing_groups, *((move.source, move.target) for move in _transfers(problem))):
        members = set().union(*(family[name] for name in tie))
        family.update(dict.fromkeys(members, members))
    return {name: min(members) for name, members in family.items()}


def _transfers(problem: Problem) -> tuple[Transfer, ...]:
    return tuple(task for task in problem.tasks if isinstance(task, Transfer))


def _properties(
    problem: Problem, family: Mapping[str, str], ticks: int, units: int
) -> dict[tuple[str, str], set[Hashable]]:
    """Return what distinguishes a layout within its family: sizes of pools and copies, durations of transfers."""
    properties: dict[tuple[str, str], set[Hashable]] = {}
    layouts_of: dict[str, set[str]] = {call.name: set() for call in problem.calls}
    for call in problem.calls:
        for option in call.options if call.name in family else ():
            layout_properties = properties.setdefault((family[call.name], option.place.layout), set())
            layout_properties.add((option.place.num_ranks, option.shared_units // units))
            layouts_of[call.name].add(option.place.layout)
    for task in _transfers(problem):
        family_name = family[task.source]
        for (source, target, overlap), duration in task.ticks.items():
            if target in layouts_of[task.target] and (family_name, source) in properties:
                properties[family_name, source].add((task.name, "to", target, overlap, duration // ticks))
            if source in layouts_of[task.source] and (family_name, target) in properties:
                properties[family_name, target].add((task.name, "from", source, overlap, duration // ticks))
    return properties


def _merged_call(merged: MergedLayouts, call: CallOptions) -> CallOptions:
    """Return the call with its options at representative places, where copies are as small as the smallest."""
    if call.name not in merged.family:
        return call
    least: dict[Place, int] = {}
    for option in call.options:
        place = merged.place(call.name, option.place)
        least[place] = min(option.shared_units, least.get(place, option.shared_units))

    def moved(option: Option) -> Option:
        place = merged.place(call.name, option.place)
        private = option.resident_units - option.shared_units
        return replace(option, place=place, resident_units=private + least[place], shared_units=least[place])

    return CallOptions(call.name, tuple(map(moved, call.options)))


def _merged_transfer(merged: MergedLayouts, task: Transfer) -> Transfer:
    """Return the transfer with the least ticks between any two layouts of the represented classes."""
    family_name = merged.family[task.source]
    ticks: dict[tuple[str, str, int], int] = {}
    for (source, target, overlap), duration in task.ticks.items():
        if (family_name, source) in merged.representative and (family_name, target) in merged.representative:
            key = merged.representative[family_name, source], merged.representative[family_name, target], overlap
            ticks[key] = min(duration, ticks.get(key, duration))
    return replace(task, ticks=ticks)


_MEMORY_LEVELS = 8
"""Number of memory levels, as parts of a device, in each of which a few options are chosen for a first answer."""


def without_dominated(problem: Problem) -> Problem:
    """Return the problem without options that are too large even alone, or that another option can always replace."""
    calls = []
    for call in problem.calls:
        fitting = [o for o in call.options if _units_of(o) <= problem.device_units]
        calls.append(
            CallOptions(call.name, tuple(fitting[index] for index in _undominated(problem, call.name, fitting)))
        )
    return problem.with_calls(tuple(calls))


def coarsened(problem: Problem, *, parts: int, ticks: int, merge_ticks: int = 0) -> MergedLayouts:
    """Round memory down to whole parts of a device and times to multiples of `ticks`, and drop dominated options.

    The ticks by which an option may start early are rounded up. Layouts are merged if their transfers and copies differ
    by less than `merge_ticks` ticks and one part; with 0 no layouts are merged and copies keep their size.
    """
    unit, calls = max(1, problem.device_units // parts), []
    merged = merge_layouts(problem, ticks=merge_ticks, units=unit) if merge_ticks else MergedLayouts(problem, {}, {})
    for call in merged.problem.calls:
        rounded = [_rounded(option, unit, ticks) for option in call.options]
        calls.append(
            CallOptions(call.name, tuple(rounded[index] for index in _undominated(merged.problem, call.name, rounded)))
        )
    return replace(merged, problem=merged.problem.with_calls(tuple(calls)))


def fastest_few(problem: Problem) -> Problem:
    """Return the problem with a few options per call and number of ranks: the smallest, and fast ones of each size."""

    def few_options(call: CallOptions) -> tuple[Option, ...]:
        chosen: set[Option] = set()
        by_size: dict[int, list[Option]] = {}
        for option in call.options:
            by_size.setdefault(option.place.num_ranks, []).append(option)
        for same_size in by_size.values():
            chosen.add(min(same_size, key=_units_of))
            for part in range(1, _MEMORY_LEVELS + 1):
                within_part = [
                    option for option in same_size if _units_of(option) * _MEMORY_LEVELS <= problem.device_units * part
                ]
                chosen.update(sorted(within_part, key=lambda option: option.ticks)[:1])
                chosen.update(sorted(within_part, key=lambda option: option.ticks + option.late_ticks)[:1])
        return tuple(option for option in call.options if option in chosen)

    return problem.with_calls(tuple(CallOptions(call.name, few_options(call)) for call in problem.calls))


def similar_to_coarse(problem: Problem, picked: Sequence[Option], coarse: MergedLayouts) -> Problem:
    """Return the problem with the options similar to those picked in the coarse problem.

    Similar options have the same number of ranks and, for calls whose layout matters, the same representative place.
    """
    calls = []
    for call, option in zip(problem.calls, picked, strict=True):
        is_tied, place = call.name in problem.tied, option.place
        similar = (
            o
            for o in call.options
            if (coarse.place(call.name, o.place) == place if is_tied else o.place.num_ranks == place.num_ranks)
        )
        calls.append(CallOptions(call.name, tuple(similar)))
    return problem.with_calls(tuple(calls))


def short_calls(problem: Problem, ticks: float) -> frozenset[str]:
    """Return the calls whose fastest option takes at most `ticks`, and from which nothing streams."""
    runs = problem.runs
    streamed_from = {runs[p.before] for p in problem.precedences if p.streamed and p.before in runs}
    return frozenset(
        call.name
        for call in problem.calls
        if call.name not in streamed_from and min(option.ticks for option in call.options) <= ticks
    )


def with_representatives_only(problem: Problem, names: Collection[str]) -> Problem:
    """Return the problem with one representative option per number of ranks for each named call.

    The representative has the smallest ticks and memory of the options that it replaces. Its weights take neither
    memory nor time to move, as if another call owned them; nor do those of a call that may share them. The problem's
    options must not have fixed ranks (`Problem.anywhere`).
    """
    calls = tuple(_with_representatives(problem, call, names) for call in problem.calls)
    tasks = tuple(
        replace(task, ticks={}) if isinstance(task, Transfer) and {task.source, task.target} & set(names) else task
        for task in problem.tasks
    )
    return replace(problem, calls=calls, tasks=tasks)


def similar_to_picked(problem: Problem, picked: Mapping[str, Option], names: Collection[str]) -> Problem:
    """Return the problem with options on as many ranks, and in the same layout, as those picked.

    For the named calls, any layout will do.
    """

    def similar(call: CallOptions) -> tuple[Option, ...]:
        place = picked[call.name].place
        same_size = (option for option in call.options if option.place.num_ranks == place.num_ranks)
        return tuple(option for option in same_size if call.name in names or option.place.layout == place.layout)

    return problem.with_calls(tuple(CallOptions(call.name, similar(call)) for call in problem.calls))


def _units_of(option: Option) -> int:
    """Return the units that an option needs alone."""
    return option.resident_units + option.transient_units


def _rounded(option: Option, unit: int, ticks: int) -> Option:
    duration = option.ticks // ticks * ticks
    return replace(
        option,
        ticks=duration,
        early_ticks=min(duration, -(-option.early_ticks // ticks) * ticks),
        late_ticks=option.late_ticks // ticks * ticks,
        resident_units=option.shared_units + (option.resident_units - option.shared_units) // unit * unit,
        transient_units=option.transient_units // unit * unit,
    )


def _undominated(problem: Problem, call: str, options: Sequence[Option]) -> list[int]:
    """Return the indices of the options that no other option of the call dominates.

    If options have no fixed ranks (`Problem.anywhere`), a smaller rank range can always replace a larger one, inside
    it; otherwise only options on the same ranks are compared. If the call's layout matters to other calls, only options
    that are equivalent for those calls are compared.
    """
    amounts_of, class_of = _amounts_for(problem, call), _equivalence_for(problem, call, options)
    groups: dict[Hashable, list[int]] = {}
    for index, option in enumerate(options):
        groups.setdefault(class_of(option.place), []).append(index)
    return [
        group[index]
        for group in groups.values()
        for index in undominated([amounts_of(options[index]) for index in group])
    ]


def _equivalence_for(problem: Problem, call: str, options: Sequence[Option]) -> Callable[[Place], Hashable]:
    """Return a function from places of a call to a key that is equal for places that are equivalent to the other calls.

    A place where another call may share its copy is in a class of its own; other places are equivalent if all transfers
    from and to them take equally long. If calls have fixed ranks, every place is in a class of its own.
    """
    if call not in problem.tied:
        return lambda place: None if problem.anywhere else place.ranks
    if not problem.anywhere:
        return lambda place: place
    sharers = {name for group in problem.sharing_groups if call in group for name in group} - {call}
    shared = {o.place for sharer in problem.calls if sharer.name in sharers for o in sharer.options}
    alone = {option.place.layout for option in options if option.place not in shared}
    moves: dict[str, set[Hashable]] = {layout: set() for layout in alone}
    for task in problem.tasks:
        if isinstance(task, Transfer) and call in (task.source, task.target):
            for (source, target, overlap), duration in task.ticks.items():
                if task.source == call and source in alone:
                    moves[source].add((task.name, "to", target, overlap, duration))
                if task.target == call and target in alone:
                    moves[target].add((task.name, "from", source, overlap, duration))
    equivalence_key = {layout: frozenset(moves_of) for layout, moves_of in moves.items()}
    return lambda place: place if place in shared else (place.ranks, equivalence_key[place.layout])


def _amounts_for(problem: Problem, call: str) -> Callable[[Option], tuple[int, ...]]:
    """Return a function that gives the amounts to minimise of an option of a call.

    An option with more ranks than the streaming producer leaves free always intersects it, and can start early by no
    more than the transfer takes. A call that streams from this one waits for its start, so a short option that starts
    late cannot replace a long one.
    """
    free_ranks = problem.num_ranks - _least_ranks_of_producers(problem, call)
    runs = {name for name, call_name in problem.runs.items() if call_name == call}
    lag = max((_longest_lag(problem, p) for p in problem.precedences if p.streamed and p.after in runs), default=0)
    is_streamed_from = any(p.streamed and p.before in runs for p in problem.precedences)

    def amounts_of(option: Option) -> tuple[int, ...]:
        early = option.early_ticks if option.place.num_ranks <= free_ranks else min(option.early_ticks, lag)
        memory = option.resident_units, option.transient_units
        late_ticks = option.ticks + option.late_ticks, option.ticks - early + option.late_ticks
        return (
            option.place.num_ranks,
            option.ticks,
            option.ticks - early,
            -early * is_streamed_from,
            *late_ticks,
            *memory,
        )

    return amounts_of


def _longest_lag(problem: Problem, precedence: Precedence) -> int:
    if not precedence.late:
        return max(0, precedence.lag)
    latest = max((option.late_ticks for option in problem.options(problem.runs[precedence.before])), default=0)
    return max(0, precedence.lag + latest)


def _least_ranks_of_producers(problem: Problem, call: str) -> int:
    """Return the least ranks of any producer that streams to the call."""
    run = problem.runs
    before = {run[p.before] for p in problem.precedences if p.streamed and run[p.after] == call and p.before in run}
    sizes = [min((o.place.num_ranks for o in problem.options(name)), default=0) for name in before]
    return min(sizes, default=problem.num_ranks)


def _with_representatives(problem: Problem, call: CallOptions, names: Collection[str]) -> CallOptions:
    if call.name in names:
        return _representatives(call)
    if set(problem.owners(call.name)).isdisjoint(names):
        return call
    without_weights = (
        replace(o, resident_units=o.resident_units - o.shared_units, shared_units=0) for o in call.options
    )
    return CallOptions(call.name, tuple(without_weights))


def _representatives(call: CallOptions) -> CallOptions:
    by_size: dict[int, list[Option]] = {}
    for option in call.options:
        by_size.setdefault(option.place.num_ranks, []).append(option)
    return CallOptions(call.name, tuple(_representative(size, options) for size, options in by_size.items()))


def _representative(num_ranks: int, options: Sequence[Option]) -> Option:
    """Return the representative of options on one number of ranks; it can start and end whenever one of them can."""
    ticks = min(option.ticks for option in options)
    rest = min(option.ticks - option.early_ticks for option in options)
    early = max(0, ticks - rest)
    late_end = min(option.ticks + option.late_ticks for option in options)
    late_end_after_stream = min(option.ticks - option.early_ticks + option.late_ticks for option in options)
    return Option(
        place=Place(0, num_ranks, f"any of {num_ranks}"),
        ticks=ticks,
        early_ticks=early,
        late_ticks=max(0, min(late_end - ticks, late_end_after_stream - (ticks - early))),
        resident_units=min(option.resident_units - option.shared_units for option in options),
        transient_units=min(option.transient_units for option in options),
    )
