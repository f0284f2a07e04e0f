"""Compaction: what has not ended moves to the first slots, longer sequences stay before shorter ones, moves are few."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.simulation.compaction import compaction

SLOTS = st.lists(st.tuples(st.integers(1, 2000), st.booleans()), max_size=64)


def compacted(lengths: list[int], ended: list[bool]) -> list[int]:
    """The lengths in the slots of what has not ended, after the moves."""
    slots = list(lengths)
    for source, target in compaction(lengths, ended):
        slots[target] = slots[source]
    return slots[: ended.count(False)]


@given(SLOTS)
def test_what_has_not_ended_is_in_the_first_slots(slots: list[tuple[int, bool]]) -> None:
    lengths, ended = [length for length, _ in slots], [has_ended for _, has_ended in slots]
    assert sorted(compacted(lengths, ended)) == sorted(length for length, has_ended in slots if not has_ended)


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=64), st.data())
def test_slots_that_were_in_order_stay_nearly_in_order_when_one_is_freed(
    lengths: list[int], data: st.DataObject
) -> None:
    lengths = sorted(lengths, reverse=True)
    freed = data.draw(st.integers(0, len(lengths) - 1))
    left = compacted(lengths, [place == freed for place in range(len(lengths))])
    assert all(before >= 0.75 * behind for before, behind in pairwise(left))


def test_a_slot_that_is_freed_takes_a_move_for_each_quarter_by_which_those_behind_are_shorter() -> None:
    lengths = [1000 - 5 * place for place in range(190)]
    assert len(list(compaction(lengths, [True] + [False] * 189))) == 10  # from 1000 tokens to 55
    assert len(list(compaction([100] * 20, [True] + [False] * 19))) == 1
