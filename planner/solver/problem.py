"""The optimisation problem as plain data, without any knowledge of solvers, stages or seconds.

A call is a decision, made once: it picks one option, which gives ranks, a layout, a duration and memory (the planner
makes a call of every stage). A task occupies ranks for some time: it is a run of a call, or a transfer of weights
between the places that two calls picked. Times are whole ticks and memory is in whole units;
`planner/search/formulate.py` decides how long a tick and how large a unit is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

MAX_SUM = 2**31 - 1
"""Largest sum of coefficients; beyond it CP-SAT 9.15 can certify a wrong optimum (or-tools#5293)."""


class Place(NamedTuple):
    """Ranks and a layout. Calls that may share a copy of their weights do so exactly if they are at the same place."""

    first_rank: int
    num_ranks: int
    layout: str

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.num_ranks)

    def overlap(self, other: Place) -> int:
        """Return the number of ranks that two places have in common."""
        return len(range(max(self.ranks.start, other.ranks.start), min(self.ranks.stop, other.ranks.stop)))


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to run a call; sharing a copy of the weights saves `shared_units` of its `resident_units` of memory.

    A run may start `early_ticks` before the end of the task that streams to it. What it delivers late (rewards) arrives
    `late_ticks` after its end.
    """

    place: Place
    ticks: int
    resident_units: int = 0
    shared_units: int = 0
    transient_units: int = 0
    early_ticks: int = 0
    late_ticks: int = 0

    def at(self, first_rank: int) -> Option:
        """Return the same option on other ranks."""
        return replace(self, place=self.place._replace(first_rank=first_rank))


@dataclass(frozen=True)
class CallOptions:
    """A decision: all runs of the call use the one option that is picked."""

    name: str
    options: tuple[Option, ...]


@dataclass(frozen=True, kw_only=True)
class CallRun:
    """A task: one run of a call, on the ranks and for the ticks of its option."""

    name: str
    call: str


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """A task: weights move from the place of `source` to the place of `target`.

    It occupies the source's ranks, the target's, or both. `ticks` is keyed by (source layout, target layout, number of
    common ranks); a missing key takes no time, and neither does a target that shares a copy.
    """

    name: str
    source: str
    target: str
    occupies: Literal["source", "target", "both"]
    ticks: Mapping[tuple[str, str, int], int]

    def ticks_between(self, source: Place, target: Place, overlap: int) -> int:
        """Return the ticks of the transfer if the two places have `overlap` ranks in common."""
        return self.ticks.get((source.layout, target.layout, overlap), 0)


Task: TypeAlias = CallRun | Transfer


class Precedence(NamedTuple):
    """`after` starts no earlier than `lag` ticks past the end of `before`.

    If `streamed`, `after` is a run that may start as many ticks earlier as its option's `early_ticks`, but not before
    `before` starts. If `late`, `before` is a run whose option's `late_ticks` are waited for too.
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
    """Pick one option per call and an order of the tasks that minimise the period, called the makespan here.

    The period lasts until the last task ends, and long enough for what is `carried` to later periods; all periods have
    the same schedule.

    `sharing_groups` lists groups of calls in order of ownership: a call at the same place as an earlier one of its
    group shares that call's copy. The memory on a rank is the resident units of every copy on it, plus the largest
    transient of its calls.

    The ranks of two calls are disjoint or nested.

    With `anywhere`, an option is written with first rank 0 and may be on every aligned rank range of its size: sizes of
    at least `range_step` ranks are multiples of `range_step` and start at multiples of it; smaller sizes divide it and
    start at multiples of themselves. `range_step` defaults to the number of all ranks.
    """

    num_ranks: int
    device_units: int
    calls: tuple[CallOptions, ...]
    tasks: tuple[Task, ...]
    precedences: tuple[Precedence, ...] = ()
    carried: tuple[CarriedPrecedence, ...] = ()
    sharing_groups: tuple[tuple[str, ...], ...] = ()
    anywhere: bool = False
    range_step: int = 0

    def __post_init__(self) -> None:
        self._check_names()
        for call in self.calls:
            _check_options(call, self.num_ranks)
        if self.anywhere:
            options = [option for call in self.calls for option in call.options]
            _check_rank_ranges(options, self.num_ranks, self.range_step or self.num_ranks)
        if self.horizon > MAX_SUM:
            raise ValueError(f"the durations add up to {self.horizon} ticks, above {MAX_SUM}; use a longer tick.")
        try:
            _ = self.order
        except CycleError as error:
            raise ValueError(f"the precedences form a cycle: {' -> '.join(error.args[1])}.") from None

    def _check_names(self) -> None:
        for kind, names in (("call", [c.name for c in self.calls]), ("task", [t.name for t in self.tasks])):
            if len(set(names)) < len(names):
                raise ValueError(f"two {kind}s share a name: {sorted(names)}.")
        used = set(self.runs.values())
        used |= {name for task in self.tasks if isinstance(task, Transfer) for name in (task.source, task.target)}
        used |= {name for group in self.sharing_groups for name in group}
        if unknown := used - {call.name for call in self.calls}:
            raise ValueError(f"there is no call named {sorted(unknown)}.")
        waits = self._all_precedences
        ends = {name for wait in waits for name in (wait.before, wait.after)}
        if unknown := ends - {task.name for task in self.tasks}:
            raise ValueError(f"there is no task named {sorted(unknown)}.")
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
        """The call of each run, keyed by the task's name."""
        return {task.name: task.call for task in self.tasks if isinstance(task, CallRun)}

    @cached_property
    def horizon(self) -> int:
        """Ticks within which every schedule without idle time ends and everything carried over has arrived."""
        longest = {call.name: max((o.ticks for o in call.options), default=0) for call in self.calls}
        runs = sum(longest[task.call] for task in self.tasks if isinstance(task, CallRun))
        transfers = sum(max(t.ticks.values(), default=0) for t in self.tasks if isinstance(t, Transfer))
        return runs + transfers + sum(max(0, wait.lag) for wait in self._all_precedences) + self._total_late_ticks

    @property
    def _all_precedences(self) -> tuple[Precedence | CarriedPrecedence, ...]:
        return (*self.precedences, *self.carried)

    @property
    def _total_late_ticks(self) -> int:
        """Upper bound on the sum of all late ticks that are waited for."""
        latest = {call.name: max((o.late_ticks for o in call.options), default=0) for call in self.calls}
        return sum(latest[self.runs[wait.before]] for wait in self._all_precedences if wait.late)

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The names of the tasks in a topological order of the precedences."""
        sorter: TopologicalSorter[str] = TopologicalSorter({task.name: () for task in self.tasks})
        for precedence in self.precedences:
            sorter.add(precedence.after, precedence.before)
        return tuple(sorter.static_order())

    @cached_property
    def atoms(self) -> tuple[range, ...]:
        """The largest rank ranges that every option covers entirely or not at all."""
        bounds = {0, self.num_ranks}
        for call in self.calls:
            for option in call.options:
                bounds.update((option.place.ranks.start, option.place.ranks.stop))
        sorted_bounds = sorted(bounds)
        return tuple(range(a, b) for a, b in pairwise(sorted_bounds))

    @cached_property
    def tied(self) -> frozenset[str]:
        """The calls whose layout matters to others: members of a sharing group, and ends of transfers."""
        ends = (name for task in self.tasks if isinstance(task, Transfer) for name in (task.source, task.target))
        return frozenset({*ends, *(name for group in self.sharing_groups for name in group)})

    @cached_property
    def lasts_like(self) -> Mapping[str, str]:
        """For each task, the first task that takes equally long whatever is picked.

        That is a run of the same call, or an equal transfer.
        """
        by_ends: dict[tuple[str, ...], list[Task]] = {}
        first_like: dict[str, str] = {}
        for task in self.tasks:
            ends = (task.call,) if isinstance(task, CallRun) else (task.source, task.target)
            earlier = by_ends.setdefault(ends, [])
            equally_long = (
                candidate
                for candidate in earlier
                if isinstance(task, CallRun) or (isinstance(candidate, Transfer) and candidate.ticks == task.ticks)
            )
            first_like[task.name] = next(equally_long, task).name
            earlier.append(task)
        return first_like

    def range_starts(self, num_ranks: int) -> range:
        """Return the first ranks of the aligned rank ranges of a size."""
        return range(0, self.num_ranks - num_ranks + 1, min(num_ranks, self.range_step or num_ranks))

    def options(self, call: str) -> tuple[Option, ...]:
        return next(c.options for c in self.calls if c.name == call)

    def with_calls(self, calls: tuple[CallOptions, ...]) -> Problem:
        """Return the same problem with other options."""
        return replace(self, calls=calls)

    def owners(self, call: str) -> tuple[str, ...]:
        """Return the earlier calls of the group, whose copy this call shares if it is at the same place."""
        group = next((g for g in self.sharing_groups if call in g), (call,))
        return group[: group.index(call)]

    def early(self, task: Task, picked: Mapping[str, Option]) -> int:
        """Return the ticks by which a task may start before the end of what streams to it."""
        return picked[task.call].early_ticks if isinstance(task, CallRun) else 0

    def late(self, task: Task, picked: Mapping[str, Option]) -> int:
        """Return the ticks from the end of a task until what it delivers late has arrived."""
        return picked[task.call].late_ticks if isinstance(task, CallRun) else 0

    def occupied(self, task: Task, places: Mapping[str, Place]) -> frozenset[int]:
        """Return the ranks that a task occupies if its calls are at these places."""
        if isinstance(task, CallRun):
            return frozenset(places[task.call].ranks)
        source, target = frozenset(places[task.source].ranks), frozenset(places[task.target].ranks)
        return {"source": source, "target": target, "both": source | target}[task.occupies]

    def duration(self, task: Task, picked: Mapping[str, Option]) -> int:
        """Return the ticks that a task takes with these options."""
        if isinstance(task, CallRun):
            return picked[task.call].ticks
        source, target = picked[task.source].place, picked[task.target].place
        if any(picked[owner].place == target for owner in self.owners(task.target)):
            return 0
        return task.ticks_between(source, target, source.overlap(target))

    def memory(self, picked: Mapping[str, Option]) -> tuple[int, ...]:
        """Return the peak memory units on the ranks of each atom."""
        return tuple(self._units_on(picked, atom.start) for atom in self.atoms)

    def _units_on(self, picked: Mapping[str, Option], rank: int) -> int:
        on_rank = {name: option for name, option in picked.items() if rank in option.place.ranks}
        resident = sum(
            option.resident_units - option.shared_units * self._shares(name, picked) for name, option in on_rank.items()
        )
        return resident + max((option.transient_units for option in on_rank.values()), default=0)

    def _shares(self, call: str, picked: Mapping[str, Option]) -> bool:
        return any(picked[owner].place == picked[call].place for owner in self.owners(call))


def earliest_ends(
    problem: Problem, picked: Mapping[str, Option], order: Iterable[str], not_before: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return when each task ends if the ranks run the tasks in this order, each as early as possible.

    A task in `not_before` starts no earlier than the tick given there.
    """
    not_before, tasks = not_before or {}, {task.name: task for task in problem.tasks}
    predecessors: dict[str, list[Precedence]] = {name: [] for name in tasks}
    for precedence in problem.precedences:
        predecessors[precedence.after].append(precedence)
    places = {name: option.place for name, option in picked.items()}
    late = {name: problem.late(task, picked) for name, task in tasks.items()}
    free_at = dict.fromkeys(range(problem.num_ranks), 0)
    starts: dict[str, int] = {}
    ends: dict[str, int] = {}
    for name in order:
        ticks = problem.duration(tasks[name], picked)
        ranks = problem.occupied(tasks[name], places) if ticks else frozenset()
        early = problem.early(tasks[name], picked)
        ready = (p.earliest(starts[p.before], ends[p.before], early, late[p.before]) for p in predecessors[name])
        starts[name] = max([not_before.get(name, 0), *ready, *(free_at[rank] for rank in ranks)])
        ends[name] = starts[name] + ticks
        free_at.update(dict.fromkeys(ranks, ends[name]))
    return ends


class TimedPeriod(NamedTuple):
    """A schedule of one period: its length and the start of each task, in ticks."""

    makespan: int
    starts: Mapping[str, int]


def shortest_period(problem: Problem, picked: Mapping[str, Option], order: Sequence[str]) -> TimedPeriod:
    """Return the shortest period in which the ranks run the tasks in this order.

    A task that would start before its input from an earlier period has arrived is delayed: that lengthens this period,
    but shortens the time that has to pass before it. For a given length of the period the earliest starts are longest
    paths, which contain each carried precedence at most once. The length is found by bisection.
    """
    tasks = {task.name: task for task in problem.tasks}
    ticks = {name: problem.duration(task, picked) for name, task in tasks.items()}
    late = {wait.before: problem.late(tasks[wait.before], picked) for wait in problem.carried}
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


def _check_rank_ranges(options: Sequence[Option], num_ranks: int, step: int) -> None:
    """Check that rank ranges tile each other without gaps: each size divides the next up to `step`.

    Raises ValueError otherwise.
    """
    if any(option.place.first_rank for option in options):
        raise ValueError("an option that may be anywhere has first rank 0 in the problem.")
    sizes = sorted({option.place.num_ranks for option in options} - {num_ranks})
    if invalid := [size for size in sizes if size > step and size % step]:
        raise ValueError(f"{invalid[0]} ranks are neither a multiple of {step} nor all {num_ranks}.")
    chain = [*(size for size in sizes if size < step), *([step] if step < num_ranks else [])]
    if invalid := [size for size, larger in pairwise(chain) if larger % size]:
        raise ValueError(f"{invalid[0]} ranks do not divide the next larger rank range of {chain}.")


def _check_options(call: CallOptions, num_ranks: int) -> None:
    shared: dict[Place, int] = {}
    for option in call.options:
        place = option.place
        if place.first_rank < 0 or place.num_ranks < 1 or place.ranks.stop > num_ranks:
            raise ValueError(f"{call.name}: ranks {place.ranks} are not within the {num_ranks} ranks.")
        if min(option.ticks, option.resident_units, option.transient_units) < 0:
            raise ValueError(f"{call.name}: an option has a negative duration or memory.")
        if not 0 <= option.early_ticks <= option.ticks:
            raise ValueError(f"{call.name}: an option of {option.ticks} ticks starts {option.early_ticks} early.")
        if option.late_ticks < 0:
            raise ValueError(f"{call.name}: an option is {option.late_ticks} ticks late; use 0 or more.")
        if not 0 <= option.shared_units <= option.resident_units:
            raise ValueError(f"{call.name}: {option.shared_units} of {option.resident_units} units cannot be shared.")
        if shared.setdefault(place, option.shared_units) != option.shared_units:
            raise ValueError(f"{call.name}: copies of two sizes at {place}.")
