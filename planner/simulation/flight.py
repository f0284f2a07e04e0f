"""The sequences of one replica from turn to turn, and the rules by which a turn of generation ends.

A turn delivers some of the sequences that have ended. What it does not wait for stays in flight: in its slot, or ended
and not delivered yet. Every rule reads counts of this replica's own sequences only, so all of its ranks decide alike,
without a message and whatever the wall clock says, and a simulation decides as they do.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from meshwright.planner.simulation.slot_groups import SlotGroup
from meshwright.profiles.errors import BadInput


class Queued(Protocol):
    """A prompt, or a sequence that it became; `row` is its place in the prompt batch of `step`."""

    @property
    def step(self) -> int: ...
    @property
    def row(self) -> int: ...


class Begun(Queued, Protocol):
    """A sequence of which a token has been drawn."""

    @property
    def first_turn(self) -> int:
        """The turn in which its first token was drawn."""
        ...


W = TypeVar("W", bound=Queued)
G = TypeVar("G", bound=SlotGroup[Any])
E = TypeVar("E", bound=Begun)


@dataclass(frozen=True)
class Everything:
    """The turn ends when nothing is in flight and delivers all of it: synchronous generation."""

    def __call__(self, flight: Flight[Any, Any, E]) -> Sequence[E] | None:
        return None if flight.num_unfinished.total() else tuple(flight.ended)


@dataclass(frozen=True)
class WholeStep:
    """The turn ends when every admitted sequence of prompt batch `step` has ended, and delivers those."""

    step: int

    def __call__(self, flight: Flight[Any, Any, E]) -> Sequence[E] | None:
        if flight.num_unfinished[self.step]:
            return None
        return [one for one in flight.ended if one.step == self.step]


@dataclass(frozen=True)
class FirstEnded:
    """The turn delivers `count` sequences: those that are due, then those that ended first.

    A sequence is due `max_deferral` turns after the one that drew its first token, and the turn does not end before
    every due sequence has. If fewer than `count` are in flight, all of them are delivered.
    """

    count: int
    max_deferral: int

    def __call__(self, flight: Flight[Any, Any, E]) -> Sequence[E] | None:
        """Raises BadInput where more are due than are delivered."""
        started_by = flight.turn - self.max_deferral
        if any(number for turn, number in flight.num_live.items() if turn <= started_by):
            return None
        if len(flight.ended) < self.count and flight.num_unfinished.total():
            return None
        due = [one for one in flight.ended if one.first_turn <= started_by]
        others = [one for one in flight.ended if one.first_turn > started_by]
        if len(due) > self.count:
            raise BadInput(
                f"overcommit: {len(due)} sequences are due in one turn that delivers {self.count}; "
                "overcommit at most as many prompts as the batch has."
            )
        return (*due, *others)[: self.count]


Delivery: TypeAlias = Everything | WholeStep | FirstEnded
"""What to deliver of the sequences that have ended; None while the turn has to go on."""


class Flight(Generic[W, G, E]):
    """The sequences that have been admitted and not delivered: W wait, those in groups G are live, E have ended."""

    def __init__(self, groups: Iterable[G]) -> None:
        self.groups = tuple(groups)
        self.waiting: deque[W] = deque()
        self.ended: list[E] = []
        """In the order in which they ended."""
        self.turn = -1
        """Turns are counted from 0."""
        self.num_rounds = 0
        """Of this turn: how often all groups have advanced."""
        self.num_unfinished: Counter[int] = Counter()
        """Queued sequences that have not ended, by step."""
        self.num_live: Counter[int] = Counter()
        """Those that have begun, by the turn in which they did."""

    def resume(self, turn: int, waiting: Iterable[W], ended: Iterable[E], paused: Iterable[Begun] = ()) -> None:
        """Goes on after `turn` with what is live in the groups, and with these; what is paused has begun."""
        self.turn, self.ended = turn, list(ended)
        self.waiting.extend(waiting)
        live = [*(one for group in self.groups for one in group.live), *paused]
        self.num_unfinished = Counter(one.step for one in (*live, *self.waiting))
        self.num_live = Counter(one.first_turn for one in live)

    def carry(self, begun: Begun) -> None:
        """Counts a sequence that was begun elsewhere, which whoever keeps what is paused has taken."""
        self.num_unfinished[begun.step] += 1
        self.num_live[begun.first_turn] += 1

    def play(
        self,
        admitted: Collection[W],
        delivery: Delivery,
        *,
        learn: Callable[[G], Sequence[E]],
        advance: Callable[[G], int],
        skip: Callable[[int | None], int] = lambda _most: 0,
        least_rounds: int = 0,
    ) -> tuple[E, ...]:
        """A turn: draws until `delivery` is satisfied, and for `least_rounds` if something is left to draw. What was
        admitted waits behind what waits already; what is delivered is in order of step and row.

        The groups take turns: `learn` takes out the sequences that ended with the tokens drawn last, in the order of
        their slots; `advance` draws a token for each live sequence and the first ones for those it admits from
        `waiting`, and counts these. When all have advanced, `skip` may advance them again at once, at most so often
        where a number is given, through rounds in which nothing begins or ends, and counts those.
        """
        self.turn += 1
        self.num_rounds = 0
        self.waiting.extend(admitted)
        self.num_unfinished.update(one.step for one in admitted)
        rotation = itertools.cycle(self.groups)
        delivered = self._delivered(delivery, least_rounds)
        while delivered is None:
            group = next(rotation)
            if self._learn(group, learn) or self.num_rounds == least_rounds:
                delivered = self._delivered(delivery, least_rounds)
            if delivered is None:
                self.num_live[self.turn] += advance(group)
                if group is self.groups[-1]:
                    self.num_rounds += 1
                    left = least_rounds - self.num_rounds
                    self.num_rounds += skip(left if left >= 0 else None)
        self._settle(rotation, learn)
        taken = set(map(id, delivered))
        self.ended = [one for one in self.ended if id(one) not in taken]
        return tuple(sorted(delivered, key=lambda one: (one.step, one.row)))

    def _delivered(self, delivery: Delivery, least_rounds: int) -> Sequence[E] | None:
        if self.num_rounds < least_rounds and self.num_unfinished.total():
            return None
        return delivery(self)

    def _learn(self, group: G, learn: Callable[[G], Sequence[E]]) -> bool:
        """Whether a sequence of the group has ended."""
        ended = learn(group)
        self.ended += ended
        for one in ended:
            self.num_unfinished[one.step] -= 1
            self.num_live[one.first_turn] -= 1
        return bool(ended)

    def _settle(self, rotation: Iterator[G], learn: Callable[[G], Sequence[E]]) -> None:
        """All groups learn what they drew last, in the order in which they drew it."""
        for group in itertools.islice(rotation, len(self.groups)):
            self._learn(group, learn)
        self.num_unfinished, self.num_live = +self.num_unfinished, +self.num_live
