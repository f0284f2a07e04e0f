"""What a turn of generation waits for and delivers, in plain Python.

Sequences that a turn does not wait for stay in flight: in their slots, or ended and not delivered yet. Every rule
reads counts of this replica's own sequences only, so all of its ranks decide alike, without a message and whatever
the wall clock says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from meshwright.profiles.errors import BadInput
from meshwright.runtime.generation.slots import LiveSequence, Prompt, Response, SlotGroup


class Delivery(Protocol):
    """A rule for the end of a turn."""

    def choose(self, flight: Flight) -> Sequence[Response] | None:
        """What to deliver of the sequences that have ended; None while the turn has to go on."""
        ...


@dataclass(frozen=True)
class Everything:
    """The turn ends when nothing is in flight and delivers all of it: synchronous generation."""

    def choose(self, flight: Flight) -> Sequence[Response] | None:
        """All that has ended, once nothing is unfinished."""
        return None if flight.num_unfinished else tuple(flight.ended)


@dataclass(frozen=True)
class WholeStep:
    """The turn ends when every admitted sequence of prompt batch `step` has ended, and delivers those."""

    step: int

    def choose(self, flight: Flight) -> Sequence[Response] | None:
        """The responses of the step, once none of its prompts is unfinished."""
        if any(prompt.step == self.step for prompt in flight.unfinished_prompts()):
            return None
        return tuple(response for response in flight.ended if response.step == self.step)


@dataclass(frozen=True)
class FirstEnded:
    """The turn delivers `count` sequences: those that are due, then those that ended first.

    A sequence is due `max_deferral` turns after the one that drew its first token, and the turn does not end before
    every due sequence has. If fewer than `count` are in flight, all of them are delivered.
    """

    count: int
    max_deferral: int

    def choose(self, flight: Flight) -> Sequence[Response] | None:
        """Due sequences, then those that ended first. Raises BadInput where more are due than a turn delivers."""
        started_by = flight.turn - self.max_deferral
        if any(sequence.first_turn <= started_by for sequence in flight.live()):
            return None
        if len(flight.ended) < self.count and flight.num_unfinished:
            return None
        due = [response for response in flight.ended if response.first_turn <= started_by]
        others = [response for response in flight.ended if response.first_turn > started_by]
        if len(due) > self.count:
            raise BadInput(
                f"overcommit: {len(due)} sequences are due in one turn that delivers {self.count}; "
                "overcommit at most as many prompts as the batch has."
            )
        return (*due, *others)[: self.count]


class Flight:
    """The sequences of one replica that have been admitted and not delivered."""

    def __init__(self, groups: Sequence[SlotGroup]) -> None:
        self.groups = tuple(groups)
        self.waiting: deque[Prompt] = deque()
        self.ended: list[Response] = []
        """In the order in which they ended."""
        self.turn = -1
        """Turns are counted from 0."""
        self.num_rounds, self.least_rounds = 0, 0
        """Of this turn: how often all groups have advanced, and how often they do if something is left to draw."""

    def begin(self, admitted: Collection[Prompt], least_rounds: int = 0) -> None:
        """A turn starts; the prompts admitted to it wait behind those that wait already."""
        self.turn += 1
        self.num_rounds, self.least_rounds = 0, least_rounds
        self.waiting.extend(admitted)

    def live(self) -> list[LiveSequence]:
        """The sequences in slots, group by group."""
        return [sequence for group in self.groups for sequence in group.live]

    def unfinished_prompts(self) -> list[Prompt]:
        """Of live sequences, then those that wait for a slot."""
        return [sequence.prompt for sequence in self.live()] + list(self.waiting)

    @property
    def num_unfinished(self) -> int:
        """Sequences that are live or wait."""
        return len(self.waiting) + sum(len(group.live) for group in self.groups)

    def deliver(self, delivery: Delivery) -> tuple[Response, ...] | None:
        """Takes out what `delivery` chooses, in order of step and row; None while the turn has to go on."""
        if self.num_rounds < self.least_rounds and self.num_unfinished:
            return None
        chosen = delivery.choose(self)
        if chosen is None:
            return None
        taken = set(map(id, chosen))
        self.ended = [response for response in self.ended if id(response) not in taken]
        return tuple(sorted(chosen, key=lambda response: (response.step, response.row)))
