"""Turns end by what they deliver, each replica by its own sequences; that a flight ends them so is tested with it."""

from __future__ import annotations

import numpy as np

from meshwright.cost_models.turn_ends import TurnEnds


def ends(max_deferral: int | None, *admitted: list[list[int]]) -> list[list[int]]:
    """The bounds of turns of two rows, [replica, turn]; what is admitted to each ends in the rounds given, and starts
    when it is admitted."""
    turns = TurnEnds(len(admitted[0]), 2, max_deferral)
    for rounds in admitted:
        end = np.array(rounds)
        turns.add(np.repeat(turns.bounds[:, -1:], end.shape[1], axis=1), end)
        turns.next()
    found: list[list[int]] = turns.bounds.tolist()
    return found


def test_in_order_a_turn_waits_for_the_last_of_its_own_batch_and_for_no_other() -> None:
    assert ends(None, [[3, 9, 1, 2], [1, 2, 30, 40]], [[10, 11], [50, 60]]) == [[0, 9, 9], [0, 2, 40]]


def test_with_deferral_a_turn_takes_the_first_to_end_and_waits_for_what_is_due() -> None:
    # Of 3, 90, 1 the two short ones are delivered; in the next turn 90 is not due yet, and in the one after it is.
    admitted = [[3, 90, 1]], [[5, 7]], [[8, 9]]
    assert ends(2, *admitted) == [[0, 3, 7, 90]]
    assert ends(1, *admitted) == [[0, 3, 90, 90]]
