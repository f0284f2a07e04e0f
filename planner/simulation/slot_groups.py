"""Slot groups: sequences that decode together, admitted from the front of a queue into free slots.

A replica's slots are divided into groups, one for each pipeline stage. The sequences of a group and their order follow
from counts alone, so all ranks of a replica, and a simulation of it, know them without messages.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from typing import Generic, Self, TypeVar

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
