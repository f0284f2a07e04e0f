"""What no plan can do when every stage keeps to some of its choices: the arithmetic that closes a case.

Memory: pools are equal, apart, or one within the other, so that stages whose pools meet one another all lie on some
rank. What they keep has to fit there, and what all stages keep has to fit the cluster.

Time: every stage takes its least ranks for its least seconds, and stages whose pools meet take turns. Of all schedules
on so many ranks a shortest one comes of taking the stages in some order, each as early as it can (Kolisch, EJOR 90,
1996, theorem 1). And between two stages the cluster has room for all the ranks x seconds that lie there.

What a stage hands to a turn that comes k turns later arrives before its reader starts, and the reader starts while the
line behind it still fits into its turn: (k + 1) turns last as long as the line up to the arrival and that line.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations
from typing import TypeAlias

import numpy as np

from meshwright.planner.proof.enumeration import AMOUNTS, Some, Space
from meshwright.profiles.stages import GENERATE

Pair: TypeAlias = frozenset[str]
"""Two stages."""

_ROUNDING = 1e-12
"""Relative: what the order of a sum may change of bytes."""


@dataclass(frozen=True)
class Case:
    """Some of the plans of a space: of each stage some of its choices, and of some pairs whether their pools meet."""

    space: Space
    left: Mapping[str, Some]
    related: Mapping[Pair, bool]

    @classmethod
    def whole(cls, space: Space) -> Case:
        """Every plan of the space."""
        found = {name: every.some(np.arange(len(every.site))) for name, every in space.choices.items()}
        return cls(space, found, {})

    def within(self, stage: str, amount: str, most: float) -> tuple[Case, Case]:
        """The plans in which a stage has so much of an amount at most, and the others."""
        every, left = self.space.choices[stage], self.left[stage].numbers
        is_within = every.amounts[AMOUNTS.index(amount), left] <= most
        halves = every.some(left[is_within]), every.some(left[~is_within])
        return replace(self, left={**self.left, stage: halves[0]}), replace(self, left={**self.left, stage: halves[1]})

    def meeting(self, one: str, other: str) -> tuple[Case, Case]:
        """The plans in which the pools of two stages meet, and the others."""
        pair = frozenset((one, other))
        return replace(self, related={**self.related, pair: True}), replace(self, related={**self.related, pair: False})

    @cached_property
    def least(self) -> Mapping[str, Mapping[str, float]]:
        """Of every stage the least of each amount."""
        return {name: some.least for name, some in self.left.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """Of the stages."""
        return self.space.graph.names

    @cached_property
    def num_ranks(self) -> int:
        return self.space.num_ranks

    def meets(self, one: str, other: str) -> bool:
        """Whether two pools have a rank in common in every plan of the case."""
        too_many = self.least[one]["ranks"] + self.least[other]["ranks"] > self.num_ranks
        return too_many or self.related.get(frozenset((one, other)), False)

    @property
    def has_choices(self) -> bool:
        """Whether every stage has some."""
        return all(self.least.values())

    @cached_property
    def is_empty(self) -> bool:
        """Whether no plan is in the case, or none fits the devices."""
        if not self.has_choices:
            return True
        apart = (pair for pair, meet in self.related.items() if not meet)
        return any(sum(self.least[name]["ranks"] for name in pair) > self.num_ranks for pair in apart) or self._is_full

    @property
    def _is_full(self) -> bool:
        room = self.space.room_bytes * (1 + _ROUNDING)
        if self._bytes(self.names, "_in_all") > room * self.num_ranks:
            return True
        return any(self._bytes(group) > room for group in self._meeting_groups())

    def _bytes(self, group: Collection[str], over: str = "") -> float:
        """What stages keep at least, weights that they may share once, and the largest transient of one of them."""
        weights = 0.0
        for role in self.space.graph.train_stage:
            mine = [name for name in group if self.space.graph.by_name[name].copied_role == role]
            weights += max((self._weights(some, over) for some in _subsets(mine)), default=0.0)
        own = math.fsum(self.least[name][f"own{over}"] for name in group)
        return own + weights + max(self.least[name][f"transient{over}"] for name in group)

    def _weights(self, group: Collection[str], over: str) -> float:
        """Those of stages of one role if no two of them can share, else nothing."""
        if any(self._may_share(one, other) for one, other in combinations(group, 2)):
            return 0.0
        return sum(self.least[name][f"weights{over}"] for name in group)

    def _may_share(self, one: str, other: str) -> bool:
        """Whether two stages may have the same layout on the same part of the cluster."""
        return not self.left[one].sites.isdisjoint(self.left[other].sites)

    def _meeting_groups(self) -> tuple[frozenset[str], ...]:
        pairs = combinations(self.names, 2)
        return _largest_groups(self.names, frozenset(pair for pair in pairs if self.meets(*pair)))

    def least_seconds(self, most: float = math.inf) -> float:
        """Seconds that the turn of every plan of the case takes at least; it need not be more than `most`."""
        turn = _Turn(self)
        found = turn.by_work()
        return found if found >= most else turn.by_order(found, most)

    def least_seconds_by_work(self) -> float:
        """The same by the ranks x seconds alone; infinite where no plan fits."""
        return math.inf if self.is_empty else _Turn(self).by_work()


@lru_cache(maxsize=4096)  # many cases have the same pools meet
def _largest_groups(names: tuple[str, ...], meeting: frozenset[tuple[str, str]]) -> tuple[frozenset[str], ...]:
    """The groups of stages that all meet one another and that no other such group holds."""
    found: list[frozenset[str]] = []
    for group in reversed(list(_subsets(names))):
        if all(pair in meeting for pair in combinations(group, 2)) and not any(set(group) < other for other in found):
            found.append(frozenset(group))
    return tuple(found)


def _subsets(names: Sequence[str]) -> Iterator[Sequence[str]]:
    return (some for size in range(1, len(names) + 1) for some in combinations(names, size))


class _Turn:
    """The stages of a turn by their positions, each at its least, and what waits for what.

    What a stage reads while it is generated may come before the generation ends, unless the two take turns: it counts
    with the seconds that remain then. Where they take turns it follows the generation at once: what is handed over in
    chunks is there by then.
    """

    def __init__(self, case: Case) -> None:
        graph, scope = case.space.graph, case.space.scope
        streams = [scope.streams(stage) and not case.meets(stage.name, GENERATE) for stage in graph.stages]
        rest = ["tail_" if it else "" for it in streams]
        least = [case.least[name] for name in graph.names]
        self.num_ranks = case.num_ranks
        self.all_work = sum(one["work"] for one in least)
        self.ranks = [one["ranks"] for one in least]
        self.seconds = [one[f"{kind}seconds"] for one, kind in zip(least, rest, strict=True)]
        self.work = [one[f"{kind}work"] for one, kind in zip(least, rest, strict=True)]
        self.meets = [[case.meets(one, other) for other in graph.names] for one in graph.names]
        self.num_stages = len(graph.stages)
        self.ready = [0.0] * self.num_stages
        for target in case.space.refits:
            for reader in graph.refit_readers(target):
                place = graph.position[reader]
                self.ready[place] = max(self.ready[place], _refit_seconds(case, target))
        space = case.space
        self.arrival = [space.arrival_seconds if name == GENERATE else 0.0 for name in graph.names]
        self.is_late = [name in space.late for name in graph.names]
        self.carried = [
            (graph.position[producer], graph.position[consumer], turns, lag)
            for (producer, consumer), (turns, lag) in space.carried.items()
        ]
        self.after: list[list[tuple[int, float]]] = [[] for _ in graph.names]
        for (producer, consumer), lag in case.space.lags.items():
            takes_turns = producer == GENERATE and case.meets(consumer, GENERATE)
            is_hidden = takes_turns and scope.streams(graph.by_name[consumer])
            self.after[graph.position[consumer]].append((graph.position[producer], 0.0 if is_hidden else lag))
        self.above = [set[int]() for _ in graph.names]
        for place in range(self.num_stages):  # a stage comes after those that it reads from
            self.above[place] = {p for before, _ in self.after[place] for p in (before, *self.above[before])}

    def by_work(self) -> float:
        """The longest way through the turn, where the work between two stages takes all ranks."""
        ends: list[float] = []
        starts: list[float] = []
        for place in range(self.num_stages):
            arrivals = (
                self._arrives(before, place, starts[before], ends[before], lag) for before, lag in self.after[place]
            )
            start = max([self.ready[place], *arrivals])
            for first in self.above[place]:
                start = max(start, ends[first] + self._between(first, self.above[place]))
            start = max(start, self._between(None, self.above[place]))
            starts.append(start)
            ends.append(start + self.seconds[place])
        rest = (ends[first] + self._between(first, range(self.num_stages)) for first in range(self.num_stages))
        return max(*ends, *rest, self.all_work / self.num_ranks, *self._carried(starts, ends))

    def _arrives(self, before: int, place: int, start: float, end: float, lag: float) -> float:
        """When a stage has what an earlier one hands to it, rewards included."""
        return max(end + lag, start + self.arrival[before]) if self.is_late[place] else end + lag

    def _carried(self, starts: list[float], ends: list[float]) -> Iterator[float]:
        """What turns last at least for what is handed to later ones, from the earliest times of stages."""
        behind = [0.0] * self.num_stages
        for place in reversed(range(self.num_stages)):
            lines = (
                lag + behind[later]
                for later in range(self.num_stages)
                for before, lag in self.after[later]
                if before == place
            )
            behind[place] = self.seconds[place] + max([self._between(place, range(self.num_stages)), *lines])
        for before, place, turns, lag in self.carried:
            arrival = self._arrives(before, place, starts[before], ends[before], lag)
            yield (arrival + behind[place]) / (turns + 1)

    def _between(self, first: int | None, before: Sequence[int] | set[int] | range) -> float:
        work = sum(self.work[place] for place in before if first is None or first in self.above[place])
        return work / self.num_ranks

    def by_order(self, least: float, most: float) -> float:
        """The end of the best order, `least` when one ends by then, and `most` when none ends before."""
        self.least, self.most = least, most
        self.rest = [0.0] * self.num_stages
        for place in reversed(range(self.num_stages)):
            behind = [
                lag + self.rest[later]
                for later in range(self.num_stages)
                for before, lag in self.after[later]
                if before == place
            ]
            self.rest[place] = self.seconds[place] + max(behind, default=0.0)
        self._take([None] * self.num_stages, 0.0)
        return max(least, self.most)

    def _take(self, placed: list[tuple[float, float] | None], end: float) -> None:
        """Goes on with every stage that may come next, and keeps the earliest end of all."""
        waiting = [place for place, times in enumerate(placed) if times is None]
        if not waiting:
            self.most = min(self.most, end)
            return
        for place in waiting:
            if self.most <= self.least or any(placed[before] is None for before, _ in self.after[place]):
                continue
            start = self._start(place, placed)
            if start + self.rest[place] < self.most:
                placed[place] = start, start + self.seconds[place]
                self._take(placed, max(end, start + self.seconds[place]))
                placed[place] = None

    def _start(self, place: int, placed: Sequence[tuple[float, float] | None]) -> float:
        """As early as what it reads is there and so many ranks are free."""
        arrivals = (self._arrives(p, place, *(placed[p] or (0.0, 0.0)), lag) for p, lag in self.after[place])
        ready = max([self.ready[place], *arrivals])
        beside = [(times, other) for other, times in enumerate(placed) if times and times[1] > ready]
        for start in sorted({ready, *(times[1] for times, _ in beside)}):
            end = start + self.seconds[place]
            during = [(times, other) for times, other in beside if times[0] < end and times[1] > start]
            if any(self.meets[place][other] for _, other in during):
                continue
            instants = [start, *(times[0] for times, _ in during if times[0] > start)]
            used = (sum(self.ranks[o] for times, o in during if times[0] <= t < times[1]) for t in instants)
            if max(used) + self.ranks[place] <= self.num_ranks:
                return start
        raise AssertionError("behind all stages there is room")


def _refit_seconds(case: Case, target: str) -> float:
    """The least of a refit between the layouts that are left."""
    source = case.space.graph.trainer_of(target)
    return case.space.refit_seconds(target, case.left[source].sites, case.left[target].sites)
