"""A case of a proof: a subset of the plans of a space, and how it is split and bounded.

The formulas of the bounds are in `case_bounds`. The bound by the order of the stages is of one case only: among all
schedules on a number of ranks, some shortest one results from taking the stages in some order, each as early as
possible (Kolisch, EJOR 90, 1996, theorem 1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from meshwright.planner.proof.case_bounds import CaseBounds, Pair, Period
from meshwright.planner.proof.space import ChoiceSubset, Space


@dataclass(frozen=True)
class Case(CaseBounds[float]):
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
        choices = self.space.choices[stage]
        within, beyond = map(choices.subset, choices.halves(self.remaining[stage].indices, amount, most))
        return replace(self, remaining={**self.remaining, stage: within}), replace(
            self, remaining={**self.remaining, stage: beyond}
        )

    def split_by_overlap(self, one: str, other: str) -> tuple[Case, Case]:
        """Split the case by two stages: the plans in which their pools intersect, and the others."""
        pair = frozenset((one, other))
        return replace(self, intersects={**self.intersects, pair: True}), replace(
            self, intersects={**self.intersects, pair: False}
        )

    @cached_property
    def least(self) -> Mapping[str, Mapping[str, float]]:
        return {name: subset.least for name, subset in self.remaining.items()}

    def pools_intersect(self, one: str, other: str) -> bool:
        return self.intersects.get(frozenset((one, other)), False)

    def pools_are_disjoint(self, one: str, other: str) -> bool:
        return not self.intersects.get(frozenset((one, other)), True)

    def may_share_weights(self, one: str, other: str) -> bool:
        return not self.remaining[one].sites.isdisjoint(self.remaining[other].sites)

    def least_refit_seconds(self, target: str) -> float:
        source = self.space.graph.trainer_of(target)
        return self.space.refit_seconds(target, self.remaining[source].sites, self.remaining[target].sites)

    @property
    def has_choices(self) -> bool:
        """True if every stage has some choice left."""
        return all(self.least.values())

    @cached_property
    def is_empty(self) -> bool:
        """True if no plan is in the case, or none fits the devices."""
        return not self.has_choices or bool(self.has_no_room)

    def least_seconds(self, most: float = math.inf) -> float:
        """Return a lower bound on the period of every plan of the case; it may stop at `most`."""
        return self.least_seconds_by_order(self._period.by_work(), most)

    def least_seconds_by_order(self, by_work: float, most: float = math.inf) -> float:
        """Return the same bound, given the one by work alone."""
        return by_work if by_work >= most else _Orders(self._period, by_work, most).least_end()


class _Orders:
    """The orders in which the stages of one period may start, each stage as early as possible.

    An order is extended by one stage at a time (branch and bound). `upper` is the earliest end that was found, or the
    given one; the search stops as soon as some order ends by `lower`. An earliest schedule also results from the order
    of its starts, of equal ones by position, so that no stage is placed before the one that was placed last.
    """

    def __init__(self, period: Period[float], lower: float, upper: float) -> None:
        self.period, self.lower, self.upper = period, lower, upper
        num_stages = period.num_stages
        self.times_of: list[tuple[float, float] | None] = [None] * num_stages
        self.longest_chain = [0.0] * num_stages  # seconds from the start of each stage to the end of the period
        for position in reversed(range(num_stages)):
            chains = [
                lag + self.longest_chain[later]
                for later in range(num_stages)
                for before, lag in period.inputs[later]
                if before == position
            ]
            self.longest_chain[position] = period.seconds[position] + max(chains, default=0.0)

    def least_end(self) -> float:
        """Return the end of the best order, no less than `lower` and no more than `upper`."""
        self._extend((0.0, -1), 0.0)
        return max(self.lower, self.upper)

    def _extend(self, last: tuple[float, int], end: float) -> None:
        """Extend the partial order by every stage that may come next, and keep the earliest end.

        `last` has the start and the position of the stage that was placed last.
        """
        unplaced = [position for position, interval in enumerate(self.times_of) if interval is None]
        if not unplaced:
            self.upper = min(self.upper, end)
            return
        if last[0] + max([self.longest_chain[position] for position in unplaced]) >= self.upper:
            return
        for position in unplaced:
            if self.upper <= self.lower:
                return
            if any(self.times_of[before] is None for before, _ in self.period.inputs[position]):
                continue
            start = self._start(position)
            if (start, position) > last and start + self.longest_chain[position] < self.upper:
                stop = start + self.period.seconds[position]
                self.times_of[position] = start, stop
                self._extend((start, position), max(end, stop))
                self.times_of[position] = None

    def _start(self, position: int) -> float:
        """Return the earliest start at which the stage has its inputs and enough ranks are free."""
        period, ready = self.period, self.period.ready[position]
        for earlier, lag in period.inputs[position]:
            arrival = period.arrives(earlier, position, *(self.times_of[earlier] or (0.0, 0.0)), lag)
            ready = max(ready, arrival)
        running = [
            (interval, other) for other, interval in enumerate(self.times_of) if interval and interval[1] > ready
        ]
        if not running:
            return ready
        # Ranks become free only when a stage ends, so that the earliest start is `ready` or one of these ends.
        for start in sorted({ready, *[interval[1] for interval, _ in running]}):
            if self._has_room(position, start, running):
                return start
        raise AssertionError("after all other stages there is always room")

    def _has_room(self, position: int, start: float, running: Sequence[tuple[tuple[float, float], int]]) -> bool:
        """Return True if the stage may run from `start` on, beside those that are placed."""
        period, end = self.period, start + self.period.seconds[position]
        overlapping = [(interval, other) for interval, other in running if interval[0] < end and interval[1] > start]
        if any(period.meets[frozenset((position, other))] for _, other in overlapping):
            return False
        # The number of ranks in use rises only when a stage starts, so it is enough to count at these instants.
        free = period.num_ranks - period.ranks[position]
        return all(
            sum([period.ranks[other] for interval, other in overlapping if interval[0] <= instant < interval[1]])
            <= free
            for instant in [start, *[interval[0] for interval, _ in overlapping if interval[0] > start]]
        )
