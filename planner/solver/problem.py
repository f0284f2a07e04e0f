"""The optimisation problem as plain data, without any knowledge of solvers, stages or seconds.

A task is a decision, made once: it picks one mode, which gives ranks, a layout, a duration and memory (the planner
makes a task of every stage). An activity occupies ranks for some time: it is a run of a task, or a transfer of weights
between the resources that two tasks picked. Times are whole ticks and memory is in whole units;
`planner/search/formulate.py` decides how long a tick and how large a unit is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

from meshwright.planner.solver.transfer_ticks import TransferTicks

MAX_SUM = 2**31 - 1
"""Largest sum of coefficients; beyond it CP-SAT 9.15 can certify a wrong optimum (or-tools#5293)."""


class Resource(NamedTuple):
    """Ranks and a layout. Tasks that may share a copy of their weights do so exactly if they are on the same
    resource."""

    first_rank: int
    num_ranks: int
    layout: str

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.num_ranks)

    def overlap(self, other: Resource) -> int:
        """Return the number of ranks that two resources have in common."""
        return len(range(max(self.ranks.start, other.ranks.start), min(self.ranks.stop, other.ranks.stop)))


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One way to run a task; sharing a copy of the weights saves `shared_units` of its `resident_units` of memory.

    A run may start `early_ticks` before the end of the activity that streams to it. Its late output (rewards)
    arrives `late_ticks` after its end."""

    resource: Resource
    ticks: int
    resident_units: int = 0
    shared_units: int = 0
    transient_units: int = 0
    early_ticks: int = 0
    late_ticks: int = 0

    def at(self, first_rank: int) -> Mode:
        """Return the same mode on other ranks."""
        return replace(self, resource=self.resource._replace(first_rank=first_rank))


@dataclass(frozen=True)
class Task:
    """A decision: all runs of the task use the one mode that is picked."""

    name: str
    modes: tuple[Mode, ...]


@dataclass(frozen=True, kw_only=True)
class Run:
    """An activity: one run of a task, on the ranks and for the ticks of its mode."""

    name: str
    task: str


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """An activity: weights move from the resource of `source` to the resource of `target`.

    It occupies the source's ranks, the target's, or both, and takes no time if the target shares a copy.
    """

    name: str
    source: str
    target: str
    occupies: Literal["source", "target", "both"]
    ticks: TransferTicks

    def ticks_between(self, source: Resource, target: Resource, overlap: int) -> int:
        """Return the ticks of the transfer if the two resources have `overlap` ranks in common."""
        return self.ticks.between(source.layout, target.layout, overlap)


Activity: TypeAlias = Run | Transfer


class Precedence(NamedTuple):
    """`after` starts no earlier than `lag` ticks past the end of `before`.

    If `streamed`, `after` is a run that may start as many ticks earlier as its mode's `early_ticks`, but not before
    `before` starts. If `late`, `before` is a run whose mode's `late_ticks` are waited for too.
    """

    before: str
    after: str
    lag: int = 0
    streamed: bool = False
    late: bool = False

    def earliest(self, start: int, end: int, early: int, late: int = 0) -> int:
        """Return the first tick at which `after` may start if `before` runs from `start` to `end`."""
        arrival = end + self.lag + late * self.late
        return max(start, arrival - early) if self.streamed else arrival


class CarriedPrecedence(NamedTuple):
    """`after`, `periods` periods later, starts no earlier than `lag` ticks past the end of `before`.

    As in modulo scheduling: periods x period >= end + lag - start. `late` is as in `Precedence`.
    """

    before: str
    after: str
    periods: int
    lag: int = 0
    late: bool = False

    def arrival(self, end: int, late: int) -> int:
        """Return the tick at which everything is delivered if `before` ends at `end`."""
        return end + self.lag + late * self.late


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Pick one mode per task and an order of the activities that minimise the period, called the makespan here.

    The period lasts until the last activity ends, and long enough for what is `carried` to later periods; all periods
    have the same schedule.

    `sharing_groups` lists groups of tasks in order of ownership: a task on the same resource as an earlier one of its
    group shares that task's copy. The memory on a rank is the resident units of every copy on it, plus the largest
    transient of its tasks.

    The ranks of two tasks are disjoint or nested.

    With `anywhere`, a mode is written with first rank 0 and may be on any aligned rank range of its size: sizes of
    at least `range_step` ranks are multiples of `range_step` and start at multiples of it; smaller sizes divide it and
    start at multiples of themselves. `range_step` defaults to the number of all ranks.
    """

    num_ranks: int
    device_units: int
    tasks: tuple[Task, ...]
    activities: tuple[Activity, ...]
    precedences: tuple[Precedence, ...] = ()
    carried: tuple[CarriedPrecedence, ...] = ()
    sharing_groups: tuple[tuple[str, ...], ...] = ()
    anywhere: bool = False
    range_step: int = 0

    def __post_init__(self) -> None:
        self._check_names()
        for task in self.tasks:
            _check_modes(task, self.num_ranks)
        if self.anywhere:
            modes = [mode for task in self.tasks for mode in task.modes]
            _check_rank_ranges(modes, self.num_ranks, self.range_step or self.num_ranks)
        if self.horizon > MAX_SUM:
            raise ValueError(f"the durations add up to {self.horizon} ticks, above {MAX_SUM}; use a longer tick.")
        try:
            _ = self.order
        except CycleError as error:
            raise ValueError(f"the precedences form a cycle: {' -> '.join(error.args[1])}.") from None

    def _check_names(self) -> None:
        for kind, names in (("task", [c.name for c in self.tasks]), ("activity", [t.name for t in self.activities])):
            if len(set(names)) < len(names):
                raise ValueError(f"two {kind}s share a name: {sorted(names)}.")
        used = set(self.runs.values())
        used |= {
            name
            for activity in self.activities
            if isinstance(activity, Transfer)
            for name in (activity.source, activity.target)
        }
        used |= {name for group in self.sharing_groups for name in group}
        if unknown := used - {task.name for task in self.tasks}:
            raise ValueError(f"there is no task named {sorted(unknown)}.")
        waits = self._all_precedences
        ends = {name for wait in waits for name in (wait.before, wait.after)}
        if unknown := ends - {activity.name for activity in self.activities}:
            raise ValueError(f"there is no activity named {sorted(unknown)}.")
        if not_runs := {p.after for p in self.precedences if p.streamed} - set(self.runs):
            raise ValueError(f"only a run can be streamed to, not {sorted(not_runs)}.")
        if not_runs := {wait.before for wait in waits if wait.late} - set(self.runs):
            raise ValueError(f"only a run can be late, not {sorted(not_runs)}.")
        if invalid := [wait for wait in self.carried if wait.periods < 1]:
            raise ValueError(
                f"{invalid[0].before} is carried over {invalid[0].periods} periods to {invalid[0].after}; use 1 "
                "or more."
            )

    @cached_property
    def runs(self) -> Mapping[str, str]:
        """The task of each run, keyed by the activity's name."""
        return {activity.name: activity.task for activity in self.activities if isinstance(activity, Run)}

    @cached_property
    def horizon(self) -> int:
        """Ticks within which every schedule without idle time ends and everything carried over has arrived."""
        longest = {task.name: max((o.ticks for o in task.modes), default=0) for task in self.tasks}
        runs = sum(longest[activity.task] for activity in self.activities if isinstance(activity, Run))
        transfers = sum(t.ticks.longest for t in self.activities if isinstance(t, Transfer))
        return runs + transfers + sum(max(0, wait.lag) for wait in self._all_precedences) + self._total_late_ticks

    @property
    def _all_precedences(self) -> tuple[Precedence | CarriedPrecedence, ...]:
        return (*self.precedences, *self.carried)

    @property
    def _total_late_ticks(self) -> int:
        """Upper bound on the sum of all late ticks that are waited for."""
        latest = {task.name: max((o.late_ticks for o in task.modes), default=0) for task in self.tasks}
        return sum(latest[self.runs[wait.before]] for wait in self._all_precedences if wait.late)

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The names of the activities in a topological order of the precedences."""
        sorter: TopologicalSorter[str] = TopologicalSorter({activity.name: () for activity in self.activities})
        for precedence in self.precedences:
            sorter.add(precedence.after, precedence.before)
        return tuple(sorter.static_order())

    @cached_property
    def atoms(self) -> tuple[range, ...]:
        """The largest rank ranges that every mode covers entirely or not at all."""
        bounds = {0, self.num_ranks}
        for task in self.tasks:
            for mode in task.modes:
                bounds.update((mode.resource.ranks.start, mode.resource.ranks.stop))
        sorted_bounds = sorted(bounds)
        return tuple(range(a, b) for a, b in pairwise(sorted_bounds))

    @cached_property
    def modes_over(self) -> Mapping[tuple[str, int], Sequence[int]]:
        """For each task and atom, the indices of the modes whose ranks contain the atom."""
        position = {ranks.start: index for index, ranks in enumerate(self.atoms)} | {self.num_ranks: len(self.atoms)}
        over: dict[tuple[str, int], list[int]] = {
            (task.name, atom): [] for task in self.tasks for atom in range(len(self.atoms))
        }
        for task in self.tasks:
            for index, mode in enumerate(task.modes):
                ranks = mode.resource.ranks
                for atom in range(position[ranks.start], position[ranks.stop]):
                    over[task.name, atom].append(index)
        return over

    @cached_property
    def tied(self) -> frozenset[str]:
        """The tasks whose layout matters to others: members of sharing groups, and sources and targets of transfers."""
        ends = (
            name
            for activity in self.activities
            if isinstance(activity, Transfer)
            for name in (activity.source, activity.target)
        )
        return frozenset({*ends, *(name for group in self.sharing_groups for name in group)})

    @cached_property
    def lasts_like(self) -> Mapping[str, str]:
        """For each activity, the first activity that takes equally long whatever is picked.

        That is a run of the same task, or an equal transfer.
        """
        by_ends: dict[tuple[str, ...], list[Activity]] = {}
        first_like: dict[str, str] = {}
        for activity in self.activities:
            ends = (activity.task,) if isinstance(activity, Run) else (activity.source, activity.target)
            earlier = by_ends.setdefault(ends, [])
            equally_long = (
                candidate
                for candidate in earlier
                if isinstance(activity, Run) or (isinstance(candidate, Transfer) and candidate.ticks == activity.ticks)
            )
            first_like[activity.name] = next(equally_long, activity).name
            earlier.append(activity)
        return first_like

    def range_starts(self, num_ranks: int) -> range:
        """Return the first ranks of the aligned rank ranges of a size."""
        return range(0, self.num_ranks - num_ranks + 1, min(num_ranks, self.range_step or num_ranks))

    def modes(self, task: str) -> tuple[Mode, ...]:
        return next(c.modes for c in self.tasks if c.name == task)

    def with_tasks(self, tasks: tuple[Task, ...]) -> Problem:
        """Return the same problem with other modes."""
        return replace(self, tasks=tasks)

    def with_modes(self, indices: Mapping[str, Iterable[int]]) -> Problem:
        """Return the problem with part of the modes of some tasks, given by their indices, and the transfers between
        the layouts that are left."""
        tasks = tuple(
            Task(task.name, tuple(task.modes[index] for index in sorted({*indices[task.name]})))
            if task.name in indices
            else task
            for task in self.tasks
        )
        layouts = {task.name: {mode.resource.layout for mode in task.modes} for task in tasks}
        activities = tuple(
            replace(activity, ticks=activity.ticks.among(layouts[activity.source], layouts[activity.target]))
            if isinstance(activity, Transfer)
            else activity
            for activity in self.activities
        )
        return replace(self, tasks=tasks, activities=activities)

    def owners(self, task: str) -> tuple[str, ...]:
        """Return the earlier tasks of the group, whose copy this task shares if it is on the same resource."""
        group = next((g for g in self.sharing_groups if task in g), (task,))
        return group[: group.index(task)]

    def early(self, activity: Activity, picked: Mapping[str, Mode]) -> int:
        """Return the ticks by which an activity may start before the end of what streams to it."""
        return picked[activity.task].early_ticks if isinstance(activity, Run) else 0

    def late(self, activity: Activity, picked: Mapping[str, Mode]) -> int:
        """Return the ticks from the end of an activity until its late output has arrived."""
        return picked[activity.task].late_ticks if isinstance(activity, Run) else 0

    def occupied(self, activity: Activity, resources: Mapping[str, Resource]) -> frozenset[int]:
        """Return the ranks that an activity occupies if its tasks are at these resources."""
        if isinstance(activity, Run):
            return frozenset(resources[activity.task].ranks)
        source, target = frozenset(resources[activity.source].ranks), frozenset(resources[activity.target].ranks)
        return {"source": source, "target": target, "both": source | target}[activity.occupies]

    def duration(self, activity: Activity, picked: Mapping[str, Mode]) -> int:
        """Return the ticks that an activity takes with these modes."""
        if isinstance(activity, Run):
            return picked[activity.task].ticks
        source, target = picked[activity.source].resource, picked[activity.target].resource
        if any(picked[owner].resource == target for owner in self.owners(activity.target)):
            return 0
        return activity.ticks_between(source, target, source.overlap(target))

    def memory(self, picked: Mapping[str, Mode]) -> tuple[int, ...]:
        """Return the peak memory units on the ranks of each atom."""
        return tuple(self._units_on(picked, atom.start) for atom in self.atoms)

    def _units_on(self, picked: Mapping[str, Mode], rank: int) -> int:
        on_rank = {name: mode for name, mode in picked.items() if rank in mode.resource.ranks}
        resident = sum(
            mode.resident_units - mode.shared_units * self._shares(name, picked) for name, mode in on_rank.items()
        )
        return resident + max((mode.transient_units for mode in on_rank.values()), default=0)

    def _shares(self, task: str, picked: Mapping[str, Mode]) -> bool:
        return any(picked[owner].resource == picked[task].resource for owner in self.owners(task))


def earliest_ends(
    problem: Problem, picked: Mapping[str, Mode], order: Iterable[str], not_before: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return when each activity ends if the ranks run the activities in this order, each as early as possible.

    An activity in `not_before` starts no earlier than the tick given there.
    """
    not_before, activities = not_before or {}, {activity.name: activity for activity in problem.activities}
    predecessors: dict[str, list[Precedence]] = {name: [] for name in activities}
    for precedence in problem.precedences:
        predecessors[precedence.after].append(precedence)
    resources = {name: mode.resource for name, mode in picked.items()}
    late = {name: problem.late(activity, picked) for name, activity in activities.items()}
    free_at = dict.fromkeys(range(problem.num_ranks), 0)
    starts: dict[str, int] = {}
    ends: dict[str, int] = {}
    for name in order:
        ticks = problem.duration(activities[name], picked)
        ranks = problem.occupied(activities[name], resources) if ticks else frozenset()
        early = problem.early(activities[name], picked)
        ready = (p.earliest(starts[p.before], ends[p.before], early, late[p.before]) for p in predecessors[name])
        starts[name] = max([not_before.get(name, 0), *ready, *(free_at[rank] for rank in ranks)])
        ends[name] = starts[name] + ticks
        free_at.update(dict.fromkeys(ranks, ends[name]))
    return ends


class TimedPeriod(NamedTuple):
    """A schedule of one period: its length and the start of each activity, in ticks."""

    makespan: int
    starts: Mapping[str, int]


def shortest_period(problem: Problem, picked: Mapping[str, Mode], order: Sequence[str]) -> TimedPeriod:
    """Return the shortest period in which the ranks run the activities in this order.

    An activity that would start before its input from an earlier period has arrived starts later in its period: this
    may delay the end of the period, but a shorter period then leaves the input enough time. For a given length of the
    period the earliest starts are longest paths, which contain each carried precedence at most once. The length is
    found by bisection."""
    activities = {activity.name: activity for activity in problem.activities}
    ticks = {name: problem.duration(activity, picked) for name, activity in activities.items()}
    late = {wait.before: problem.late(activities[wait.before], picked) for wait in problem.carried}
    ends = earliest_ends(problem, picked, order)

    def arrival(wait: CarriedPrecedence, ends: Mapping[str, int]) -> int:
        return wait.arrival(ends[wait.before], late[wait.before])

    def within(makespan: int) -> dict[str, int] | None:
        """Return the earliest ends in a period of this length, or None if it is too short."""
        not_before: dict[str, int] = {}
        for _ in range(len(problem.carried) + 1):
            ends = earliest_ends(problem, picked, order, not_before)
            if max(ends.values()) > makespan:
                return None
            needed = {w.after: arrival(w, ends) - w.periods * makespan for w in problem.carried}
            for wait in problem.carried:
                needed[wait.after] = max(needed[wait.after], arrival(wait, ends) - wait.periods * makespan)
            late_starts = {name: tick for name, tick in needed.items() if tick > ends[name] - ticks[name]}
            if not late_starts:
                return ends
            not_before.update(late_starts)
        return None

    low = max(ends.values())
    waits = (-(-(arrival(w, ends) - ends[w.after] + ticks[w.after]) // w.periods) for w in problem.carried)
    high = max(low, max(waits, default=0))
    while low < high:
        middle = (low + high) // 2
        feasible_ends = within(middle)
        if feasible_ends is None:
            low = middle + 1
        else:
            high, ends = middle, feasible_ends
    return TimedPeriod(high, {name: end - ticks[name] for name, end in ends.items()})


def _check_rank_ranges(modes: Sequence[Mode], num_ranks: int, step: int) -> None:
    """Check that rank ranges tile each other without gaps: each size divides the next up to `step`.

    Raises ValueError otherwise.
    """
    if any(mode.resource.first_rank for mode in modes):
        raise ValueError("a mode that may be anywhere has first rank 0 in the problem.")
    sizes = sorted({mode.resource.num_ranks for mode in modes} - {num_ranks})
    if invalid := [size for size in sizes if size > step and size % step]:
        raise ValueError(f"{invalid[0]} ranks are neither a multiple of {step} nor all {num_ranks}.")
    chain = [*(size for size in sizes if size < step), *([step] if step < num_ranks else [])]
    if invalid := [size for size, larger in pairwise(chain) if larger % size]:
        raise ValueError(f"{invalid[0]} ranks do not divide the next larger rank range of {chain}.")


def _check_modes(task: Task, num_ranks: int) -> None:
    shared: dict[Resource, int] = {}
    for mode in task.modes:
        resource = mode.resource
        if resource.first_rank < 0 or resource.num_ranks < 1 or resource.ranks.stop > num_ranks:
            raise ValueError(f"{task.name}: ranks {resource.ranks} are not within the {num_ranks} ranks.")
        if min(mode.ticks, mode.resident_units, mode.transient_units) < 0:
            raise ValueError(f"{task.name}: a mode has a negative duration or memory.")
        if not 0 <= mode.early_ticks <= mode.ticks:
            raise ValueError(f"{task.name}: a mode of {mode.ticks} ticks starts {mode.early_ticks} early.")
        if mode.late_ticks < 0:
            raise ValueError(f"{task.name}: a mode is {mode.late_ticks} ticks late; use 0 or more.")
        if not 0 <= mode.shared_units <= mode.resident_units:
            raise ValueError(f"{task.name}: {mode.shared_units} of {mode.resident_units} units cannot be shared.")
        if shared.setdefault(resource, mode.shared_units) != mode.shared_units:
            raise ValueError(f"{task.name}: copies of two sizes at {resource}.")
