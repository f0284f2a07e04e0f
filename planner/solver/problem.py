"""The problem the search solves, as data. It has never heard of a solver, of stages or of seconds.

A call picks one option: ranks, a layout, a duration and memory. A task occupies ranks for a time: a run of a call, or a
transfer of weights between the choices of two calls. Times are whole ticks, memory is whole blocks; what they stand for
is decided where the problem is formulated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

MAX_SUM = 2**31 - 1
"""No sum of coefficients may pass this: beyond it CP-SAT 9.15 can certify a wrong optimum (or-tools#5293)."""


class Place(NamedTuple):
    """Ranks and a layout. Calls that may share a copy of their weights do so exactly when they are at one place."""

    first_rank: int
    num_ranks: int
    layout: str

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.num_ranks)

    def overlap(self, other: Place) -> int:
        """The number of ranks that are in both."""
        return len(range(max(self.ranks.start, other.ranks.start), min(self.ranks.stop, other.ranks.stop)))


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to run a call. `shared_blocks` is the part of `resident_blocks` that a shared copy saves.

    `early_ticks` is how long before the end of what streams to it a run of the call may start, `late_ticks` how long
    after its end a run has all that it hands over late.
    """

    place: Place
    ticks: int
    resident_blocks: int = 0
    shared_blocks: int = 0
    transient_blocks: int = 0
    early_ticks: int = 0
    late_ticks: int = 0

    def at(self, first_rank: int) -> Option:
        """The same on other ranks."""
        return replace(self, place=self.place._replace(first_rank=first_rank))


@dataclass(frozen=True)
class CallOptions:
    """A decision: every run of the call uses the one option that is picked."""

    name: str
    options: tuple[Option, ...]


@dataclass(frozen=True, kw_only=True)
class CallRun:
    """A task: the call's option, on its ranks, for its ticks."""

    name: str
    call: str


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """A task: weights go from the place of `source` to the place of `target`.

    It occupies the source's ranks, the target's, or both together. `ticks` is keyed by both layouts and the number of
    ranks in both places; a key that is absent takes no time, and so does a target that shares a copy.
    """

    name: str
    source: str
    target: str
    occupies: Literal["source", "target", "both"]
    ticks: Mapping[tuple[str, str, int], int]

    def ticks_between(self, source: Place, target: Place, overlap: int) -> int:
        """The ticks when the two places have `overlap` ranks in common."""
        return self.ticks.get((source.layout, target.layout, overlap), 0)


Task: TypeAlias = CallRun | Transfer


class Precedence(NamedTuple):
    """`after` starts no earlier than `lag` ticks past the end of `before`.

    When it is streamed, `after` is a run; it starts as many ticks earlier than that as its option's `early_ticks`,
    and not before `before` starts. When it is late, `before` is a run whose option's `late_ticks` are waited for too.
    """

    before: str
    after: str
    lag: int = 0
    streamed: bool = False
    late: bool = False

    def earliest(self, start: int, end: int, early: int, late: int = 0) -> int:
        """The first tick at which `after` may start when `before` runs from `start` to `end`."""
        arrival = end + self.lag + late * self.late
        return max(start, arrival - early) if self.streamed else arrival


class CarriedPrecedence(NamedTuple):
    """`after` of the turn that comes so many `turns` later starts no earlier than `lag` ticks past the end of `before`:
    turns x period >= end + lag - start, as in modulo scheduling. `late` as in `Precedence`."""

    before: str
    after: str
    turns: int
    lag: int = 0
    late: bool = False

    def arrival(self, end: int, late: int) -> int:
        """The tick at which all is handed over when `before` ends at `end`."""
        return end + self.lag + late * self.late


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Pick one option per call and an order of the tasks, so that the turn is as short as possible: it lasts until the
    last task ends, and as long as what is `carried` to later turns needs. All turns are alike. The length of a turn is
    the makespan here and in the solver.

    `copies` lists groups of calls in order of ownership: a call at the same place as an earlier one of its group shares
    that one's copy. Memory on a rank: the resident blocks of every copy on it, and the largest transient of its calls.

    Of two calls' ranks, some of one lie in the other's only if all do.

    With `anywhere`, an option, written with rank 0 as its first, may be on every block of its number of ranks: of
    `step` ranks and more they are multiples of it and start at one, smaller ones divide it and start at multiples of
    their own. Without a `step` it is the number of all ranks.
    """

    num_ranks: int
    device_blocks: int
    calls: tuple[CallOptions, ...]
    tasks: tuple[Task, ...]
    precedences: tuple[Precedence, ...] = ()
    carried: tuple[CarriedPrecedence, ...] = ()
    copies: tuple[tuple[str, ...], ...] = ()
    anywhere: bool = False
    step: int = 0

    def __post_init__(self) -> None:
        self._check_names()
        for call in self.calls:
            _check_options(call, self.num_ranks)
        if self.anywhere:
            options = [option for call in self.calls for option in call.options]
            _check_blocks(options, self.num_ranks, self.step or self.num_ranks)
        if self.horizon > MAX_SUM:
            raise ValueError(f"the durations add up to {self.horizon} ticks, above {MAX_SUM}; use a longer tick.")
        try:
            _ = self.order
        except CycleError as error:
            raise ValueError(f"the precedences go in a circle: {' -> '.join(error.args[1])}.") from None

    def _check_names(self) -> None:
        for what, names in (("call", [c.name for c in self.calls]), ("task", [t.name for t in self.tasks])):
            if len(set(names)) < len(names):
                raise ValueError(f"two {what}s share a name: {sorted(names)}.")
        used = set(self.runs.values())
        used |= {name for task in self.tasks if isinstance(task, Transfer) for name in (task.source, task.target)}
        used |= {name for group in self.copies for name in group}
        if unknown := used - {call.name for call in self.calls}:
            raise ValueError(f"there is no call named {sorted(unknown)}.")
        waits = self._waits
        ends = {name for wait in waits for name in (wait.before, wait.after)}
        if unknown := ends - {task.name for task in self.tasks}:
            raise ValueError(f"there is no task named {sorted(unknown)}.")
        if others := {p.after for p in self.precedences if p.streamed} - set(self.runs):
            raise ValueError(f"only a run can be streamed to, not {sorted(others)}.")
        if others := {wait.before for wait in waits if wait.late} - set(self.runs):
            raise ValueError(f"only a run can be late, not {sorted(others)}.")
        if odd := [wait for wait in self.carried if wait.turns < 1]:
            raise ValueError(f"{odd[0].before} is carried by {odd[0].turns} turns to {odd[0].after}; use 1 or more.")

    @cached_property
    def runs(self) -> Mapping[str, str]:
        """The call of each run, by the task's name."""
        return {task.name: task.call for task in self.tasks if isinstance(task, CallRun)}

    @cached_property
    def horizon(self) -> int:
        """Ticks within which every schedule without idle time ends, and what is carried has arrived."""
        longest = {call.name: max((o.ticks for o in call.options), default=0) for call in self.calls}
        runs = sum(longest[task.call] for task in self.tasks if isinstance(task, CallRun))
        transfers = sum(max(t.ticks.values(), default=0) for t in self.tasks if isinstance(t, Transfer))
        return runs + transfers + sum(max(0, wait.lag) for wait in self._waits) + self._latest

    @property
    def _waits(self) -> tuple[Precedence | CarriedPrecedence, ...]:
        return (*self.precedences, *self.carried)

    @property
    def _latest(self) -> int:
        """Most ticks of all that may be late."""
        latest = {call.name: max((o.late_ticks for o in call.options), default=0) for call in self.calls}
        return sum(latest[self.runs[wait.before]] for wait in self._waits if wait.late)

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The names of the tasks, each after those it waits for."""
        sorter: TopologicalSorter[str] = TopologicalSorter({task.name: () for task in self.tasks})
        for precedence in self.precedences:
            sorter.add(precedence.after, precedence.before)
        return tuple(sorter.static_order())

    @cached_property
    def atoms(self) -> tuple[range, ...]:
        """The ranks in the largest consecutive groups that every option covers wholly or not at all."""
        edges = {0, self.num_ranks}
        for call in self.calls:
            for option in call.options:
                edges.update((option.place.ranks.start, option.place.ranks.stop))
        cuts = sorted(edges)
        return tuple(range(a, b) for a, b in pairwise(cuts))

    @cached_property
    def tied(self) -> frozenset[str]:
        """The calls whose layout matters to others: those of a group of copies, and the ends of transfers."""
        ends = (name for task in self.tasks if isinstance(task, Transfer) for name in (task.source, task.target))
        return frozenset({*ends, *(name for group in self.copies for name in group)})

    @cached_property
    def lasts_like(self) -> Mapping[str, str]:
        """For each task the first that takes as long whatever is picked: a run of the same call, or the same move."""
        first: dict[tuple[str, ...], list[Task]] = {}
        found: dict[str, str] = {}
        for task in self.tasks:
            ends = (task.call,) if isinstance(task, CallRun) else (task.source, task.target)
            known = first.setdefault(ends, [])
            same = (
                o for o in known if isinstance(task, CallRun) or (isinstance(o, Transfer) and o.ticks == task.ticks)
            )
            found[task.name] = next(same, task).name
            known.append(task)
        return found

    def blocks(self, num_ranks: int) -> range:
        """The first ranks of the blocks of a number of ranks."""
        return range(0, self.num_ranks - num_ranks + 1, min(num_ranks, self.step or num_ranks))

    def options(self, call: str) -> tuple[Option, ...]:
        return next(c.options for c in self.calls if c.name == call)

    def with_calls(self, calls: tuple[CallOptions, ...]) -> Problem:
        """The same problem with other options."""
        return replace(self, calls=calls)

    def owners(self, call: str) -> tuple[str, ...]:
        """The calls whose copy this one shares when it is at the same place."""
        group = next((g for g in self.copies if call in g), (call,))
        return group[: group.index(call)]

    def early(self, task: Task, picked: Mapping[str, Option]) -> int:
        """The ticks by which a task may start before the end of what streams to it."""
        return picked[task.call].early_ticks if isinstance(task, CallRun) else 0

    def late(self, task: Task, picked: Mapping[str, Option]) -> int:
        """The ticks after the end of a task until it has all that it hands over late."""
        return picked[task.call].late_ticks if isinstance(task, CallRun) else 0

    def occupied(self, task: Task, places: Mapping[str, Place]) -> frozenset[int]:
        """The ranks that a task occupies when its calls are at these places."""
        if isinstance(task, CallRun):
            return frozenset(places[task.call].ranks)
        source, target = frozenset(places[task.source].ranks), frozenset(places[task.target].ranks)
        return {"source": source, "target": target, "both": source | target}[task.occupies]

    def duration(self, task: Task, picked: Mapping[str, Option]) -> int:
        """The ticks that a task takes with these options."""
        if isinstance(task, CallRun):
            return picked[task.call].ticks
        source, target = picked[task.source].place, picked[task.target].place
        if any(picked[owner].place == target for owner in self.owners(task.target)):
            return 0
        return task.ticks_between(source, target, source.overlap(target))

    def memory(self, picked: Mapping[str, Option]) -> tuple[int, ...]:
        """The blocks that each atom's ranks hold at the worst instant."""
        return tuple(self._blocks(picked, atom.start) for atom in self.atoms)

    def _blocks(self, picked: Mapping[str, Option], rank: int) -> int:
        here = {name: option for name, option in picked.items() if rank in option.place.ranks}
        resident = sum(
            option.resident_blocks - option.shared_blocks * self._shares(name, picked) for name, option in here.items()
        )
        return resident + max((option.transient_blocks for option in here.values()), default=0)

    def _shares(self, call: str, picked: Mapping[str, Option]) -> bool:
        return any(picked[owner].place == picked[call].place for owner in self.owners(call))


def ends_of(
    problem: Problem, picked: Mapping[str, Option], order: Iterable[str], held: Mapping[str, int] | None = None
) -> dict[str, int]:
    """When each task ends if the ranks take the tasks in this order, each as early as it can; those that are `held` not
    before a tick."""
    held, tasks = held or {}, {task.name: task for task in problem.tasks}
    waits: dict[str, list[Precedence]] = {name: [] for name in tasks}
    for precedence in problem.precedences:
        waits[precedence.after].append(precedence)
    places = {name: option.place for name, option in picked.items()}
    late = {name: problem.late(task, picked) for name, task in tasks.items()}
    free = dict.fromkeys(range(problem.num_ranks), 0)
    starts: dict[str, int] = {}
    ends: dict[str, int] = {}
    for name in order:
        ticks = problem.duration(tasks[name], picked)
        ranks = problem.occupied(tasks[name], places) if ticks else frozenset()
        early = problem.early(tasks[name], picked)
        ready = (p.earliest(starts[p.before], ends[p.before], early, late[p.before]) for p in waits[name])
        starts[name] = max([held.get(name, 0), *ready, *(free[rank] for rank in ranks)])
        ends[name] = starts[name] + ticks
        free.update(dict.fromkeys(ranks, ends[name]))
    return ends


class TimedTurn(NamedTuple):
    """A schedule of one turn: its length and when each task starts."""

    makespan: int
    starts: Mapping[str, int]


def shortest_turn(problem: Problem, picked: Mapping[str, Option], order: Sequence[str]) -> TimedTurn:
    """The shortest turn in which the ranks take the tasks in this order.

    A task that would begin before what an earlier turn hands to it has arrived is held: that lengthens this turn, and
    lets the earlier one be the shorter. For one length of the turn the least starts are longest paths, which go through
    each carried precedence once at most.
    """
    tasks = {task.name: task for task in problem.tasks}
    ticks = {name: problem.duration(task, picked) for name, task in tasks.items()}
    late = {wait.before: problem.late(tasks[wait.before], picked) for wait in problem.carried}
    ends = ends_of(problem, picked, order)

    def arrival(wait: CarriedPrecedence, ends: Mapping[str, int]) -> int:
        return wait.arrival(ends[wait.before], late[wait.before])

    def within(makespan: int) -> dict[str, int] | None:
        """The least ends in a turn of this length; None where it is too short."""
        held: dict[str, int] = {}
        for _ in range(len(problem.carried) + 1):
            ends = ends_of(problem, picked, order, held)
            if max(ends.values()) > makespan:
                return None
            needed = {w.after: arrival(w, ends) - w.turns * makespan for w in problem.carried}
            for wait in problem.carried:
                needed[wait.after] = max(needed[wait.after], arrival(wait, ends) - wait.turns * makespan)
            late_starts = {name: tick for name, tick in needed.items() if tick > ends[name] - ticks[name]}
            if not late_starts:
                return ends
            held.update(late_starts)
        return None

    low = max(ends.values())
    waits = (-(-(arrival(w, ends) - ends[w.after] + ticks[w.after]) // w.turns) for w in problem.carried)
    high = max(low, max(waits, default=0))
    while low < high:
        middle = (low + high) // 2
        found = within(middle)
        if found is None:
            low = middle + 1
        else:
            high, ends = middle, found
    return TimedTurn(high, {name: end - ticks[name] for name, end in ends.items()})


def _check_blocks(options: Sequence[Option], num_ranks: int, step: int) -> None:
    """Blocks fit into each other without a gap, the larger ones first, if each divides the next up to a step."""
    if any(option.place.first_rank for option in options):
        raise ValueError("an option that may be anywhere is written with rank 0 as its first.")
    sizes = sorted({option.place.num_ranks for option in options} - {num_ranks})
    if odd := [size for size in sizes if size > step and size % step]:
        raise ValueError(f"{odd[0]} ranks are neither a multiple of {step} nor all {num_ranks}.")
    chain = [*(size for size in sizes if size < step), *([step] if step < num_ranks else [])]
    if odd := [size for size, larger in pairwise(chain) if larger % size]:
        raise ValueError(f"{odd[0]} ranks do not divide the next larger block of {chain}.")


def _check_options(call: CallOptions, num_ranks: int) -> None:
    shared: dict[Place, int] = {}
    for option in call.options:
        place = option.place
        if place.first_rank < 0 or place.num_ranks < 1 or place.ranks.stop > num_ranks:
            raise ValueError(f"{call.name}: ranks {place.ranks} are not within the {num_ranks} ranks.")
        if min(option.ticks, option.resident_blocks, option.transient_blocks) < 0:
            raise ValueError(f"{call.name}: an option has a negative duration or memory.")
        if not 0 <= option.early_ticks <= option.ticks:
            raise ValueError(f"{call.name}: an option of {option.ticks} ticks starts {option.early_ticks} early.")
        if option.late_ticks < 0:
            raise ValueError(f"{call.name}: an option is {option.late_ticks} ticks late; use 0 or more.")
        if not 0 <= option.shared_blocks <= option.resident_blocks:
            raise ValueError(
                f"{call.name}: {option.shared_blocks} of {option.resident_blocks} blocks cannot be shared."
            )
        if shared.setdefault(place, option.shared_blocks) != option.shared_blocks:
            raise ValueError(f"{call.name}: copies of two sizes at {place}.")
