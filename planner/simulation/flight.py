"""The sequences of one replica from turn to turn, without their tokens: when each is admitted, ends and is delivered.

The rules are the runtime's, and so is their order: slots in groups that advance in rotation, a group that learns its
last tokens before it admits prompts into free slots and draws again, and a turn that ends in the middle of a rotation.
All of them read counts of this replica only. Passes in which nothing begins or ends are taken together.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from meshwright.planner.simulation.compaction import compaction
from meshwright.planner.simulation.round_times import RoundTimes

_MOST_PASSES = 256
"""Passes are costed together at their middle, so many at most."""


@dataclass(slots=True, kw_only=True, eq=False)
class Drawn:
    """One prompt and its response: their tokens, and what has come of it. `step` is that of its prompt batch."""

    step: int
    row: int
    prompt_tokens: int
    response_tokens: int
    first_turn: int = -1
    first_pass: int = 0
    drawn: list[int] = field(default_factory=list)
    """Tokens that were there at the end of each turn since the first."""

    @property
    def last_pass(self) -> int:
        """The pass of its group that draws its last token."""
        return self.first_pass + self.response_tokens - 1

    def tokens_by_turn(self) -> dict[int, int]:
        """How many tokens each turn drew, of a response that has ended."""
        totals = [0, *self.drawn, self.response_tokens]
        parts = {self.first_turn + i: after - before for i, (before, after) in enumerate(pairwise(totals))}
        return {turn: tokens for turn, tokens in parts.items() if tokens}


Delivery: TypeAlias = "Callable[[SimulatedFlight], Sequence[Drawn] | None]"
"""What to deliver of the sequences that have ended; None while the turn has to go on."""


def whole_step(step: int) -> Delivery:
    """The turn ends when every admitted sequence of prompt batch `step` has ended, and delivers those."""

    def choose(flight: SimulatedFlight) -> Sequence[Drawn] | None:
        if flight.num_unfinished[step]:
            return None
        return [one for one in flight.ended if one.step == step]

    return choose


def first_ended(count: int, max_deferral: int) -> Delivery:
    """The turn delivers `count` sequences: those that are due, then those that ended first.

    A sequence is due `max_deferral` turns after the one that drew its first token, and the turn does not end before
    every due sequence has.
    """

    def choose(flight: SimulatedFlight) -> Sequence[Drawn] | None:
        started_by = flight.turn - max_deferral
        if any(number for turn, number in flight.num_live.items() if turn <= started_by):
            return None
        if len(flight.ended) < count and flight.num_unfinished.total():
            return None
        due = [one for one in flight.ended if one.first_turn <= started_by]
        others = [one for one in flight.ended if one.first_turn > started_by]
        assert len(due) <= count, "no more is overcommitted than a batch has"
        return (*due, *others)[:count]

    return choose


class SimulatedGroup:
    """Slots whose live sequences advance together, a token for each in a pass; the live ones occupy the first slots."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self.live: list[Drawn] = []
        self.num_passes = 0
        self._has_drawn = False
        self._next_end, self._reach = 0, 0

    @property
    def num_passes_left(self) -> int:
        """Passes until the next sequence ends."""
        return self._next_end - self.num_passes

    @property
    def context(self) -> int:
        """Cached tokens of the longest live sequence in the next pass."""
        return self._reach + self.num_passes

    def learn(self) -> list[Drawn]:
        """Takes out the sequences that ended in the last pass, in the order of their slots."""
        if not self._has_drawn:
            return []
        self._has_drawn = False
        if self.num_passes < self._next_end:
            return []
        ended = [one for one in self.live if one.last_pass == self.num_passes]
        self._compact()
        self._look_ahead()
        return ended

    def _compact(self) -> None:
        """Fills each freed slot as the runtime does."""
        ended = [one.last_pass == self.num_passes for one in self.live]
        cached = [one.prompt_tokens + self.num_passes - one.first_pass for one in self.live]
        for source, target in compaction(cached, ended):
            self.live[target] = self.live[source]
        del self.live[ended.count(False) :]

    def _look_ahead(self) -> None:
        if self.live:
            self._next_end = min(one.last_pass for one in self.live)
            self._reach = max(one.prompt_tokens - one.first_pass for one in self.live)

    def advance(self, waiting: deque[Drawn], turn: int) -> list[Drawn]:
        """One pass: a token for each live sequence, and the first one for what is admitted into the free slots."""
        admitted = [waiting.popleft() for _ in range(min(self._num_slots - len(self.live), len(waiting)))]
        self.live += admitted
        self.skip(1)
        for one in admitted:
            one.first_turn, one.first_pass = turn, self.num_passes
        if admitted:
            self._look_ahead()
        return admitted

    def skip(self, num_passes: int) -> None:
        """Passes in which nothing begins."""
        if self.live and num_passes:
            self.num_passes += num_passes
            self._has_drawn = True


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What a turn delivered, in order of step and row; how long it took; the sequences in flight on average over its
    rounds."""

    delivered: tuple[Drawn, ...]
    seconds: float
    live: float


class SimulatedFlight:
    """The sequences of one replica that have been admitted and not delivered."""

    def __init__(self, num_slots: int, num_stages: int, times: RoundTimes) -> None:
        num_groups = min(num_stages, num_slots)
        bounds = [num_slots * i // num_groups for i in range(num_groups + 1)]
        self.groups = tuple(SimulatedGroup(b - a) for a, b in pairwise(bounds))
        self.waiting: deque[Drawn] = deque()
        self.ended: list[Drawn] = []
        """In the order in which they ended."""
        self.turn = -1
        self.num_unfinished: Counter[int] = Counter()
        """Admitted sequences that have not ended, by step."""
        self.num_rounds = 0
        """Of this turn: how often all groups have advanced."""
        self.num_live: Counter[int] = Counter()
        """Those that have begun, by the turn in which they did."""
        self._num_stages, self._times, self._least_rounds = num_stages, times, 0

    def play(self, admitted: Collection[Drawn], delivery: Delivery, least_rounds: int = 0) -> Turn:
        """Draws until `delivery` is satisfied, and for `least_rounds` if something is left to draw; what was admitted
        waits behind what waits already."""
        self.turn += 1
        self.num_rounds, self._least_rounds = 0, least_rounds
        self.waiting.extend(admitted)
        self.num_unfinished.update(one.step for one in admitted)
        work = _Work(len(self.groups), self._num_stages)
        delivered = self._deliver(delivery)
        while delivered is None:
            delivered = self._rotate(delivery, work)
            if delivered is None:
                self._skip(work)
        self.num_unfinished, self.num_live = +self.num_unfinished, +self.num_live
        for group in self.groups:
            for one in group.live:
                one.drawn.append(group.num_passes - one.first_pass + 1)
        taken = set(map(id, delivered))
        self.ended = [one for one in self.ended if id(one) not in taken]
        return Turn(
            delivered=tuple(sorted(delivered, key=lambda one: (one.step, one.row))),
            seconds=work.seconds(self._times),
            live=work.live,
        )

    def _deliver(self, delivery: Delivery) -> Sequence[Drawn] | None:
        if self.num_rounds < self._least_rounds and self.num_unfinished.total():
            return None
        return delivery(self)

    def _rotate(self, delivery: Delivery, work: _Work) -> Sequence[Drawn] | None:
        """Each group learns its last tokens and draws again, until the turn may end: then all learn what they drew."""
        rows, context = 0, 0
        for index, group in enumerate(self.groups):
            asks = self._learn(group) or self.num_rounds == self._least_rounds
            delivered = self._deliver(delivery) if asks else None
            if delivered is not None:
                work.decode(index / len(self.groups), rows * len(self.groups) / max(index, 1), context)
                for other in (*self.groups[index + 1 :], *self.groups[:index]):
                    self._learn(other)
                return delivered
            rows += len(group.live)
            context = max(context, group.context if group.live else 0)
            admitted = group.advance(self.waiting, self.turn)
            self.num_live[self.turn] += len(admitted)
            work.admit(admitted)
        work.decode(1, rows, context)
        self.num_rounds += 1
        return None

    def _learn(self, group: SimulatedGroup) -> bool:
        """Whether a sequence of the group has ended."""
        ended = group.learn()
        self.ended += ended
        for one in ended:
            self.num_unfinished[one.step] -= 1
            self.num_live[one.first_turn] -= 1
        return bool(ended)

    def _skip(self, work: _Work) -> None:
        """All passes until a sequence ends or the turn has lasted long enough."""
        busy = [group for group in self.groups if group.live]
        left = min(group.num_passes_left for group in busy)
        if self.num_rounds <= self._least_rounds:
            left = min(left, self._least_rounds - self.num_rounds)
        self.num_rounds += left
        rows = sum(len(group.live) for group in busy)
        while left:
            passes = min(left, _MOST_PASSES)
            work.decode(passes, rows, max(group.context for group in busy) + (passes - 1) / 2)
            for group in busy:
                group.skip(passes)
            left -= passes


class _Work:
    """What a turn does: rounds of so many sequences with so many cached tokens, and prompts that are prefilled."""

    def __init__(self, num_groups: int, num_stages: int) -> None:
        self._num_groups, self._num_stages = num_groups, num_stages
        self._decodes: list[tuple[float, float, float]] = []  # rounds, rows, cached tokens
        self._first: list[Drawn] = []
        self._refills: list[tuple[int, float]] = []  # rows, mean tokens
        self._num_rounds, self._row_rounds = 0.0, 0.0

    def admit(self, admitted: Sequence[Drawn]) -> None:
        """Prompts that a group prefills in one pass; those of a turn's first round fill the pipeline together."""
        self._row_rounds += len(admitted)
        if not self._num_rounds:
            self._first += admitted
        elif admitted:
            self._refills.append((len(admitted), _mean_prompt(admitted)))

    def decode(self, rounds: float, rows: float, context: float) -> None:
        self._num_rounds += rounds
        self._row_rounds += rounds * rows
        if rounds and rows:
            self._decodes.append((rounds, rows, context))

    @property
    def live(self) -> float:
        return self._row_rounds / self._num_rounds if self._num_rounds else 0.0

    def seconds(self, times: RoundTimes) -> float:
        """A later prompt is in the way of one group only, so the grid is asked as if every group had as many."""
        total = 0.0
        if self._decodes:
            rounds, rows, contexts = np.array(self._decodes).T
            total += float((rounds * times.round_(rows, contexts)).sum())
        if self._first:
            rows, tokens = np.array([[len(self._first)], [_mean_prompt(self._first)]])
            total += float(times.prefill(rows, tokens).sum())
        if self._refills:
            rows, tokens = np.array(self._refills).T
            total += float(times.prefill(rows * self._num_groups, tokens).sum()) / self._num_stages
        return total


def _mean_prompt(admitted: Sequence[Drawn]) -> float:
    return statistics.fmean(one.prompt_tokens for one in admitted)
