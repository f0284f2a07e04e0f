"""The arithmetic that closes a case of a proof: bounds on all plans in which every stage uses a subset of its choices.

Memory: pools are equal, disjoint or nested, so that stages whose pools all intersect each other share some rank. What
they hold has to fit there, and what all stages hold has to fit the cluster.

Time: every stage takes at least its least ranks for its least seconds, and stages whose pools intersect run one by one.
The time between two stages is at least the rank-seconds of all stages that must run between them, divided by the number
of ranks.

If data that are produced in period p are read in period p + k, then k + 1 periods take at least the time until the data
arrive, from the start of period p, plus the longest chain of stages from their reader on, which ends within p + k.

The formulas hold for one case, whose amounts are numbers, and for several cases of one space, whose amounts are arrays,
[cases]. The checker asks for one case; the prover compares many splits of a case in arrays.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache, reduce
from itertools import combinations
from typing import Generic, TypeAlias

import numpy as np

from meshwright.planner.proof.space import Space
from meshwright.profiles.elementwise import BoolArray, N, maximum, sum_of, where
from meshwright.profiles.stages import GENERATE

Pair: TypeAlias = frozenset[str]
"""Two stages."""

_ROUNDING = 1e-12
"""Relative change of bytes that summing in another order may cause."""


class CaseBounds(Generic[N]):
    """Bounds of one case or of several cases of `space`; subclasses say what is left of each stage's choices."""

    space: Space

    @property
    @abstractmethod
    def least(self) -> Mapping[str, Mapping[str, N]]:
        """The least of each amount over the remaining choices, by stage."""

    @abstractmethod
    def pools_intersect(self, one: str, other: str) -> bool | BoolArray:
        """Return True where two pools are said to have a rank in common."""

    @abstractmethod
    def pools_are_disjoint(self, one: str, other: str) -> bool | BoolArray:
        """Return True where two pools are said to have no rank in common."""

    @abstractmethod
    def may_share_weights(self, one: str, other: str) -> bool | BoolArray:
        """Return True where two stages may have the same layout on the same part of the cluster."""

    @abstractmethod
    def least_refit_seconds(self, target: str) -> N:
        """Return the least seconds of a refit between the remaining layouts."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the stages."""
        return self.space.graph.names

    @property
    def num_ranks(self) -> int:
        return self.space.num_ranks

    def always_intersect(self, one: str, other: str) -> bool | BoolArray:
        """Return True where two pools have a rank in common in every plan."""
        return self._always_intersect[frozenset((one, other))]

    @cached_property
    def _always_intersect(self) -> Mapping[Pair, bool | BoolArray]:
        return {
            frozenset(pair): self._are_too_large(*pair) | self.pools_intersect(*pair)
            for pair in combinations(self.names, 2)
        }

    @property
    def has_no_room(self) -> bool | BoolArray:
        """True where disjoint pools have too few ranks, or where stages need more memory than there is."""
        is_full: bool | BoolArray = self._bytes(self.names, "_in_all") > self._limit_bytes * self.num_ranks
        for one, other in combinations(self.names, 2):
            is_full = is_full | (self._are_too_large(one, other) & self.pools_are_disjoint(one, other))
        for group, intersects in self._intersecting_groups():
            is_full = is_full | (intersects & (self._bytes(group) > self._limit_bytes))
        return is_full

    def least_seconds_by_work(self) -> N:
        """Return a lower bound on the period from the longest path and from ranks x seconds; infinite where no plan
        fits."""
        return where(self.has_no_room, math.inf, self._period.by_work())

    @cached_property
    def _period(self) -> Period[N]:
        return Period(self)

    @property
    def _limit_bytes(self) -> float:
        return self.space.room_bytes * (1 + _ROUNDING)

    def _are_too_large(self, one: str, other: str) -> bool | BoolArray:
        """Return True where two pools together have more ranks than there are."""
        return self.least[one]["ranks"] + self.least[other]["ranks"] > self.num_ranks

    def _bytes(self, group: Collection[str], suffix: str = "") -> N:
        """Return the least bytes that stages hold on a common rank; with `suffix="_in_all"`, on all ranks together.

        Shareable weights count once, and of transient memory only the largest of one stage.
        """
        members = [name for name in self.names if name in group]
        amounts = [self.least[name][f"own{suffix}"] for name in members]
        for role in self.space.graph.train_stage:
            sharers = tuple(name for name in members if self.space.graph.by_name[name].copied_role == role)
            if sharers:
                known, key = self._known_weights, (sharers, suffix)
                if key not in known:
                    known[key] = _largest(self._weights(subset, suffix) for subset in _subsets(sharers))
                amounts.append(known[key])
        return sum_of(amounts) + _largest(self.least[name][f"transient{suffix}"] for name in members)

    @cached_property
    def _known_weights(self) -> dict[tuple[tuple[str, ...], str], N]:
        """The least weights of stages of one role, which several groups have in common."""
        return {}

    def _weights(self, group: Sequence[str], suffix: str) -> N:
        """Return the least weights of stages of one role where no two of them can share weights, else 0."""
        weights = sum_of([self.least[name][f"weights{suffix}"] for name in group])
        return where(self._some_may_share(group), 0.0, weights)

    def _some_may_share(self, group: Sequence[str]) -> bool | BoolArray:
        may_share: bool | BoolArray = False
        for pair in combinations(group, 2):
            may_share = may_share | self.may_share_weights(*pair)
        return may_share

    def _intersecting_groups(self) -> Iterator[tuple[frozenset[str], bool | BoolArray]]:
        """Yield groups of stages, and where their pools all intersect each other.

        A group is left out where a larger one intersects in all cases, since that needs more memory.
        """
        pairs = {pair: self.always_intersect(*pair) for pair in combinations(self.names, 2)}
        in_some = frozenset(pair for pair, meets in pairs.items() if np.any(meets))
        in_all = frozenset(pair for pair in in_some if np.all(pairs[pair]))
        for group in _groups(self.names, in_some, in_all):
            intersects: bool | BoolArray = True
            for pair in in_some - in_all:
                if group.issuperset(pair):
                    intersects = intersects & pairs[pair]
            yield group, intersects


@lru_cache(maxsize=4096)  # in many cases the same pools intersect
def _groups(
    names: tuple[str, ...], in_some: frozenset[tuple[str, str]], in_all: frozenset[tuple[str, str]]
) -> tuple[frozenset[str], ...]:
    """Return the groups of stages whose pools all intersect each other in some case.

    Those that are part of a larger group whose pools all intersect in all cases are left out.
    """
    groups: list[frozenset[str]] = []
    always: list[frozenset[str]] = []
    for subset in reversed(list(_subsets(names))):
        group, pairs = frozenset(subset), set(combinations(subset, 2))
        if pairs <= in_some and not any(group < larger for larger in always):
            groups.append(group)
            if pairs <= in_all:
                always.append(group)
    return tuple(groups)


def _subsets(names: Sequence[str]) -> Iterator[Sequence[str]]:
    return (subset for size in range(1, len(names) + 1) for subset in combinations(names, size))


def _largest(amounts: Iterable[N]) -> N:
    largest: N = reduce(maximum, amounts)
    return largest


class Period(Generic[N]):
    """One period of a case or of several: its stages by position, each with its least amounts, and their precedences.

    A stage that streams from generation may start before the generation ends, unless the two share ranks; it then
    counts with its tail seconds. If they share ranks it follows the generation at once, because the chunks have been
    transferred by then.
    """

    def __init__(self, bounds: CaseBounds[N]) -> None:
        space, least = bounds.space, bounds.least
        graph, search_case = space.graph, space.search_case
        self.num_ranks: int = space.num_ranks
        self.num_stages: int = len(graph.stages)
        self.meets: dict[frozenset[int], bool | BoolArray] = {
            frozenset((graph.position[one], graph.position[other])): bounds.always_intersect(one, other)
            for one, other in combinations(graph.names, 2)
        }
        self.all_work: N = sum_of([least[name]["work"] for name in graph.names])
        self.ranks: list[N] = [least[name]["ranks"] for name in graph.names]
        self.seconds: list[N] = []
        self.work: list[N] = []
        for stage in graph.stages:
            amounts = least[stage.name]
            whole = not search_case.streams(stage) or bounds.always_intersect(stage.name, GENERATE)
            self.seconds.append(where(whole, amounts["seconds"], amounts["tail_seconds"]))
            self.work.append(where(whole, amounts["work"], amounts["tail_work"]))
        zero = 0.0 * self.all_work
        self.ready: list[N] = [zero] * self.num_stages
        for target in space.refits:
            for reader in graph.refit_readers(target):
                position = graph.position[reader]
                self.ready[position] = maximum(self.ready[position], bounds.least_refit_seconds(target))
        # Readers of rewards on hosts (`is_late`) wait until `arrival` seconds after the start of the generation.
        self.arrival: list[float] = [space.arrival_seconds if name == GENERATE else 0.0 for name in graph.names]
        self.is_late: list[bool] = [name in space.late for name in graph.names]
        # Transfers to later periods: (producer, consumer, number of periods, lag in seconds).
        self.carried: list[tuple[int, int, int, float]] = [
            (graph.position[producer], graph.position[consumer], num_periods, lag)
            for (producer, consumer), (num_periods, lag) in space.carried.items()
        ]
        self.inputs: list[list[tuple[int, N]]] = [[] for _ in graph.names]  # (producer, lag in seconds) by stage
        for (producer, consumer), lag in space.lags.items():
            streams = producer == GENERATE and search_case.streams(graph.by_name[consumer])
            is_hidden = streams and bounds.always_intersect(consumer, GENERATE)
            self.inputs[graph.position[consumer]].append((graph.position[producer], where(is_hidden, 0.0, lag + zero)))
        self.ancestors: Sequence[frozenset[int]] = space.ancestors

    def by_work(self) -> N:
        """Return the longest path through the period, where the work between two stages is spread over all ranks."""
        ends: list[N] = []
        starts: list[N] = []
        for position in range(self.num_stages):
            start = self.ready[position]
            for before, lag in self.inputs[position]:
                start = maximum(start, self.arrives(before, position, starts[before], ends[before], lag))
            for earlier in self.ancestors[position]:
                start = maximum(start, ends[earlier] + self._seconds_between(earlier, self.ancestors[position]))
            start = maximum(start, self._seconds_between(None, self.ancestors[position]))
            starts.append(start)
            ends.append(start + self.seconds[position])
        longest: N = maximum(_largest(ends), self.all_work / self.num_ranks)
        for earlier in range(self.num_stages):
            longest = maximum(longest, ends[earlier] + self._seconds_between(earlier, range(self.num_stages)))
        return reduce(maximum, self._carried(starts, ends), longest)

    def arrives(self, before: int, position: int, start: N, end: N, lag: N | float) -> N:
        """Return when a stage has its input from the stage `before`, including rewards."""
        return maximum(end + lag, start + self.arrival[before]) if self.is_late[position] else end + lag

    def _carried(self, starts: Sequence[N], ends: Sequence[N]) -> Iterator[N]:
        """Yield lower bounds on the period from transfers to later periods, given the earliest times of the stages."""
        chains_after: list[N] = [0.0 * self.all_work] * self.num_stages
        for position in reversed(range(self.num_stages)):
            chains: list[N] = [
                lag + chains_after[later]
                for later in range(self.num_stages)
                for before, lag in self.inputs[later]
                if before == position
            ]
            chains.append(self._seconds_between(position, range(self.num_stages)))
            chains_after[position] = self.seconds[position] + _largest(chains)
        for before, position, num_periods, lag in self.carried:
            arrival = self.arrives(before, position, starts[before], ends[before], lag)
            yield (arrival + chains_after[position]) / (num_periods + 1)

    def _seconds_between(self, first: int | None, before: Collection[int]) -> N:
        """Return the least time in which all ranks do the work of the stages in `before` that follow `first`."""
        between = [0.0 * self.all_work]
        between += [self.work[position] for position in before if first is None or first in self.ancestors[position]]
        return sum_of(between) / self.num_ranks
