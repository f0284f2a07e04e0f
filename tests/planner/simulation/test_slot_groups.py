"""Slots are cut into groups without a gap; free ones are filled in order."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.simulation.flight import SlotGroup


class Letters(SlotGroup[str]):
    """A group of letters."""

    def admit(self, waiting: deque[str]) -> None:
        self.live += self._next(waiting)

    def end(self, letters: str) -> None:
        self._keep(one not in letters for one in self.live)


@pytest.mark.parametrize(
    ("num_slots", "num_stages", "sizes"), [(7, 3, [2, 2, 3]), (4, 1, [4]), (2, 2, [1, 1]), (2, 8, [1, 1])]
)
def test_slots_are_cut_into_contiguous_groups_none_of_which_is_empty(
    num_slots: int, num_stages: int, sizes: list[int]
) -> None:
    groups = Letters.split(num_slots, num_stages)
    assert [group.num_slots for group in groups] == sizes
    assert [group.first_slot for group in groups] == [sum(sizes[:index]) for index in range(len(sizes))]


def test_free_slots_are_filled_from_the_front_of_the_queue() -> None:
    group, waiting = Letters(0, 3), deque("abcde")
    group.admit(waiting)
    assert (group.live, list(waiting)) == (list("abc"), list("de"))


@given(st.text("abcdefghijkl"), st.integers(1, 12))
def test_what_has_not_ended_stays_in_its_order_and_its_slot_is_not_given_away(ended: str, num_slots: int) -> None:
    group, waiting = Letters(0, num_slots), deque("abcdefghijkl")
    group.admit(waiting)
    before = list(group.live)
    group.end(ended)
    assert group.live == [name for name in before if name not in ended]
    group.admit(waiting)
    assert group.live[: num_slots - len(set(before) & set(ended))] == [name for name in before if name not in ended]
    assert len(group.live) <= num_slots
