"""Slots are cut into groups without a gap; free ones are filled in order, and freed ones by those behind them."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.simulation.slot_groups import SlotGroup


class Letters(SlotGroup[str]):
    """A group of letters, each as long in the cache as is told."""

    def admit(self, waiting: deque[str]) -> None:
        self.live += self._next(waiting)

    def end(self, letters: str, cached: dict[str, int]) -> list[tuple[int, int, int]]:
        moves = self._compact([cached[one] for one in self.live], [one in letters for one in self.live])
        return [(move.source, move.target, move.num_tokens) for move in moves]


@pytest.mark.parametrize(
    ("num_slots", "num_stages", "sizes"), [(7, 3, [2, 2, 3]), (4, 1, [4]), (2, 2, [1, 1]), (2, 8, [1, 1])]
)
def test_slots_are_cut_into_contiguous_groups_none_of_which_is_empty(
    num_slots: int, num_stages: int, sizes: list[int]
) -> None:
    groups = Letters.cut(num_slots, num_stages)
    assert [group.num_slots for group in groups] == sizes
    assert [group.first_slot for group in groups] == [sum(sizes[:index]) for index in range(len(sizes))]


def test_free_slots_are_filled_from_the_front_of_the_queue() -> None:
    group, waiting = Letters(0, 3), deque("abcde")
    group.admit(waiting)
    assert (group.live, list(waiting)) == (list("abc"), list("de"))


def test_a_move_names_the_slots_of_the_replica_and_what_is_cached() -> None:
    group = Letters(4, 3)
    group.admit(deque("abc"))
    assert group.end("a", {"a": 1, "b": 2, "c": 3}) == [(6, 4, 3)]
    assert group.live == list("cb")


@given(st.lists(st.tuples(st.integers(1, 90), st.booleans()), max_size=12))
def test_what_has_not_ended_stays_once_and_its_tokens_move_with_it(letters: list[tuple[int, bool]]) -> None:
    names = "abcdefghijkl"[: len(letters)]
    cached = {name: tokens for name, (tokens, _) in zip(names, letters, strict=True)}
    ended = "".join(name for name, (_, is_over) in zip(names, letters, strict=True) if is_over)
    group = Letters(0, 12)
    group.admit(deque(names))
    slots = dict(enumerate(cached.values()))
    for source, target, num_tokens in group.end(ended, cached):
        assert slots[source] == num_tokens
        slots[target] = slots[source]
    assert sorted(group.live) == sorted(set(names) - set(ended))
    assert [slots[index] for index in range(len(group.live))] == [cached[name] for name in group.live]
