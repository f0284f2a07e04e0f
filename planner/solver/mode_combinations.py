"""Lower bounds on the answers with a combination of modes, for many combinations at once.

Tasks are joined one after the other, those that take longest first. A combination is one mode of every joined task
and, for each two of them, whether they have ranks in common. Combinations that exceed the device's memory or the
makespan are dropped, so few are left to be joined with the modes of the next task.

The bound of a combination is that of `MakespanBound` with all that is known of it:

    durations   of its modes, and of the transfers between their resources
    in turn     runs with ranks in common do not overlap
    copies      weights are shared only by tasks on the same resource
    memory      what it leaves is divided among the modes of the other tasks, which are faster the more they use. For
                every price p >= 0 of a unit of memory, in ticks,
                    sum of work  >=  sum of min over modes (work + p memory)  -  p (memory left)
                by weak duality; the highest of the bounds at some prices holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import combinations
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.solver.lower_bounds import ActivityWindow, Amount, LeastAmounts, MakespanBound
from meshwright.planner.solver.problem import Problem, Resource, Task, Transfer

Array: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]
Pair: TypeAlias = frozenset[str]
"""The names of two tasks."""

_AT_ONCE = 100_000
"""Number of combinations whose bounds are computed at once."""

_PRICES = np.concatenate(([0.0], np.geomspace(1 / 200, 5, 15)))
"""Prices of memory, as multiples of (bound on the makespan / memory of a device)."""

_MARGIN = 1e-9
"""Relative margin on a bound by prices, for the rounding of its sums."""


@dataclass(frozen=True)
class Combinations:
    """Some combinations of the modes of some tasks.

    `modes` has the index of the mode by task, `meets` whether two tasks have ranks in common by pair of tasks, and
    `bounds` a lower bound on the makespan of the answers that contain the combination, each [combinations].
    """

    modes: Mapping[str, Array]
    meets: Mapping[Pair, Mask]
    bounds: Array

    def __len__(self) -> int:
        return len(self.bounds)

    def where(self, kept: NDArray[np.bool_] | Array) -> Combinations:
        """Return the combinations at the positions that are kept."""
        return Combinations(
            {name: modes[kept] for name, modes in self.modes.items()},
            {pair: meets[kept] for pair, meets in self.meets.items()},
            self.bounds[kept],
        )


def combinations_within(problem: Problem, makespan: int, *, max_pairs: int) -> Combinations:
    """Return all combinations of some tasks, at least one, that may be part of an answer within the makespan.

    As many tasks are joined as possible with at most `max_pairs` pairs of a combination and a mode of the next task.
    No combination is left if the problem has no answer within the makespan that this bound cannot exclude.
    """
    joining = _Joining(problem, makespan)
    joined = joining.first()
    while len(joined) and len(joined) * joining.num_modes_of_next(joined) <= max_pairs:
        joined = joining.with_next(joined)
    return joined


@dataclass(frozen=True)
class _Columns:
    """The amounts of the modes of a task, each [modes]; `resource` is a number."""

    ticks: Array
    after_stream: Array
    late_delivery: Array
    work: Array
    size: Array
    resident: Array
    shared: Array
    transient: Array
    resource: Array

    @classmethod
    def of_task(cls, task: Task, resources: dict[Resource, int]) -> _Columns:
        """Return the columns of a task's modes; resources that are new are numbered."""
        rows = [
            (
                mode.ticks,
                mode.ticks - mode.early_ticks,
                mode.ticks + mode.late_ticks,
                mode.ticks * mode.resource.num_ranks,
                mode.resource.num_ranks,
                mode.resident_units,
                mode.shared_units,
                mode.transient_units,
                resources.setdefault(mode.resource, len(resources)),
            )
            for mode in task.modes
        ]
        return cls(*np.array(rows, dtype=np.int64).T)


class _Picked:
    """The amounts of one mode of a task in each of some combinations: the columns of the task, [combinations] each.

    A column is gathered when it is first read.
    """

    def __init__(self, columns: _Columns, modes: Array) -> None:
        self._columns, self._modes = columns, modes

    def __getattr__(self, name: str) -> Array:
        """Gather a column that has not been read before."""
        column: Array = getattr(self._columns, name)[self._modes]
        setattr(self, name, column)
        return column


class _Joining:
    """Joins the tasks of a problem in the order of their fastest modes, the slowest first.

    `columns` are the modes of every task, and `resources` what their numbers stand for. `least_copies` has the fewest
    units x ranks of each task's copies, and `prices` are those of a unit of memory on a rank, in ticks, [prices].
    """

    def __init__(self, problem: Problem, makespan: int) -> None:
        self.problem, self._makespan = problem, makespan
        self.bound = MakespanBound(problem)
        numbers: dict[Resource, int] = {}
        self.columns = {task.name: _Columns.of_task(task, numbers) for task in problem.tasks}
        self.resources = tuple(numbers)
        self.owners = {task.name: problem.owners(task.name) for task in problem.tasks}
        self._order = sorted(self.columns, key=lambda name: -int(self.columns[name].ticks.min()))
        scale = int(self.columns[self._order[0]].ticks.min()) / max(1, problem.device_units)
        self.prices = _PRICES * scale
        self.least_copies = {
            name: int((columns.size * self._own_units(name, columns)).min()) for name, columns in self.columns.items()
        }
        self._priced_work: dict[tuple[str, frozenset[str]], NDArray[np.float64]] = {}

    def first(self) -> Combinations:
        """Return the modes of the first task that may be part of an answer within the makespan."""
        name = self._order[0]
        modes = np.arange(len(self.columns[name].ticks))
        return self._bounded({name: modes}, {})

    def num_modes_of_next(self, joined: Combinations) -> int:
        """Return the number of modes of the next task; more than any limit if all tasks are joined."""
        is_last = len(joined.modes) == len(self._order)
        return np.iinfo(np.int64).max if is_last else len(self.columns[self._order[len(joined.modes)]].ticks)

    def with_next(self, joined: Combinations) -> Combinations:
        """Return the combinations of those joined so far with every mode of the next task."""
        name = self._order[len(joined.modes)]
        num_modes = len(self.columns[name].ticks)
        step = max(1, _AT_ONCE // num_modes)
        parts = [
            self._bounded(modes, meets)
            for first in range(0, len(joined), step)
            for modes, meets in self._placed(joined.where(np.arange(first, min(first + step, len(joined)))), name)
        ]
        return Combinations(
            {task: np.concatenate([part.modes[task] for part in parts]) for task in parts[0].modes},
            {pair: np.concatenate([part.meets[pair] for part in parts]) for pair in parts[0].meets},
            np.concatenate([part.bounds for part in parts]),
        )

    def _placed(self, joined: Combinations, name: str) -> Iterator[tuple[dict[str, Array], dict[Pair, Mask]]]:
        """Yield the combinations with every mode of a task, by whether it has ranks in common with all of the others
        or not with all of them."""
        num_modes = len(self.columns[name].ticks)
        rows, added = np.divmod(np.arange(len(joined) * num_modes), num_modes)
        modes = {task: of_task[rows] for task, of_task in joined.modes.items()} | {name: added}
        meets = {pair: of_pair[rows] for pair, of_pair in joined.meets.items()}
        placements = [(np.arange(len(rows)), meets)]
        for other in joined.modes:
            split: list[tuple[Array, dict[Pair, Mask]]] = []
            for positions, known in placements:
                columns = {task: _Picked(self.columns[task], of_task[positions]) for task, of_task in modes.items()}
                for of_pair, fits in self._relations(columns[other], columns[name]):
                    placed = known | {frozenset((other, name)): of_pair}
                    possible = fits & self._is_laminar(columns, placed, other, name)
                    if possible.any():
                        kept = {pair: is_met[possible] for pair, is_met in placed.items()}
                        split.append((positions[possible], kept))
            placements = split
        if not placements:
            nothing = np.arange(0)
            pairs = [*meets, *(frozenset((other, name)) for other in joined.modes)]
            placements = [(nothing, dict.fromkeys(pairs, nothing.astype(bool)))]
        for positions, placed in placements:
            yield {task: of_task[positions] for task, of_task in modes.items()}, placed

    def _relations(self, one: _Picked, other: _Picked) -> list[tuple[Mask, Mask]]:
        """Return whether the two tasks may have ranks in common, and whether that is possible, [combinations] each."""
        if self.problem.anywhere:
            apart = one.size + other.size <= self.problem.num_ranks
            return [(np.ones(len(apart), dtype=bool), np.ones(len(apart), dtype=bool)), (np.zeros_like(apart), apart)]
        first = np.array([resource.first_rank for resource in self.resources], dtype=np.int64)
        start, other_start = first[one.resource], first[other.resource]
        common = np.minimum(start + one.size, other_start + other.size) - np.maximum(start, other_start)
        return [(common > 0, (common <= 0) | (common == np.minimum(one.size, other.size)))]

    def _is_laminar(self, columns: Mapping[str, _Picked], meets: Mapping[Pair, Mask], other: str, name: str) -> Mask:
        """Return whether rank ranges of these sizes can be nested and disjoint as `meets` says, [combinations].

        Checks the two tasks with each third task whose relation to both is known. A range that meets two disjoint
        ranges contains both.
        """
        num_ranks, size = self.problem.num_ranks, {task: columns[task].size for task in columns}
        is_laminar = np.ones(len(size[name]), dtype=bool)
        for third in columns:
            if third in (other, name) or frozenset((third, name)) not in meets:
                continue
            trio = (other, name, third)
            met = {pair: meets[frozenset(pair)] for pair in combinations(trio, 2)}
            apart = ~np.any(list(met.values()), axis=0)
            is_laminar &= ~apart | (size[other] + size[name] + size[third] <= num_ranks)
            for middle in trio:
                left, right = (task for task in trio if task != middle)
                both = meets[frozenset((middle, left))] & meets[frozenset((middle, right))]
                contains = size[left] + size[right] <= size[middle]
                is_laminar &= ~both | meets[frozenset((left, right))] | contains
        return is_laminar

    def _bounded(self, modes: Mapping[str, Array], meets: Mapping[Pair, Mask]) -> Combinations:
        """Return the combinations that fit in memory and may be part of an answer within the makespan."""
        found = Combinations(modes, meets, np.zeros(len(next(iter(modes.values()))), dtype=np.int64))
        found = found.where(_View(self, found).fits_in_memory())
        for with_prices in (False, True):
            if len(found):
                bounds = _View(self, found).bounds(with_prices=with_prices)
                found = Combinations(found.modes, found.meets, bounds).where(bounds <= self._makespan)
        return found

    def _own_units(self, name: str, columns: _Columns) -> Array:
        """Return the units of memory that a task keeps if it shares whatever it may share."""
        return columns.resident - columns.shared * bool(self.owners[name])

    def priced_work(self, name: str, joined: Collection[str]) -> NDArray[np.float64]:
        """Return the least of work + price x memory over the modes of a task, in ticks x ranks, [resources, prices].

        With joined owners alone the task shares a copy only on an owner's resource, whose row says so; all rows are
        equal for a task that may share with a task that is not joined.
        """
        owners = frozenset(owner for owner in self.owners[name] if owner in joined)
        key = name, owners
        if key not in self._priced_work:
            columns, may_share = self.columns[name], len(owners) < len(self.owners[name])
            units = columns.size * (columns.resident - columns.shared * may_share)
            priced = columns.work[:, np.newaxis] + self.prices * units[:, np.newaxis]
            least = np.repeat(priced.min(axis=0)[np.newaxis], len(self.resources), axis=0)
            if owners:
                saved = self.prices * (columns.size * columns.shared * (not may_share))[:, np.newaxis]
                np.minimum.at(least, columns.resource, priced - saved)
            self._priced_work[key] = least
        return self._priced_work[key]


class _View:
    """The amounts of some combinations, and their bounds; every array is [combinations]."""

    def __init__(self, joining: _Joining, found: Combinations) -> None:
        self._joining, self._problem, self._found = joining, joining.problem, found
        self._columns = {name: _Picked(joining.columns[name], modes) for name, modes in found.modes.items()}
        self._shares = {name: self._shares_copy(name) for name in found.modes}
        self._resident = {
            name: columns.resident - columns.shared * (self._shares[name] | self._may_share(name))
            for name, columns in self._columns.items()
        }
        self._others = [name for name in joining.columns if name not in found.modes]

    def _meets(self, one: str, other: str) -> Mask:
        return self._found.meets[frozenset((one, other))]

    def _shares_copy(self, name: str) -> Mask:
        """Return whether a task is on the resource of a joined owner of its copy."""
        shares = np.zeros(len(self._found), dtype=bool)
        for owner in self._joining.owners[name]:
            if owner in self._columns:
                is_same = self._columns[owner].resource == self._columns[name].resource
                shares |= is_same & self._meets(owner, name)
        return shares

    def _may_share(self, name: str) -> bool:
        """True if a task has an owner that is not joined."""
        return any(owner not in self._columns for owner in self._joining.owners[name])

    def _contains(self, outer: str, inner: str) -> Mask:
        """Return whether the ranks of a task contain those of another."""
        return self._meets(outer, inner) & (self._columns[outer].size >= self._columns[inner].size)

    def fits_in_memory(self) -> Mask:
        """Return whether the joined tasks fit on the ranks of each of them, and the others on average."""
        fits = self._memory_left >= sum(self._joining.least_copies[name] for name in self._others)
        for name, columns in self._columns.items():
            resident, transient = self._resident[name], columns.transient
            for other in self._columns:
                if other != name:
                    contains = self._contains(other, name)
                    resident = resident + np.where(contains, self._resident[other], 0)
                    transient = np.where(contains, np.maximum(transient, self._columns[other].transient), transient)
            fits &= resident + transient <= self._problem.device_units
        return fits

    @cached_property
    def _memory_left(self) -> Array:
        """Return the units x ranks that the joined tasks leave for copies of the others."""
        left = np.full(len(self._found), self._problem.num_ranks * self._problem.device_units, dtype=np.int64)
        names = list(self._columns)
        for index, name in enumerate(names):
            columns = self._columns[name]
            around = np.zeros(len(self._found), dtype=np.int64)
            for position, other in enumerate(names):
                if other == name:
                    continue
                is_outer = self._contains(other, name)
                if position > index:  # of two tasks on the same ranks, the first counts as the outer one
                    is_outer &= self._columns[other].size > columns.size
                around = np.where(is_outer, np.maximum(around, self._columns[other].transient), around)
            left -= columns.size * (self._resident[name] + np.maximum(0, columns.transient - around))
        return left

    def bounds(self, *, with_prices: bool) -> Array:
        """Return a lower bound on the makespan of the answers with each combination, [combinations]."""
        least, columns = self._joining.bound.least, self._columns
        known = self._transfer_ticks() if with_prices else {}
        amounts = LeastAmounts(
            ticks={**least.ticks, **{name: of_task.ticks for name, of_task in columns.items()}},
            after_stream={**least.after_stream, **{name: of_task.after_stream for name, of_task in columns.items()}},
            late_delivery={**least.late_delivery, **{name: of_task.late_delivery for name, of_task in columns.items()}},
            window_ticks=partial(self._window_ticks, transfer_ticks=known, with_prices=with_prices),
            transfer_ticks=known,
            in_turn=self._in_turn(),
        )
        return np.broadcast_to(self._joining.bound.makespan(amounts), len(self._found))

    def _transfer_ticks(self) -> dict[str, Amount]:
        """Return the ticks of the transfers whose ends are joined, and which may not be left out by sharing."""
        return {
            activity.name: self._ticks_of(activity)
            for activity in self._problem.activities
            if isinstance(activity, Transfer)
            and {activity.source, activity.target} <= set(self._columns)
            and activity.source != activity.target
            and not self._may_share(activity.target)
        }

    def _ticks_of(self, transfer: Transfer) -> Array:
        source, target = self._columns[transfer.source].resource, self._columns[transfer.target].resource
        resources = self._joining.resources
        meets = self._meets(transfer.source, transfer.target)
        keys, inverse = np.unique((source * len(resources) + target) * 2 + meets, return_inverse=True)
        ticks = np.empty(len(keys), dtype=np.int64)
        for position, key in enumerate(keys.tolist()):
            ends, is_met = divmod(key, 2)
            one, other = (resources[number] for number in divmod(ends, len(resources)))
            ticks[position] = transfer.ticks_between(one, other, min(one.num_ranks, other.num_ranks) * is_met)
        return np.where(self._shares[transfer.target], 0, ticks[inverse])

    def _in_turn(self) -> dict[tuple[str, str], Mask]:
        """Return of the streamed precedences between joined tasks whether their runs take turns."""
        task_of = self._joining.bound.task_of
        return {
            (wait.before, wait.after): self._meets(task_of[wait.before], task_of[wait.after])
            & (self._columns[task_of[wait.before]].ticks > 0)
            & (self._columns[task_of[wait.after]].ticks > 0)
            for wait in self._problem.precedences
            if wait.streamed
            and wait.before in task_of
            and {task_of[wait.before], task_of[wait.after]} <= set(self._columns)
            and task_of[wait.before] != task_of[wait.after]
        }

    def _window_ticks(
        self, window: ActivityWindow, transfer_ticks: Mapping[str, Amount], *, with_prices: bool
    ) -> Amount:
        """Return the ticks in which all ranks together do the work in a window, and each rank what runs on it."""
        task_of, bound = self._joining.bound.task_of, self._joining.bound
        tasks = [task_of[name] for name in window.between if name in task_of]
        joined, others = (
            [name for name in tasks if (name in self._columns) == is_joined] for is_joined in (True, False)
        )
        work: Amount = sum(self._columns[name].work for name in joined)
        if others:
            least_work: Amount = sum(bound.min_work[name] for name in others)
            work = work + (np.maximum(least_work, self._priced_ticks(others)) if with_prices else least_work)
        for activity in self._problem.activities:
            if activity.name in transfer_ticks and activity.name in window.between:
                assert isinstance(activity, Transfer)
                work = work + transfer_ticks[activity.name] * self._occupied(activity)
        ticks: Amount = -(-work // self._problem.num_ranks)
        for name in dict.fromkeys(joined):
            on_ranks = sum(
                self._columns[other].ticks * (1 if other == name else self._contains(other, name)) for other in joined
            )
            ticks = np.maximum(ticks, on_ranks)
        return ticks

    def _occupied(self, transfer: Transfer) -> Array:
        """Return the number of ranks that a transfer occupies."""
        source, target = self._columns[transfer.source].size, self._columns[transfer.target].size
        if transfer.occupies != "both":
            return source if transfer.occupies == "source" else target
        meets = self._meets(transfer.source, transfer.target)
        return np.where(meets, np.maximum(source, target), source + target)

    def _priced_ticks(self, tasks: Sequence[str]) -> Array:
        """Return a lower bound on the ticks x ranks of tasks that are not joined, by the memory left for them."""
        copies = self._joining.least_copies
        left = self._memory_left - sum(copies[name] for name in self._others) + sum(copies[name] for name in {*tasks})
        bound: NDArray[np.float64] = -left[:, np.newaxis] * self._joining.prices
        for name in tasks:
            of_task = self._joining.priced_work(name, self._columns)
            owners = [owner for owner in self._joining.owners[name] if owner in self._columns]
            rows = [of_task[self._columns[owner].resource] for owner in owners] or [of_task[:1]]
            bound = bound + np.minimum.reduce(rows)
        highest: NDArray[np.float64] = bound.max(axis=1)
        rounded_down: Array = np.floor(highest - np.abs(highest) * _MARGIN - _MARGIN).astype(np.int64)
        return rounded_down
