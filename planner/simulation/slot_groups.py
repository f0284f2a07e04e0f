"""Which sequence sits in which slot: admission from the front of a queue, and the moves that leave no gap.

A replica's slots are cut into groups, a group for each pipeline stage. Which sequences a group holds, and in which
order, follows from counts alone, so that all ranks of a replica and a simulation of it know without a message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, Self, TypeVar

from meshwright.planner.simulation.compaction import compaction

S = TypeVar("S")
W = TypeVar("W")


@dataclass(frozen=True)
class SlotMove:
    """The sequence in slot `source` goes to slot `target`, with its first `num_tokens` cached tokens."""

    source: int
    target: int
    num_tokens: int


class SlotGroup(Generic[S]):
    """Slots [first_slot, first_slot + num_slots) whose live sequences advance together, a token for each in a round;
    the live ones occupy the first of them."""

    def __init__(self, first_slot: int, num_slots: int) -> None:
        self.first_slot, self.num_slots = first_slot, num_slots
        self.live: list[S] = []

    @classmethod
    def cut(cls, num_slots: int, num_stages: int) -> tuple[Self, ...]:
        """The slots as contiguous groups of nearly equal size, one for each pipeline stage while there are slots."""
        num_groups = min(num_stages, num_slots)
        bounds = [num_slots * i // num_groups for i in range(num_groups + 1)]
        return tuple(cls(a, b - a) for a, b in pairwise(bounds))

    def _next(self, waiting: deque[W]) -> list[W]:
        """Takes as many from the front of `waiting` as slots are free."""
        return [waiting.popleft() for _ in range(min(self.num_slots - len(self.live), len(waiting)))]

    def _compact(self, cached: Sequence[int], ended: Sequence[bool]) -> list[SlotMove]:
        """Takes out what has ended and fills each freed slot; the moves that do so, one after another. `cached` are the
        cached tokens of the live sequences."""
        left, moves = list(cached), []
        for source, target in compaction(cached, ended):
            self.live[target], left[target] = self.live[source], left[source]
            moves.append(SlotMove(self.first_slot + source, self.first_slot + target, left[target]))
        del self.live[ended.count(False) :]
        return moves
