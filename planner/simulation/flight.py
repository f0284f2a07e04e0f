"""The sequences in flight on one replica, and the slot groups in which they decode, period by period.

A replica's slots are divided into groups, one for each pipeline stage. A period delivers some of the sequences that
have ended, by a rule of `cost_models.period_ends`; the others stay in flight. Groups and rule depend only on counts of
this replica's own sequences, so all of its ranks decide alike, without messages and independent of wall-clock time, and
a simulation decides as they do.
`runtime.rollout.admission` and `simulated_generation` choose the rule, `pacing` the minimum number of rounds.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Generic, Self, TypeVar

from meshwright.cost_models.period_ends import DeliveryRule, Queued, Started

S = TypeVar("S")
Waiting = TypeVar("Waiting")


class SlotGroup(Generic[S]):
    """Slots [first_slot, first_slot + num_slots) whose live sequences decode together, one token each in a round.

    Live sequences are in the order in which they took their slots.
    """

    def __init__(self, first_slot: int, num_slots: int) -> None:
        self.first_slot, self.num_slots = first_slot, num_slots
        self.live: list[S] = []

    @classmethod
    def split(cls, num_slots: int, num_stages: int) -> tuple[Self, ...]:
        """Return contiguous groups of nearly equal size: one for each pipeline stage, or fewer if slots run out."""
        num_groups = min(num_stages, num_slots)
        bounds = [num_slots * i // num_groups for i in range(num_groups + 1)]
        return tuple(cls(a, b - a) for a, b in pairwise(bounds))

    def _next(self, waiting: deque[Waiting]) -> list[Waiting]:
        """Remove and return as many sequences from the front of `waiting` as there are free slots."""
        return [waiting.popleft() for _ in range(min(self.num_slots - len(self.live), len(waiting)))]

    def _keep(self, kept: Iterable[bool]) -> None:
        """Remove the live sequences that are not kept."""
        self.live = list(itertools.compress(self.live, kept))


W = TypeVar("W", bound=Queued)
G = TypeVar("G", bound=SlotGroup[Any])
E = TypeVar("E", bound=Started)


class Flight(Generic[W, G, E]):
    """The sequences that have been admitted and not delivered.

    Sequences of type W wait for a slot, those in groups of type G are live, those of type E have ended.
    """

    def __init__(self, groups: Iterable[G]) -> None:
        self.groups = tuple(groups)
        self.waiting: deque[W] = deque()
        self.ended: list[E] = []
        """Sequences that have ended and are not delivered, in the order in which they ended."""
        self.period = -1
        """The current period, counted from 0; -1 before the first."""
        self.num_rounds = 0
        """Decode rounds of the current period."""
        self.num_unfinished: Counter[int] = Counter()
        """Number of admitted sequences that have not ended, by step."""
        self.num_live: Counter[int] = Counter()
        """Number of started sequences that have not ended, by the period in which they started."""
        self.num_held = 0
        """Number of unfinished sequences that sample nothing more in the current period; the caller counts them while
        it processes what was sampled."""

    def resume(self, period: int, waiting: Iterable[W], ended: Iterable[E], paused: Iterable[Started] = ()) -> None:
        """Continue after a period with the groups' live sequences and the given ones; paused ones have started."""
        self.period, self.ended = period, list(ended)
        self.waiting.extend(waiting)
        live = [*(sequence for group in self.groups for sequence in group.live), *paused]
        self.num_unfinished = Counter(sequence.step for sequence in (*live, *self.waiting))
        self.num_live = Counter(sequence.first_period for sequence in live)

    def add_started(self, begun: Started) -> None:
        """Count a sequence that started in an earlier run and that the caller keeps while it is paused."""
        self.num_unfinished[begun.step] += 1
        self.num_live[begun.first_period] += 1

    def run_period(
        self,
        admitted: Collection[W],
        delivery: DeliveryRule,
        *,
        process_sampled: Callable[[G], Sequence[E]],
        step: Callable[[G], int],
        multi_step: Callable[[int | None], int] = lambda _max_rounds: 0,
        min_rounds: int = 0,
    ) -> tuple[E, ...]:
        """Run a period: decode until `delivery` is satisfied, and at least `min_rounds` rounds if tokens remain.

        `admitted` sequences queue behind the waiting ones. The delivered sequences are returned in order of step and
        row.

        The groups are processed in rotation. `process_sampled` removes and returns the sequences that ended with the
        last sampled tokens, in the order of their slots. `step` samples a token for each live sequence and the first
        tokens of those that it admits from `waiting`, and returns the number of the latter. After every round
        `multi_step` may run further rounds in which no sequence starts or ends, at most the given number, and returns
        the number that it ran.
        """
        self.period += 1
        self.num_rounds = self.num_held = 0
        self.waiting.extend(admitted)
        self.num_unfinished.update(sequence.step for sequence in admitted)
        rotation = itertools.cycle(self.groups)
        delivered = self._try_deliver(delivery, min_rounds)
        while delivered is None:
            group = next(rotation)
            if self._process_sampled(group, process_sampled) or self.num_rounds == min_rounds:
                delivered = self._try_deliver(delivery, min_rounds)
            if delivered is None:
                self.num_live[self.period] += step(group)
                if group is self.groups[-1]:
                    self.num_rounds += 1
                    rounds_left = min_rounds - self.num_rounds
                    self.num_rounds += multi_step(rounds_left if rounds_left >= 0 else None)
        self._process_all_sampled(rotation, process_sampled)
        delivered_ids = set(map(id, delivered))
        self.ended = [sequence for sequence in self.ended if id(sequence) not in delivered_ids]
        return tuple(sorted(delivered, key=lambda sequence: (sequence.step, sequence.row)))

    def _try_deliver(self, delivery: DeliveryRule, min_rounds: int) -> Sequence[E] | None:
        if self.num_rounds < min_rounds and self.num_unfinished.total():
            return None
        return delivery(self)

    def _process_sampled(self, group: G, process_sampled: Callable[[G], Sequence[E]]) -> bool:
        """Process the group's last tokens; return True if one of its sequences has ended or is held."""
        held_before = self.num_held
        ended = process_sampled(group)
        self.ended += ended
        for sequence in ended:
            self.num_unfinished[sequence.step] -= 1
            self.num_live[sequence.first_period] -= 1
        return bool(ended) or self.num_held > held_before

    def _process_all_sampled(self, rotation: Iterator[G], process_sampled: Callable[[G], Sequence[E]]) -> None:
        """Process the last tokens of all groups, in the order in which they were sampled."""
        for group in itertools.islice(rotation, len(self.groups)):
            self._process_sampled(group, process_sampled)
        self.num_unfinished, self.num_live = +self.num_unfinished, +self.num_live
