"""The arithmetic that closes a case of a proof: bounds on all plans in which every stage uses a subset of its choices.

Memory: pools are equal, disjoint or nested, so that stages whose pools all intersect each other share some rank. What
they hold has to fit there, and what all stages hold has to fit the cluster.

Time: every stage takes at least its least ranks for its least seconds, and stages whose pools intersect run one by one.
Among all schedules on a number of ranks, some shortest one results from taking the stages in some order, each as early
as possible (Kolisch, EJOR 90, 1996, theorem 1). The time between two stages is at least the rank-seconds of all stages
that must run between them, divided by the number of ranks.

If data that are produced in period p are read in period p + k, then k + 1 periods take at least the time until the data
arrive, from the start of period p, plus the longest chain of stages from their reader on, which ends within p + k.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations
from typing import TypeAlias

import numpy as np

from meshwright.planner.proof.space import AMOUNTS, ChoiceSubset, Space
from meshwright.profiles.stages import GENERATE

Pair: TypeAlias = frozenset[str]
"""Two stages."""

_ROUNDING = 1e-12
"""Relative change of bytes that summing in another order may cause."""


@dataclass(frozen=True)
class Case:
    """A subset of the plans of a space.

    `remaining` has the remaining choices of each stage, and `intersects` says for some pairs of stages whether their
    pools intersect.
    """

    space: Space
    remaining: Mapping[str, ChoiceSubset]
    intersects: Mapping[Pair, bool]

    @classmethod
    def whole(cls, space: Space) -> Case:
        """Return the case of every plan of the space."""
        all_choices = {name: choices.subset(np.arange(len(choices.site))) for name, choices in space.choices.items()}
        return cls(space, all_choices, {})

    def split_by_amount(self, stage: str, amount: str, most: float) -> tuple[Case, Case]:
        """Split the case by a stage's amount: the plans with at most `most`, and the others."""
        choices, indices = self.space.choices[stage], self.remaining[stage].indices
        is_within = choices.amounts[AMOUNTS.index(amount), indices] <= most
        halves = choices.subset(indices[is_within]), choices.subset(indices[~is_within])
        return replace(self, remaining={**self.remaining, stage: halves[0]}), replace(
            self, remaining={**self.remaining, stage: halves[1]}
        )

    def split_by_overlap(self, one: str, other: str) -> tuple[Case, Case]:
        """Split the case by two stages: the plans in which their pools intersect, and the others."""
        pair = frozenset((one, other))
        return replace(self, intersects={**self.intersects, pair: True}), replace(
            self, intersects={**self.intersects, pair: False}
        )

    @cached_property
    def least(self) -> Mapping[str, Mapping[str, float]]:
        """The least of each amount over the remaining choices, by stage."""
        return {name: subset.least for name, subset in self.remaining.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the stages."""
        return self.space.graph.names

    @cached_property
    def num_ranks(self) -> int:
        return self.space.num_ranks

    def always_intersect(self, one: str, other: str) -> bool:
        """Return True if two pools have a rank in common in every plan of the case."""
        too_many = self.least[one]["ranks"] + self.least[other]["ranks"] > self.num_ranks
        return too_many or self.intersects.get(frozenset((one, other)), False)

    @property
    def has_choices(self) -> bool:
        """True if every stage has some choice left."""
        return all(self.least.values())

    @cached_property
    def is_empty(self) -> bool:
        """True if no plan is in the case, or none fits the devices."""
        if not self.has_choices:
            return True
        disjoint = (pair for pair, meet in self.intersects.items() if not meet)
        return (
            any(sum(self.least[name]["ranks"] for name in pair) > self.num_ranks for pair in disjoint) or self._is_full
        )

    @property
    def _is_full(self) -> bool:
        limit = self.space.room_bytes * (1 + _ROUNDING)
        if self._bytes(self.names, "_in_all") > limit * self.num_ranks:
            return True
        return any(self._bytes(group) > limit for group in self._meeting_groups())

    def _bytes(self, group: Collection[str], suffix: str = "") -> float:
        """Return the least bytes that stages hold on a common rank; with `suffix="_in_all"`, on all ranks together.

        Shareable weights count once, and of transient memory only the largest of one stage.
        """
        weights = 0.0
        for role in self.space.graph.train_stage:
            sharers = [name for name in group if self.space.graph.by_name[name].copied_role == role]
            weights += max((self._weights(subset, suffix) for subset in _subsets(sharers)), default=0.0)
        private = math.fsum(self.least[name][f"own{suffix}"] for name in group)
        return private + weights + max(self.least[name][f"transient{suffix}"] for name in group)

    def _weights(self, group: Collection[str], suffix: str) -> float:
        """Return the least weights of stages of one role if no two of them can share weights, else 0."""
        if any(self._may_share(one, other) for one, other in combinations(group, 2)):
            return 0.0
        return sum(self.least[name][f"weights{suffix}"] for name in group)

    def _may_share(self, one: str, other: str) -> bool:
        """Return True if two stages may have the same layout on the same part of the cluster."""
        return not self.remaining[one].sites.isdisjoint(self.remaining[other].sites)

    def _meeting_groups(self) -> tuple[frozenset[str], ...]:
        pairs = combinations(self.names, 2)
        return _largest_groups(self.names, frozenset(pair for pair in pairs if self.always_intersect(*pair)))

    def least_seconds(self, most: float = math.inf) -> float:
        """Return a lower bound on the period of every plan of the case; it may stop at `most`."""
        period = _Period(self)
        by_work = period.by_work()
        return by_work if by_work >= most else period.by_order(by_work, most)

    def least_seconds_by_work(self) -> float:
        """Return the weaker bound from ranks x seconds alone; infinite if no plan fits."""
        return math.inf if self.is_empty else _Period(self).by_work()


@lru_cache(maxsize=4096)  # in many cases the same pools intersect
def _largest_groups(names: tuple[str, ...], meeting: frozenset[tuple[str, str]]) -> tuple[frozenset[str], ...]:
    """Return the maximal groups of stages whose pools all intersect each other."""
    groups: list[frozenset[str]] = []
    for group in reversed(list(_subsets(names))):
        if all(pair in meeting for pair in combinations(group, 2)) and not any(set(group) < other for other in groups):
            groups.append(frozenset(group))
    return tuple(groups)


def _subsets(names: Sequence[str]) -> Iterator[Sequence[str]]:
    return (subset for size in range(1, len(names) + 1) for subset in combinations(names, size))


class _Period:
    """One period of a case: its stages by position, each with the least of every amount, and their precedences.

    A stage that streams from generation may start before the generation ends, unless the two share ranks; it then
    counts with its tail seconds. If they share ranks it follows the generation at once, because the chunks have been
    transferred by then.
    """

    def __init__(self, case: Case) -> None:
        graph, search_case = case.space.graph, case.space.search_case
        streams = [
            search_case.streams(stage) and not case.always_intersect(stage.name, GENERATE) for stage in graph.stages
        ]
        prefixes = ["tail_" if is_streaming else "" for is_streaming in streams]
        least = [case.least[name] for name in graph.names]
        self.num_ranks = case.num_ranks
        self.all_work = sum(amounts["work"] for amounts in least)
        self.ranks = [amounts["ranks"] for amounts in least]
        self.seconds = [amounts[f"{prefix}seconds"] for amounts, prefix in zip(least, prefixes, strict=True)]
        self.work = [amounts[f"{prefix}work"] for amounts, prefix in zip(least, prefixes, strict=True)]
        self.meets = [[case.always_intersect(name, other) for other in graph.names] for name in graph.names]
        self.num_stages = len(graph.stages)
        self.ready = [0.0] * self.num_stages
        for target in case.space.refits:
            for reader in graph.refit_readers(target):
                position = graph.position[reader]
                self.ready[position] = max(self.ready[position], _refit_seconds(case, target))
        space = case.space
        # Readers of rewards on hosts (`is_late`) wait until `arrival` seconds after the start of the generation.
        self.arrival = [space.arrival_seconds if name == GENERATE else 0.0 for name in graph.names]
        self.is_late = [name in space.late for name in graph.names]
        # Transfers to later periods: (producer, consumer, number of periods, lag in seconds).
        self.carried = [
            (graph.position[producer], graph.position[consumer], num_periods, lag)
            for (producer, consumer), (num_periods, lag) in space.carried.items()
        ]
        self.inputs: list[list[tuple[int, float]]] = [[] for _ in graph.names]  # (producer, lag in seconds) by stage
        for (producer, consumer), lag in case.space.lags.items():
            shares_ranks = producer == GENERATE and case.always_intersect(consumer, GENERATE)
            is_hidden = shares_ranks and search_case.streams(graph.by_name[consumer])
            self.inputs[graph.position[consumer]].append((graph.position[producer], 0.0 if is_hidden else lag))
        self.ancestors = [set[int]() for _ in graph.names]
        for position in range(self.num_stages):  # in topological order: a stage comes after those that it reads from
            self.ancestors[position] = {
                earlier for before, _ in self.inputs[position] for earlier in (before, *self.ancestors[before])
            }

    def by_work(self) -> float:
        """Return the longest path through the period, where the work between two stages is spread over all ranks."""
        ends: list[float] = []
        starts: list[float] = []
        for position in range(self.num_stages):
            arrivals = (
                self._arrives(before, position, starts[before], ends[before], lag)
                for before, lag in self.inputs[position]
            )
            start = max([self.ready[position], *arrivals])
            for earlier in self.ancestors[position]:
                start = max(start, ends[earlier] + self._seconds_between(earlier, self.ancestors[position]))
            start = max(start, self._seconds_between(None, self.ancestors[position]))
            starts.append(start)
            ends.append(start + self.seconds[position])
        remaining_work = (
            ends[earlier] + self._seconds_between(earlier, range(self.num_stages)) for earlier in range(self.num_stages)
        )
        return max(*ends, *remaining_work, self.all_work / self.num_ranks, *self._carried(starts, ends))

    def _arrives(self, before: int, position: int, start: float, end: float, lag: float) -> float:
        """Return when a stage has its input from the stage `before`, including rewards."""
        return max(end + lag, start + self.arrival[before]) if self.is_late[position] else end + lag

    def _carried(self, starts: list[float], ends: list[float]) -> Iterator[float]:
        """Yield lower bounds on the period from transfers to later periods, given the earliest times of the stages."""
        chains_after = [0.0] * self.num_stages
        for position in reversed(range(self.num_stages)):
            chains = (
                lag + chains_after[later]
                for later in range(self.num_stages)
                for before, lag in self.inputs[later]
                if before == position
            )
            chains_after[position] = self.seconds[position] + max(
                [self._seconds_between(position, range(self.num_stages)), *chains]
            )
        for before, position, num_periods, lag in self.carried:
            arrival = self._arrives(before, position, starts[before], ends[before], lag)
            yield (arrival + chains_after[position]) / (num_periods + 1)

    def _seconds_between(self, first: int | None, before: Sequence[int] | set[int] | range) -> float:
        work = sum(self.work[position] for position in before if first is None or first in self.ancestors[position])
        return work / self.num_ranks

    def by_order(self, lower: float, upper: float) -> float:
        """Return the end of the best order, no less than `lower` and no more than `upper`.

        The search stops as soon as some order ends by `lower`.
        """
        self.lower, self.upper = lower, upper
        self.longest_chain = [0.0] * self.num_stages  # seconds from the start of each stage to the end of the period
        for position in reversed(range(self.num_stages)):
            chains = [
                lag + self.longest_chain[later]
                for later in range(self.num_stages)
                for before, lag in self.inputs[later]
                if before == position
            ]
            self.longest_chain[position] = self.seconds[position] + max(chains, default=0.0)
        self._extend([None] * self.num_stages, 0.0)
        return max(lower, self.upper)

    def _extend(self, times_of: list[tuple[float, float] | None], end: float) -> None:
        """Extend the partial order by every stage that may come next (branch and bound), and keep the earliest end."""
        unplaced = [position for position, interval in enumerate(times_of) if interval is None]
        if not unplaced:
            self.upper = min(self.upper, end)
            return
        for position in unplaced:
            if self.upper <= self.lower or any(times_of[before] is None for before, _ in self.inputs[position]):
                continue
            start = self._start(position, times_of)
            if start + self.longest_chain[position] < self.upper:
                times_of[position] = start, start + self.seconds[position]
                self._extend(times_of, max(end, start + self.seconds[position]))
                times_of[position] = None

    def _start(self, position: int, times_of: Sequence[tuple[float, float] | None]) -> float:
        """Return the earliest start at which the stage has its inputs and enough ranks are free."""
        arrivals = (
            self._arrives(earlier, position, *(times_of[earlier] or (0.0, 0.0)), lag)
            for earlier, lag in self.inputs[position]
        )
        ready = max([self.ready[position], *arrivals])
        running = [(interval, other) for other, interval in enumerate(times_of) if interval and interval[1] > ready]
        # Ranks become free only when a stage ends, so that the earliest start is `ready` or one of these ends.
        for start in sorted({ready, *(interval[1] for interval, _ in running)}):
            end = start + self.seconds[position]
            overlapping = [
                (interval, other) for interval, other in running if interval[0] < end and interval[1] > start
            ]
            if any(self.meets[position][other] for _, other in overlapping):
                continue
            # The number of ranks in use rises only when a stage starts, so it is enough to count at these instants.
            instants = [start, *(interval[0] for interval, _ in overlapping if interval[0] > start)]
            used = (
                sum(self.ranks[o] for interval, o in overlapping if interval[0] <= instant < interval[1])
                for instant in instants
            )
            if max(used) + self.ranks[position] <= self.num_ranks:
                return start
        raise AssertionError("after all other stages there is always room")


def _refit_seconds(case: Case, target: str) -> float:
    """Return the least seconds of a refit between the remaining layouts."""
    source = case.space.graph.trainer_of(target)
    return case.space.refit_seconds(target, case.remaining[source].sites, case.remaining[target].sites)
