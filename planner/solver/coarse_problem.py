"""Smaller versions of a problem: without dominated modes, with rounded amounts and merged layouts, or with
representatives.

Layouts are merged if their transfers and copies are of about the same size; one representative of each equivalence
class stays in the problem, with the smallest amounts (ticks, units of memory) of the class. Every answer has a
counterpart in the smaller problem with at most its makespan and memory. The exceptions are `fastest_few`,
`similar_to_coarse` and `similar_to_picked`, which drop modes to find some answers quickly.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.planner.solver.pareto import undominated
from meshwright.planner.solver.problem import Mode, Precedence, Problem, Resource, Task, Transfer
from meshwright.planner.solver.transfer_ticks import TransferTicks


@dataclass(frozen=True)
class MergedLayouts:
    """A problem with fewer layouts, and the representative of each (family of tasks, layout)."""

    problem: Problem
    family: Mapping[str, str]
    representative: Mapping[tuple[str, str], str]

    def resource(self, task: str, resource: Resource) -> Resource:
        """Return a resource of a task with its layout replaced by the representative."""
        if task not in self.family:
            return resource
        return resource._replace(layout=self.representative[self.family[task], resource.layout])


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
    tasks = tuple(_merged_task(merged, task) for task in problem.tasks)
    activities = tuple(
        _merged_transfer(merged, activity) if isinstance(activity, Transfer) else activity
        for activity in problem.activities
    )
    return replace(merged, problem=replace(problem, tasks=tasks, activities=activities))


def _families(problem: Problem) -> dict[str, str]:
    """Return a family name for each task whose layout matters to others: tasks tied to each other are in one family."""
    family = {name: {name} for name in problem.tied}
    for tie in (*problem.sharing_groups, *((move.source, move.target) for move in _transfers(problem))):
        members = set().union(*(family[name] for name in tie))
        family.update(dict.fromkeys(members, members))
    return {name: min(members) for name, members in family.items()}


def _transfers(problem: Problem) -> tuple[Transfer, ...]:
    return tuple(activity for activity in problem.activities if isinstance(activity, Transfer))


def _properties(
    problem: Problem, family: Mapping[str, str], ticks: int, units: int
) -> dict[tuple[str, str], set[Hashable]]:
    """Return what distinguishes a layout within its family: sizes of pools and copies, durations of transfers."""
    properties: dict[tuple[str, str], set[Hashable]] = {}
    layouts_of: dict[str, set[str]] = {task.name: set() for task in problem.tasks}
    for task in problem.tasks:
        for mode in task.modes if task.name in family else ():
            layout_properties = properties.setdefault((family[task.name], mode.resource.layout), set())
            layout_properties.add((mode.resource.num_ranks, mode.shared_units // units))
            layouts_of[task.name].add(mode.resource.layout)
    for activity in _transfers(problem):
        family_name = family[activity.source]
        between = activity.ticks.among(layouts_of[activity.source], layouts_of[activity.target])
        for source, key in between.keys_of_sources(ticks=ticks).items():
            properties[family_name, source].add((activity.name, "to", key))
        for target, key in between.keys_of_targets(ticks=ticks).items():
            properties[family_name, target].add((activity.name, "from", key))
    return properties


def _merged_task(merged: MergedLayouts, task: Task) -> Task:
    """Return the task with its modes on representative resources, on each with the smallest copy of its class."""
    if task.name not in merged.family:
        return task
    least: dict[Resource, int] = {}
    for mode in task.modes:
        resource = merged.resource(task.name, mode.resource)
        least[resource] = min(mode.shared_units, least.get(resource, mode.shared_units))

    def moved(mode: Mode) -> Mode:
        resource = merged.resource(task.name, mode.resource)
        private = mode.resident_units - mode.shared_units
        return replace(mode, resource=resource, resident_units=private + least[resource], shared_units=least[resource])

    return Task(task.name, tuple(map(moved, task.modes)))


def _merged_transfer(merged: MergedLayouts, activity: Transfer) -> Transfer:
    """Return the transfer with the least ticks between any two layouts of the represented classes."""
    family = merged.family[activity.source]
    representative = {
        layout: name for (of_family, layout), name in merged.representative.items() if of_family == family
    }
    return replace(activity, ticks=activity.ticks.merged(representative))


_MEMORY_LEVELS = 8
"""Number of memory levels, as parts of a device, in each of which a few modes are chosen for a first answer."""


def without_dominated(problem: Problem) -> Problem:
    """Return the problem without modes that are too large even alone, or that another mode can always replace."""
    tasks = []
    for task in problem.tasks:
        fitting = [o for o in task.modes if _units_of(o) <= problem.device_units]
        tasks.append(Task(task.name, tuple(fitting[index] for index in _undominated(problem, task.name, fitting))))
    return problem.with_tasks(tuple(tasks))


def coarsened(problem: Problem, *, parts: int, ticks: int, merge_ticks: int = 0) -> MergedLayouts:
    """Round memory down to whole parts of a device and times to multiples of `ticks`, and drop dominated modes.

    The ticks by which a mode may start early are rounded up. Layouts are merged if their transfers and copies differ
    by less than `merge_ticks` ticks and one part; with 0 no layouts are merged and copies keep their size.
    """
    unit, tasks = max(1, problem.device_units // parts), []
    merged = merge_layouts(problem, ticks=merge_ticks, units=unit) if merge_ticks else MergedLayouts(problem, {}, {})
    for task in merged.problem.tasks:
        rounded = [_rounded(mode, unit, ticks) for mode in task.modes]
        tasks.append(
            Task(task.name, tuple(rounded[index] for index in _undominated(merged.problem, task.name, rounded)))
        )
    return replace(merged, problem=merged.problem.with_tasks(tuple(tasks)))


def fastest_few(problem: Problem) -> Problem:
    """Return the problem with a few modes per task and rank range: the smallest, and the fastest up to each of some
    memory sizes."""

    def few_modes(task: Task) -> tuple[Mode, ...]:
        chosen: set[Mode] = set()
        by_ranks: dict[range, list[Mode]] = {}
        for mode in task.modes:
            by_ranks.setdefault(mode.resource.ranks, []).append(mode)
        for on_ranks in by_ranks.values():
            chosen.add(min(on_ranks, key=_units_of))
            for part in range(1, _MEMORY_LEVELS + 1):
                within_part = [
                    mode for mode in on_ranks if _units_of(mode) * _MEMORY_LEVELS <= problem.device_units * part
                ]
                chosen.update(sorted(within_part, key=lambda mode: mode.ticks)[:1])
                chosen.update(sorted(within_part, key=lambda mode: mode.ticks + mode.late_ticks)[:1])
        return tuple(mode for mode in task.modes if mode in chosen)

    return problem.with_tasks(tuple(Task(task.name, few_modes(task)) for task in problem.tasks))


def similar_to_coarse(problem: Problem, picked: Sequence[Mode], coarse: MergedLayouts) -> Problem:
    """Return the problem with the modes similar to those picked in the coarse problem.

    Similar modes have as many ranks (the same ones, if ranks are fixed) and, for tasks whose layout matters, the same
    representative resource.
    """
    tasks = []
    for task, mode in zip(problem.tasks, picked, strict=True):
        is_tied, resource = task.name in problem.tied, mode.resource
        similar = (
            o
            for o in task.modes
            if (
                coarse.resource(task.name, o.resource) == resource
                if is_tied
                else _rank_range(problem, o.resource) == _rank_range(problem, resource)
            )
        )
        tasks.append(Task(task.name, tuple(similar)))
    return problem.with_tasks(tuple(tasks))


def short_tasks(problem: Problem, ticks: float) -> frozenset[str]:
    """Return the tasks whose fastest mode takes at most `ticks`, and from which nothing streams."""
    runs = problem.runs
    streamed_from = {runs[p.before] for p in problem.precedences if p.streamed and p.before in runs}
    return frozenset(
        task.name
        for task in problem.tasks
        if task.name not in streamed_from and min(mode.ticks for mode in task.modes) <= ticks
    )


def with_representatives_only(problem: Problem, names: Collection[str]) -> Problem:
    """Return the problem with one representative mode per number of ranks for each named task.

    The representative has the smallest ticks and memory of the modes that it replaces. Its weights take neither
    memory nor time to move, as if another task owned them; nor do those of a task that may share them. The problem's
    modes must not have fixed ranks (`Problem.anywhere`).
    """
    tasks = tuple(_with_representatives(problem, task, names) for task in problem.tasks)
    activities = tuple(
        replace(activity, ticks=TransferTicks())
        if isinstance(activity, Transfer) and {activity.source, activity.target} & set(names)
        else activity
        for activity in problem.activities
    )
    return replace(problem, tasks=tasks, activities=activities)


def similar_to_picked(problem: Problem, picked: Mapping[str, Mode], names: Collection[str]) -> Problem:
    """Return the problem with modes on as many ranks, and in the same layout, as those picked.

    For the named tasks, any layout will do.
    """

    def similar(task: Task) -> tuple[Mode, ...]:
        resource = picked[task.name].resource
        on_ranks = (m for m in task.modes if _rank_range(problem, m.resource) == _rank_range(problem, resource))
        return tuple(mode for mode in on_ranks if task.name in names or mode.resource.layout == resource.layout)

    return problem.with_tasks(tuple(Task(task.name, similar(task)) for task in problem.tasks))


def _rank_range(problem: Problem, resource: Resource) -> range:
    """Return the ranks of a resource if ranks are fixed, and otherwise the first ones of as many."""
    return range(resource.num_ranks) if problem.anywhere else resource.ranks


def _units_of(mode: Mode) -> int:
    """Return the units that a mode needs alone."""
    return mode.resident_units + mode.transient_units


def _rounded(mode: Mode, unit: int, ticks: int) -> Mode:
    duration = mode.ticks // ticks * ticks
    return replace(
        mode,
        ticks=duration,
        early_ticks=min(duration, -(-mode.early_ticks // ticks) * ticks),
        late_ticks=mode.late_ticks // ticks * ticks,
        resident_units=mode.shared_units + (mode.resident_units - mode.shared_units) // unit * unit,
        transient_units=mode.transient_units // unit * unit,
    )


def _undominated(problem: Problem, task: str, modes: Sequence[Mode]) -> list[int]:
    """Return the indices of the modes that no other mode of the task dominates.

    If modes have no fixed ranks (`Problem.anywhere`), a smaller rank range can always replace a larger one, inside
    it; otherwise only modes on the same ranks are compared. If the task's layout matters to other tasks, only modes
    that are equivalent for those tasks are compared.
    """
    amounts_of, class_of = _amounts_for(problem, task), _equivalence_for(problem, task, modes)
    groups: dict[Hashable, list[int]] = {}
    for index, mode in enumerate(modes):
        groups.setdefault(class_of(mode.resource), []).append(index)
    return [
        group[index]
        for group in groups.values()
        for index in undominated([amounts_of(modes[index]) for index in group])
    ]


def _equivalence_for(problem: Problem, task: str, modes: Sequence[Mode]) -> Callable[[Resource], Hashable]:
    """Return a function from resources of a task to a key that is equal for resources that other tasks need not
    distinguish.

    A resource where another task may share its copy is in a class of its own; other resources are equivalent if all
    transfers from and to them take equally long. If tasks have fixed ranks, every resource is in a class of its own.
    """
    if task not in problem.tied:
        return lambda resource: None if problem.anywhere else resource.ranks
    if not problem.anywhere:
        return lambda resource: resource
    sharers = {name for group in problem.sharing_groups if task in group for name in group} - {task}
    shared = {o.resource for sharer in problem.tasks if sharer.name in sharers for o in sharer.modes}
    alone = {mode.resource.layout for mode in modes if mode.resource not in shared}
    moves: list[Mapping[str, Hashable]] = []
    for activity in _transfers(problem):
        if activity.source == task:
            moves.append(activity.ticks.keys_of_sources())
        if activity.target == task:
            moves.append(activity.ticks.keys_of_targets())
    equivalence_key = {layout: tuple(keys.get(layout) for keys in moves) for layout in alone}
    return lambda resource: resource if resource in shared else (resource.ranks, equivalence_key[resource.layout])


def _amounts_for(problem: Problem, task: str) -> Callable[[Mode], tuple[int, ...]]:
    """Return a function that gives the amounts to minimise of a mode of a task.

    A mode with more ranks than the streaming producer leaves free always intersects it, and can start early by no
    more than the transfer takes. A task that streams from this one waits for its start, so a short mode that starts
    late cannot replace a long one.
    """
    free_ranks = problem.num_ranks - _least_ranks_of_producers(problem, task)
    runs = {name for name, task_name in problem.runs.items() if task_name == task}
    lag = max((_longest_lag(problem, p) for p in problem.precedences if p.streamed and p.after in runs), default=0)
    is_streamed_from = any(p.streamed and p.before in runs for p in problem.precedences)

    def amounts_of(mode: Mode) -> tuple[int, ...]:
        early = mode.early_ticks if mode.resource.num_ranks <= free_ranks else min(mode.early_ticks, lag)
        memory = mode.resident_units, mode.transient_units
        late_ticks = mode.ticks + mode.late_ticks, mode.ticks - early + mode.late_ticks
        return (
            mode.resource.num_ranks,
            mode.ticks,
            mode.ticks - early,
            -early * is_streamed_from,
            *late_ticks,
            *memory,
        )

    return amounts_of


def _longest_lag(problem: Problem, precedence: Precedence) -> int:
    if not precedence.late:
        return max(0, precedence.lag)
    latest = max((mode.late_ticks for mode in problem.modes(problem.runs[precedence.before])), default=0)
    return max(0, precedence.lag + latest)


def _least_ranks_of_producers(problem: Problem, task: str) -> int:
    """Return the fewest ranks of any producer that streams to the task, or all ranks if none does."""
    run = problem.runs
    before = {run[p.before] for p in problem.precedences if p.streamed and run[p.after] == task and p.before in run}
    sizes = [min((o.resource.num_ranks for o in problem.modes(name)), default=0) for name in before]
    return min(sizes, default=problem.num_ranks)


def _with_representatives(problem: Problem, task: Task, names: Collection[str]) -> Task:
    if task.name in names:
        return _representatives(task)
    if set(problem.owners(task.name)).isdisjoint(names):
        return task
    without_weights = (replace(o, resident_units=o.resident_units - o.shared_units, shared_units=0) for o in task.modes)
    return Task(task.name, tuple(without_weights))


def _representatives(task: Task) -> Task:
    by_size: dict[int, list[Mode]] = {}
    for mode in task.modes:
        by_size.setdefault(mode.resource.num_ranks, []).append(mode)
    return Task(task.name, tuple(_representative(size, modes) for size, modes in by_size.items()))


def _representative(num_ranks: int, modes: Sequence[Mode]) -> Mode:
    """Return the representative of modes on one number of ranks; it can start and end whenever one of them can."""
    ticks = min(mode.ticks for mode in modes)
    rest = min(mode.ticks - mode.early_ticks for mode in modes)
    early = max(0, ticks - rest)
    late_end = min(mode.ticks + mode.late_ticks for mode in modes)
    late_end_after_stream = min(mode.ticks - mode.early_ticks + mode.late_ticks for mode in modes)
    return Mode(
        resource=Resource(0, num_ranks, f"any of {num_ranks}"),
        ticks=ticks,
        early_ticks=early,
        late_ticks=max(0, min(late_end - ticks, late_end_after_stream - (ticks - early))),
        resident_units=min(mode.resident_units - mode.shared_units for mode in modes),
        transient_units=min(mode.transient_units for mode in modes),
    )
