"""Scores a choice of options by a greedy schedule: always the task that can start first, the longest line behind it.

The problem is laid out in arrays once, so that a score costs tens of microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.solver.crossing import Crossing
from meshwright.planner.solver.problem import CallRun, Option, Place, Precedence, Problem, Transfer
from meshwright.planner.solver.prospects import Prospects


class Score(NamedTuple):
    """Smaller is better: first the blocks above the device, over all atoms, then the makespan, then ticks of ranks.

    Two calls whose ranks cross count as more blocks than a device has.
    """

    excess_blocks: int
    makespan: int
    work: int


WORST = Score(2**62, 2**62, 2**62)
"""Of no choice: every score is below it."""

Picks = tuple[int, ...]
"""The index of an option for each call, in the order of the calls."""

Near = Sequence[Sequence[int]]
"""Indices of some options for each call."""


Array: TypeAlias = NDArray[np.int64]


class _Table(NamedTuple):
    """What each option of a call puts on each atom, in blocks, [options, atoms]."""

    resident: Array
    shared: Array
    transient: Array


class Greedy:
    """Scores choices of one problem."""

    def __init__(self, problem: Problem) -> None:
        self._device = problem.device_blocks
        call = {c.name: index for index, c in enumerate(problem.calls)}
        self.options = [c.options for c in problem.calls]
        self._atoms = [ranks.start for ranks in problem.atoms]
        self._sizes = [len(ranks) for ranks in problem.atoms]
        self._owners = [[call[owner] for owner in problem.owners(c.name)] for c in problem.calls]
        self._tables = [self._table(options) for options in self.options]
        self._crossing = Crossing(problem)
        self._prospects = Prospects(problem, self._owners)
        self._covered = [[self._atoms_in(option.place) for option in options] for options in self.options]
        tasks = {task.name: index for index, task in enumerate(problem.tasks)}
        self._tasks = problem.tasks
        self._ends = [
            (call[t.call], call[t.call]) if isinstance(t, CallRun) else (call[t.source], call[t.target])
            for t in problem.tasks
        ]
        self._after: list[list[tuple[int, Precedence]]] = [[] for _ in tasks]
        self._waits = [0] * len(tasks)
        for precedence in problem.precedences:
            after = tasks[precedence.after]
            self._after[tasks[precedence.before]].append((after, precedence))
            self._waits[after] += 1
        self._order = [tasks[name] for name in problem.order]
        self._moved: dict[tuple[int, int, int], int] = {}

    def promising(self, picks: Picks, calls: Sequence[int], near: Near, best: Score) -> list[Picks]:
        """The changes of one or two calls to options near them whose bounds are not above `best`, the lowest first."""
        rows = np.tile(np.array(picks, dtype=np.int64), (math.prod(map(len, near)), 1))
        for call, column in zip(calls, np.meshgrid(*near, indexing="ij"), strict=True):
            rows[:, call] = column.ravel()
        excess = self._least_excess(rows)
        rows, excess = rows[excess <= best.excess_blocks], excess[excess <= best.excess_blocks]
        if not len(rows):
            return []
        makespans = self._prospects.makespans(rows)
        kept = (excess < best.excess_blocks) | (makespans <= best.makespan)
        first = np.lexsort((makespans[kept], excess[kept]))
        return [tuple(row) for row in rows[kept][first].tolist()]

    def _least_excess(self, rows: Array) -> Array:
        """The blocks above the device that each choice has at least, as if every copy were shared, [choices]."""
        held = np.zeros((len(rows), len(self._atoms)), dtype=np.int64)
        peak = np.zeros_like(held)
        for call, table in enumerate(self._tables):
            chosen = rows[:, call]
            held += table.resident[chosen] - (table.shared[chosen] if self._owners[call] else 0)
            np.maximum(peak, table.transient[chosen], out=peak)
        excess: Array = np.maximum(held + peak - self._device, 0).sum(axis=-1)
        return excess + self._crossing.count(rows) * (self._device + 1)

    def score(self, picks: Sequence[int], best: Score = WORST) -> Score:
        """The score of a choice; WORST as soon as it is clear that it is not below `best`."""
        excess = self._excess(picks)
        if excess > best.excess_blocks:
            return WORST
        ticks = [self._duration(task, picks) for task in range(len(self._tasks))]
        early = self._early(picks)
        tails = self._tails(ticks, early)
        if best.excess_blocks == 0 and max(tails) > best.makespan:
            return WORST
        atoms = self._occupied_by_all(picks, ticks)
        latest = best.makespan if excess == best.excess_blocks else WORST.makespan
        done = self._schedule(atoms, ticks, early, tails, latest)
        if len(done) < len(ticks):
            return WORST
        makespan = max(end for end, _ in done)
        work = sum(t * sum(sum(self._sizes[here]) for here in blocks) for t, blocks in zip(ticks, atoms, strict=True))
        return Score(excess, makespan, work)

    def starts(self, picks: Sequence[int]) -> dict[str, int]:
        """The start of each task in the greedy schedule."""
        ticks = [self._duration(task, picks) for task in range(len(self._tasks))]
        early = self._early(picks)
        atoms, tails = self._occupied_by_all(picks, ticks), self._tails(ticks, early)
        ends = self._schedule(atoms, ticks, early, tails, WORST.makespan)
        return {self._tasks[task].name: end - ticks[task] for end, task in ends}

    def picked(self, picks: Picks) -> tuple[Option, ...]:
        """The options of a choice."""
        return tuple(options[index] for options, index in zip(self.options, picks, strict=True))

    def indices(self, options: Sequence[Option]) -> Picks:
        """The choice of these options."""
        return tuple(known.index(option) for known, option in zip(self.options, options, strict=True))

    def _table(self, options: Sequence[Option]) -> _Table:
        here = np.array([[first in option.place.ranks for first in self._atoms] for option in options], dtype=np.int64)

        def spread(amounts: Iterable[int]) -> Array:
            return here * np.array(list(amounts), dtype=np.int64)[:, np.newaxis]

        return _Table(
            resident=spread(option.resident_blocks for option in options),
            shared=spread(option.shared_blocks for option in options),
            transient=spread(option.transient_blocks for option in options),
        )

    def _atoms_in(self, place: Place) -> slice:
        inside = [index for index, first in enumerate(self._atoms) if first in place.ranks]
        return slice(inside[0], inside[-1] + 1)

    def _shares(self, call: int, picks: Sequence[int]) -> bool:
        place = self.options[call][picks[call]].place
        return any(self.options[owner][picks[owner]].place == place for owner in self._owners[call])

    def _excess(self, picks: Sequence[int]) -> int:
        held = sum(table.resident[option] for table, option in zip(self._tables, picks, strict=True))
        peak = np.max([table.transient[option] for table, option in zip(self._tables, picks, strict=True)], axis=0)
        for call, owners in enumerate(self._owners):
            if owners and self._shares(call, picks):
                held = held - self._tables[call].shared[picks[call]]
        crossing = self._crossing.count(np.array([picks]))[0] * (self._device + 1)
        return int(np.maximum(held + peak - self._device, 0).sum() + crossing)

    def _duration(self, task: int, picks: Sequence[int]) -> int:
        source, target = self._ends[task]
        if source == target:
            return self.options[source][picks[source]].ticks
        if self._shares(target, picks):
            return 0
        key = (task, picks[source], picks[target])
        if key not in self._moved:
            transfer = self._tasks[task]
            assert isinstance(transfer, Transfer)
            here, there = (self.options[end][picks[end]].place for end in (source, target))
            self._moved[key] = transfer.ticks_between(here, there, here.overlap(there))
        return self._moved[key]

    def _occupied(self, task: int, picks: Sequence[int]) -> tuple[slice, ...]:
        """The atoms that a task occupies, in blocks that do not overlap."""
        source, target = self._ends[task]
        here = self._tasks[task]
        block, other = self._covered[source][picks[source]], self._covered[target][picks[target]]
        if isinstance(here, CallRun) or here.occupies == "source":
            return (block,)
        if here.occupies == "target":
            return (other,)
        if block.stop <= other.start or other.stop <= block.start:
            return (block, other)
        return (slice(min(block.start, other.start), max(block.stop, other.stop)),)

    def _early(self, picks: Sequence[int]) -> list[int]:
        """The ticks by which each task may start before the end of what streams to it."""
        return [
            self.options[call][picks[call]].early_ticks if isinstance(task, CallRun) else 0
            for task, (call, _) in zip(self._tasks, self._ends, strict=True)
        ]

    def _tails(self, ticks: Sequence[int], early: Sequence[int]) -> list[int]:
        """The ticks from the start of each task to the end of the longest line of tasks behind it."""
        tails = [0] * len(ticks)
        for task in reversed(self._order):
            tails[task] = ticks[task]
            for after, wait in self._after[task]:
                tails[task] = max(tails[task], wait.earliest(0, ticks[task], early[after]) + tails[after])
        return tails

    def _occupied_by_all(self, picks: Sequence[int], ticks: Sequence[int]) -> list[tuple[slice, ...]]:
        """The atoms that each task occupies; none for a task that takes no time."""
        return [self._occupied(task, picks) if ticks[task] else () for task in range(len(ticks))]

    def _schedule(
        self,
        atoms: Sequence[tuple[slice, ...]],
        ticks: Sequence[int],
        early: Sequence[int],
        tails: Sequence[int],
        latest: int,
    ) -> list[tuple[int, int]]:
        """(end, task) in the order in which tasks were given their time, up to one that makes the last end too late."""
        waits, earliest, free = list(self._waits), [0] * len(ticks), [0] * len(self._atoms)
        ready = [task for task, count in enumerate(waits) if not count]
        done: list[tuple[int, int]] = []
        while ready:
            begins = [max([earliest[task], *[max(free[here]) for here in atoms[task]]]) for task in ready]
            start, _, task = min((at, -tails[task], task) for at, task in zip(begins, ready, strict=True))
            if start + tails[task] > latest:
                break
            ready.remove(task)
            end = start + ticks[task]
            done.append((end, task))
            for here in atoms[task]:
                free[here] = [end] * (here.stop - here.start)
            for after, wait in self._after[task]:
                waits[after] -= 1
                earliest[after] = max(earliest[after], wait.earliest(start, end, early[after]))
                if not waits[after]:
                    ready.append(after)
        return done
