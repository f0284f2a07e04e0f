"""What begins in a slot, as the mean of many slots whose sequences are drawn one by one."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest

from meshwright.profiles.kv_cache_size import Numbers, SlotRefills

ENDING = np.array([0.3, 0.0, 0.4, 0.0, 0.2, 0.0, 0.0, 0.1])
LONGEST = len(ENDING)
NUM_SLOTS = 4000


def drawn(arrivals: dict[int, int], num_steps: int) -> Numbers:
    """What begins in each step, by slot, where so many sequences arrive in these steps."""
    draw, waiting = random.Random(0), 0
    ends: deque[int] = deque([0] * NUM_SLOTS)
    begun = np.zeros(num_steps)
    for step in range(num_steps):
        waiting += arrivals.get(step, 0)
        free = [end for end in ends if end <= step]
        taken = min(len(free), waiting)
        steps = draw.choices(range(1, LONGEST + 1), ENDING.tolist(), k=taken)
        ends = deque([*sorted(ends)[taken:], *(step + number for number in steps)])
        begun[step], waiting = taken / NUM_SLOTS, waiting - taken
    return begun


def live(begun: Numbers) -> Numbers:
    """Sequences in a slot."""
    found: Numbers = np.convolve(begun, SlotRefills(ENDING).alive)[: len(begun)]
    return found


@pytest.mark.parametrize("waves", [0.5, 1.0, 3.7])
def test_one_batch_begins_as_drawn_sequences_do(waves: float) -> None:
    begun = SlotRefills(ENDING).alone(waves)
    assert begun.sum() == pytest.approx(waves)
    assert begun == pytest.approx(drawn({0: int(waves * NUM_SLOTS)}, len(begun)), abs=0.03)


@pytest.mark.parametrize(("batch", "turn"), [(0.3, 4.0), (1.2, 5.0), (2.5, 9.5)])
def test_even_batches_begin_as_drawn_sequences_do(batch: float, turn: float) -> None:
    begun = SlotRefills(ENDING).evenly(batch, turn)
    arrivals = {int(k * turn): int(batch * NUM_SLOTS) for k in range(len(begun))}
    assert begun == pytest.approx(drawn(arrivals, len(begun)), abs=0.03)


def test_batches_that_began_together_are_followed_by_as_many_together() -> None:
    begun = SlotRefills(ENDING).in_order(1.0, 0.5, LONGEST)
    assert {step: number for step, number in enumerate(begun) if number} == {k * LONGEST: 1.0 for k in range(4)}


def test_a_batch_follows_the_first_one_that_is_complete() -> None:
    """Of two batches for half as many slots, the second begins as slots are free, and is the later for it."""
    refills = SlotRefills(ENDING)
    begun = refills.in_order(2.0, 1.0, LONGEST)
    assert begun[:LONGEST] == pytest.approx(refills.alone(2.0)[:LONGEST])
    assert begun.cumsum()[LONGEST - 1] <= 2.0 < begun.cumsum()[2 * LONGEST - 1]


@pytest.mark.parametrize(("waves", "batch"), [(1.0, 0.5), (1.5, 1.0), (1.0, 0.8)])
def test_a_batch_follows_as_many_that_have_ended(waves: float, batch: float) -> None:
    begun = SlotRefills(ENDING).first_ended(waves, batch)
    ended = begun.cumsum() - live(begun)
    arrived = waves + batch * np.floor(ended / batch + 1e-6)
    assert np.all(begun.cumsum() <= arrived + 1e-6)
    assert np.all(np.minimum(1 - live(begun), arrived - begun.cumsum()) < 1e-6)


def test_nothing_waits_while_a_slot_is_free_and_none_holds_two() -> None:
    refills = SlotRefills(ENDING)
    for begun in (refills.alone(2.3), refills.evenly(0.9, 4.0), refills.in_order(3.0, 1.5, LONGEST), refills.always):
        assert np.all(begun >= 0)
        assert np.all(live(begun) <= 1 + 1e-9)
    assert live(refills.always) == pytest.approx(1.0)
