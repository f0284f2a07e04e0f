"""Computes and scores greedy schedules of many choices of modes at once.

The next activity is always the one that can start first; of several the one with the longest chain after it, then the
first. A choice picks one mode of each task. Several choices are passed as columns, one for each task: the indices of
its picked modes, [choices], or [1] if all choices pick the same one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations, product
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.solver.lower_bounds import followers
from meshwright.planner.solver.problem import Mode, Problem, Run, TimedPeriod, Transfer, shortest_period
from meshwright.planner.solver.rank_ranges import Crossing

Array: TypeAlias = NDArray[np.int64]
Columns: TypeAlias = Sequence[Array]

_AFTER_ALL = 2**62
"""Later than every tick."""

_NO_LAG = -(2**61)
"""Lag of a pair of activities without a precedence; a sum with it is before every tick."""


class Durations(NamedTuple):
    """Durations of the activities in several choices, each [activities, choices].

    `ticks` are durations, `early` the ticks by which an activity may start before the end of an activity that streams
    to it, `late` the ticks from its end until its late output is complete, and `tails` the ticks from its start to the
    end of the longest chain of activities after it."""

    ticks: Array
    early: Array
    late: Array
    tails: Array

    def where(self, kept: NDArray[np.bool_]) -> Durations:
        """Select some of the choices."""
        return Durations(*(amounts[:, kept] for amounts in self))


class Timetable:
    """The greedy schedules of one problem; `owners` has the positions of the tasks whose copy each task may share,
    `crossing` the ranks that rank ranges have in common."""

    def __init__(self, problem: Problem, owners: Sequence[Sequence[int]], crossing: Crossing) -> None:
        task = {one.name: index for index, one in enumerate(problem.tasks)}
        activity = {one.name: index for index, one in enumerate(problem.activities)}
        self._owners, self._crossing = owners, crossing
        self._resources = _resource_numbers(problem)
        self._distinct_resources = [list(dict.fromkeys(mode.resource for mode in one.modes)) for one in problem.tasks]
        self._resource_index = [_numbered([mode.resource for mode in one.modes]) for one in problem.tasks]
        self._ticks = [_column([mode.ticks for mode in one.modes]) for one in problem.tasks]
        self._early = [_column([mode.early_ticks for mode in one.modes]) for one in problem.tasks]
        self._late = [_column([mode.late_ticks for mode in one.modes]) for one in problem.tasks]
        self._activities = problem.activities
        self._atoms = _column([ranks.start for ranks in problem.atoms])
        self._covers = [_covers(one.modes, self._atoms).T for one in problem.tasks]
        self._ends = [
            (task[t.task], task[t.task]) if isinstance(t, Run) else (task[t.source], task[t.target])
            for t in problem.activities
        ]
        self._representative = [activity[problem.lasts_like[one.name]] for one in problem.activities]
        self._order = [activity[name] for name in problem.order]
        self._waits = [(activity[p.before], activity[p.after], p.lag, p.streamed, p.late) for p in problem.precedences]
        self._carried = [(activity[p.before], activity[p.after], p.periods, p.lag, p.late) for p in problem.carried]
        self._unordered = self._pairs(problem)
        self._transfer_ticks_by_resource: dict[int, Array] = {}
        shape = len(activity), len(activity)
        self._counts = np.zeros(shape, dtype=np.int64)
        self._lags = {streamed: np.full(shape, _NO_LAG, dtype=np.int64) for streamed in (False, True)}
        self._late_lags = np.full(shape, _NO_LAG, dtype=np.int64)
        for before, after, lag, streamed, late in self._waits:
            self._counts[before, after] += 1
            self._lags[streamed][before, after] = max(lag, self._lags[streamed][before, after])
            if late:
                self._late_lags[before, after] = max(lag, self._late_lags[before, after])
        self._streams = self._lags[True] > _NO_LAG
        self._is_streamed = bool(self._streams.any())
        self._waits_after = [
            [(after, lag, streamed, late) for before, after, lag, streamed, late in self._waits if before == index]
            for index in range(len(activity))
        ]
        self._delivers_late = [
            any(before == index and late for before, *_, late in (*self._waits, *self._carried))
            for index in range(len(activity))
        ]
        self._is_late = bool((self._late_lags > _NO_LAG).any())

    def _pairs(self, problem: Problem) -> list[tuple[int, int, list[tuple[int, int]]]]:
        """Return the pairs of activities that no precedence separates, with the pairs of tasks whose ranks could
        conflict."""
        followers_of = followers(problem)
        numbered = combinations(enumerate(activity.name for activity in problem.activities), 2)
        return [
            (one, other, list(product(self._occupants(one), self._occupants(other))))
            for (one, one_name), (other, other_name) in numbered
            if other_name not in followers_of[one_name] and one_name not in followers_of[other_name]
        ]

    def shares(self, task: int, columns: Columns) -> NDArray[np.bool_]:
        """Return True for each choice in which a task shares an earlier task's copy, [choices]."""
        resources = self._resources[task][columns[task]]
        is_shared = np.zeros(1, dtype=bool)
        for owner in self._owners[task]:
            is_shared = is_shared | (self._resources[owner][columns[owner]] == resources)
        return is_shared

    def durations(self, columns: Columns) -> Durations:
        """Return the durations of the activities, [activities, choices]."""
        shape = len(self._activities), max(len(column) for column in columns)
        ticks, early, late = (np.zeros(shape, dtype=np.int64) for _ in range(3))
        for index, representative in enumerate(self._representative):
            ticks[index] = ticks[representative] if representative < index else self._activity_ticks(index, columns)
            if isinstance(self._activities[index], Run):
                task, _ = self._ends[index]
                if self._streams[:, index].any():
                    early[index] = self._early[task][columns[task]]
                if self._delivers_late[index]:
                    late[index] = self._late[task][columns[task]]
        tails = ticks.copy()
        for index in reversed(self._order):
            for after, lag, streamed, is_late in self._waits_after[index]:
                wait = ticks[index] + (late[index] + lag if is_late else lag)
                if streamed:
                    wait = np.maximum(0, wait - early[after])
                np.maximum(tails[index], wait + tails[after], out=tails[index])
        return Durations(ticks, early, late, tails)

    def schedule(self, columns: Columns, lasts: Durations) -> Array:
        """Return the end of each activity, [activities, choices]."""
        choices, meets = np.arange(lasts.ticks.shape[1]), self._conflicts(columns, lasts)
        begins, ends = np.zeros_like(lasts.ticks), np.zeros_like(lasts.ticks)
        waits = np.repeat(self._counts.sum(axis=0)[:, np.newaxis], len(choices), axis=1)
        for _ in self._activities:
            ready = np.where(waits == 0, begins, _AFTER_ALL)
            start = ready.min(axis=0)
            activity = np.where(ready == start, lasts.tails, -1).argmax(axis=0)
            end = start + lasts.ticks[activity, choices]
            ends[activity, choices] = end
            waits -= self._counts.T[:, activity]
            waits[activity, choices] = -1
            np.maximum(begins, np.where(meets[:, activity, choices], end, 0), out=begins)
            np.maximum(begins, end + self._lags[False].T[:, activity], out=begins)
            if self._is_late:
                late_end = end + lasts.late[activity, choices]
                np.maximum(begins, late_end + self._late_lags.T[:, activity], out=begins)
            if self._is_streamed:
                streamed = np.maximum(start, end + self._lags[True].T[:, activity] - lasts.early)
                np.maximum(begins, np.where(self._streams.T[:, activity], streamed, 0), out=begins)
        return ends

    def makespans(self, columns: Columns, lasts: Durations) -> Array:
        """Return the lengths of the periods of the greedy schedules, [choices].

        A carried precedence has a sender and, in a later period, a reader. If it would be violated, the period is as
        long as if the chain that starts with the reader could move to the end of the period. If the reader precedes the
        sender on the same ranks, it cannot move, and the period is long enough for the precedence."""
        ends = self.schedule(columns, lasts)
        makespans: Array = ends.max(axis=0)
        for before, after, periods, lag, is_late in self._carried:
            delivered = ends[before] + lag + lasts.late[before] * is_late
            with_moved_reader = -(-(delivered + lasts.tails[after]) // (periods + 1))
            starts = ends[after] - lasts.ticks[after]
            reader_precedes = self._share_ranks(columns, before, after) & (ends[after] <= ends[before])
            makespans = np.maximum(
                makespans, np.where(reader_precedes, -(-(delivered - starts) // periods), with_moved_reader)
            )
        return makespans

    def _share_ranks(self, columns: Columns, one: int, other: int) -> NDArray[np.bool_]:
        """Return True for each choice in which two activities have a rank in common, [choices]."""
        range_numbers = [self._crossing.numbers[task][column] for task, column in enumerate(columns)]
        pairs = product(self._occupants(one), self._occupants(other))
        return np.asarray(
            sum(self._crossing.common[range_numbers[here], range_numbers[there]] for here, there in pairs) > 0
        )

    def least_makespans(self, columns: Columns, lasts: Durations) -> Array:
        """Return a lower bound on each makespan, [choices]: the longest chain, and the runs on the busiest ranks."""
        load = np.zeros((len(self._atoms), lasts.ticks.shape[1]), dtype=np.int64)
        for index, activity in enumerate(self._activities):
            if isinstance(activity, Run):
                task, _ = self._ends[index]
                load += self._covers[task][:, columns[task]] * lasts.ticks[index]
        least: Array = np.maximum(lasts.tails.max(axis=0), load.max(axis=0))
        return least

    def work(self, columns: Columns, lasts: Durations) -> Array:
        """Return ticks x ranks, [choices]."""
        return sum(
            (lasts.ticks[activity] * self._num_ranks(activity, columns) for activity in range(len(self._activities))),
            start=np.zeros(lasts.ticks.shape[1], dtype=np.int64),
        )

    def _activity_ticks(self, activity: int, columns: Columns) -> Array:
        """Return the ticks of an activity, [choices]."""
        source, target = self._ends[activity]
        if isinstance(self._activities[activity], Run):
            return self._ticks[source][columns[source]]
        return np.where(
            self.shares(target, columns), 0, self._transfer_ticks(activity, columns[source], columns[target])
        )

    def _transfer_ticks(self, activity: int, sources: Array, targets: Array) -> Array:
        """Return the ticks of a transfer by the resources of its ends, each computed when it is first needed."""
        transfer, ends = self._activities[activity], self._ends[activity]
        assert isinstance(transfer, Transfer)
        at = [self._resource_index[task][chosen] for task, chosen in zip(ends, (sources, targets), strict=True)]
        sources_at, targets_at = (self._distinct_resources[task] for task in ends)
        known = self._transfer_ticks_by_resource.setdefault(
            activity, np.full((len(sources_at), len(targets_at)), -1, dtype=np.int64)
        )
        missing = known[*at] < 0
        if missing.any():
            pairs = np.stack(np.broadcast_arrays(*at))[:, missing]
            for one, other in np.unique(pairs, axis=1).T.tolist():
                known[one, other] = transfer.ticks_between(
                    sources_at[one], targets_at[other], sources_at[one].overlap(targets_at[other])
                )
        ticks: Array = known[*at]
        return ticks

    def _occupants(self, activity: int) -> tuple[int, ...]:
        """Return the tasks whose ranks an activity occupies."""
        one, (source, target) = self._activities[activity], self._ends[activity]
        if isinstance(one, Run) or one.occupies == "source":
            return (source,)
        return (target,) if one.occupies == "target" else (source, target)

    def _conflicts(self, columns: Columns, lasts: Durations) -> NDArray[np.bool_]:
        """Return True for two activities without a precedence that must not overlap, [activities, activities, choices].

        An activity that takes no time occupies no ranks.
        """
        num_activities, happens = len(self._activities), lasts.ticks > 0
        conflicts = np.zeros((num_activities, *lasts.ticks.shape), dtype=bool)
        range_numbers = [self._crossing.numbers[task][column] for task, column in enumerate(columns)]
        for one, other, ends in self._unordered:
            common = sum(self._crossing.common[range_numbers[here], range_numbers[there]] for here, there in ends)
            conflicts[one, other] = conflicts[other, one] = happens[one] & happens[other] & (common > 0)
        return conflicts

    def _num_ranks(self, activity: int, columns: Columns) -> Array:
        """Return the number of ranks that an activity occupies, [choices]."""
        one, *other = [self._crossing.numbers[task][columns[task]] for task in self._occupants(activity)]
        common = self._crossing.common
        ranks: Array = common[one, one]
        return ranks + common[other[0], other[0]] - common[one, other[0]] if other else ranks


def _covers(modes: Sequence[Mode], atoms: Array) -> NDArray[np.bool_]:
    """Return True if the ranks of a mode contain an atom, [modes, atoms]."""
    start = _column([mode.resource.ranks.start for mode in modes])[:, np.newaxis]
    stop = _column([mode.resource.ranks.stop for mode in modes])[:, np.newaxis]
    covers: NDArray[np.bool_] = (start <= atoms) & (atoms < stop)
    return covers


def _column(amounts: Sequence[int]) -> Array:
    return np.array(amounts, dtype=np.int64)


def _resource_numbers(problem: Problem) -> list[Array]:
    """Number the resources of all modes; modes of all tasks on the same resource have the same number."""
    numbers: dict[Hashable, int] = {}
    return [_numbered([mode.resource for mode in task.modes], numbers) for task in problem.tasks]


def _numbered(names: Iterable[Hashable], numbers: dict[Hashable, int] | None = None) -> Array:
    """Number the names from 0 in the order of their first occurrence; `numbers` has those known, and is extended."""
    known = {} if numbers is None else numbers
    return _column([known.setdefault(name, len(known)) for name in names])


class Score(NamedTuple):
    """The score of a choice: memory units above the device, then makespan, then ticks x ranks; smaller is better.

    `excess_units` is summed over all atoms. Two tasks whose ranks cross (intersect without being nested) count as more
    units than a device has.
    """

    excess_units: int
    makespan: int
    work: int


Picks = tuple[int, ...]
"""The index of a mode for each task, in the order of the tasks."""


class _Table(NamedTuple):
    """The memory units of each mode of a task on each atom, [modes, atoms]."""

    resident: Array
    shared: Array
    transient: Array


class Greedy:
    """Scores choices of modes of one problem by their greedy schedules."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._device = problem, problem.device_units
        task = {c.name: index for index, c in enumerate(problem.tasks)}
        self.modes = [c.modes for c in problem.tasks]
        self._activities = [activity.name for activity in problem.activities]
        self._owners = [[task[owner] for owner in problem.owners(c.name)] for c in problem.tasks]
        self._atoms = np.array([ranks.start for ranks in problem.atoms])
        self._tables = [self._table(modes) for modes in self.modes]
        self._crossing = Crossing(problem)
        self._timetable = Timetable(problem, self._owners, self._crossing)

    def score(self, picks: Picks) -> Score:
        """Return the score of a choice."""
        return Score(*self.scores(np.array([picks]))[0].tolist())

    def scores(self, picks: Array) -> Array:
        """Return the scores of choices, one a row as in `Score`, [choices, 3]; `picks` are [choices, tasks]."""
        columns = list(picks.T)
        lasts = self._timetable.durations(columns)
        makespans, work = self._timetable.makespans(columns, lasts), self._timetable.work(columns, lasts)
        return np.stack([self._excess(columns), makespans, work], axis=1)

    def best_changes(self, picks: Array, scores: Array, task: int) -> tuple[Array, Array]:
        """Return for each choice the best one that differs only in the mode of this task, and its score.

        Of equally good ones it is the first, and if none is better the choice itself. `picks` are [choices, tasks],
        `scores` their scores as in `Score`, [choices, 3].
        """
        num_modes = len(self.modes[task])
        origin = np.repeat(np.arange(len(picks)), num_modes)
        changed = picks[origin]
        changed[:, task] = np.tile(np.arange(num_modes), len(picks))
        excess = self._excess(list(changed.T))
        least = np.minimum(excess.reshape(len(picks), num_modes).min(axis=1), scores[:, 0])
        fits = excess == least[origin]
        origin, changed, excess = origin[fits], changed[fits], excess[fits]
        lasts = self._timetable.durations(list(changed.T))
        least_makespans = self._timetable.least_makespans(list(changed.T), lasts)
        may_win = (excess < scores[origin, 0]) | (least_makespans <= scores[origin, 1])
        origin, changed, excess, lasts = origin[may_win], changed[may_win], excess[may_win], lasts.where(may_win)
        if not len(changed):
            return picks, scores
        columns = list(changed.T)
        makespans, work = self._timetable.makespans(columns, lasts), self._timetable.work(columns, lasts)
        new_scores = np.stack([excess, makespans, work], axis=1)
        order = np.lexsort((work, makespans, origin))
        _, first_of_origin = np.unique(origin[order], return_index=True)
        best = order[first_of_origin]
        better = best[_is_less(new_scores[best], scores[origin[best]])]
        picks, scores = picks.copy(), scores.copy()
        picks[origin[better]], scores[origin[better]] = changed[better], new_scores[better]
        return picks, scores

    def timed_period(self, picks: Picks) -> TimedPeriod:
        """Return the shortest period in the order of the greedy schedule."""
        columns = _columns(picks)
        lasts = self._timetable.durations(columns)
        ends = self._timetable.schedule(columns, lasts)
        starts = dict(zip(self._activities, (ends - lasts.ticks)[:, 0].tolist(), strict=True))
        if not self._problem.carried:
            return TimedPeriod(int(ends.max()), starts)
        position = {name: index for index, name in enumerate(self._problem.order)}
        order = sorted(position, key=lambda name: (starts[name], position[name]))
        picked = {task.name: mode for task, mode in zip(self._problem.tasks, self.picked(picks), strict=True)}
        return shortest_period(self._problem, picked, order)

    def picked(self, picks: Picks) -> tuple[Mode, ...]:
        """Return the modes of a choice."""
        return tuple(modes[index] for modes, index in zip(self.modes, picks, strict=True))

    def indices(self, modes: Sequence[Mode]) -> Picks:
        """Return the choice of these modes."""
        return tuple(task_modes.index(mode) for task_modes, mode in zip(self.modes, modes, strict=True))

    def _table(self, modes: Sequence[Mode]) -> _Table:
        is_covered = _covers(modes, self._atoms)

        def per_atom(amounts: Iterable[int]) -> Array:
            return is_covered * np.array(list(amounts), dtype=np.int64)[:, np.newaxis]

        return _Table(
            resident=per_atom(mode.resident_units for mode in modes),
            shared=per_atom(mode.shared_units for mode in modes),
            transient=per_atom(mode.transient_units for mode in modes),
        )

    def _excess(self, columns: Columns) -> Array:
        """Return the memory units above those of a device, plus the penalty for crossing ranks, [choices]."""
        held, peak = (np.zeros((1, len(self._atoms)), dtype=np.int64) for _ in range(2))
        for task, (table, chosen) in enumerate(zip(self._tables, columns, strict=True)):
            held = held + table.resident[chosen]
            peak = np.maximum(peak, table.transient[chosen])
            if self._owners[task]:
                held = held - table.shared[chosen] * self._timetable.shares(task, columns)[:, np.newaxis]
        excess: Array = np.maximum(held + peak - self._device, 0).sum(axis=-1)
        return excess + self._crossing.count(columns) * (self._device + 1)


def _columns(picks: Picks) -> list[Array]:
    return [np.array([index], dtype=np.int64) for index in picks]


def _is_less(ones: Array, others: Array) -> NDArray[np.bool_]:
    """Return True for each row that comes before the other one in lexicographic order."""
    is_less = np.zeros(len(ones), dtype=bool)
    for one, other in zip(ones.T[::-1], others.T[::-1], strict=True):
        is_less = (one < other) | ((one == other) & is_less)
    return is_less
