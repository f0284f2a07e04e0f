"""Which sequences advance together: admission from the front of a queue into the slots of a group.

A replica's slots are cut into groups, a group for each pipeline stage. Which sequences a group holds, and in which
order, follows from counts alone, so that all ranks of a replica and a simulation of it know without a message.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from typing import Generic, Self, TypeVar

S = TypeVar("S")
W = TypeVar("W")


class SlotGroup(Generic[S]):
    """Slots [first_slot, first_slot + num_slots) whose live sequences advance together, a token for each in a round,
    in the order in which they took their slots."""

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

    def _keep(self, kept: Iterable[bool]) -> None:
        """Takes out the live sequences that are not kept."""
        self.live = list(itertools.compress(self.live, kept))
