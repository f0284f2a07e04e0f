"""Many replicas' turns of a generation, played side by side: when each turn of each replica ends.

Sequences take the slot that is free first in their order of arrival, as in `play` of `cost_models.turn_cost`, which
plays one replica and knows more of it. All replicas have as many sequences, so that a turn of all is one of arrays.
"""

from __future__ import annotations

import numpy as np

from meshwright.cost_models.rounds import Integers
from meshwright.cost_models.turn_ends import TurnEnds


def bounds_of(
    responses: Integers, *, num_slots: int, num_rows: int, in_flight: int, num_turns: int, max_deferral: int | None
) -> Integers:
    """The rounds between which the turns lie, [replica, 1 + num_turns].

    `responses` [replica, sequence] arrive in their order: `in_flight` of them at the start, `num_rows` with each later
    turn. Turns end as `TurnEnds` ends them.
    """
    num_replicas = len(responses)
    free = np.zeros((num_replicas, num_slots), dtype=np.int64)
    turns = TurnEnds(num_replicas, num_rows, max_deferral)
    arriving, release = responses[:, :in_flight], np.zeros(num_replicas, dtype=np.int64)
    for turn in range(num_turns):
        start = _admitted(free, arriving, release)
        turns.add(start, start + arriving)
        release = turns.next()
        arriving = responses[:, in_flight + turn * num_rows : in_flight + (turn + 1) * num_rows]
    return turns.bounds


def _admitted(free: Integers, responses: Integers, release: Integers) -> Integers:
    """The rounds in which responses start that arrive in round `release` [replica]; `free` [replica, slot] are the
    rounds in which the slots are free, and are brought up to date."""
    starts, replicas = np.empty_like(responses), np.arange(len(responses))
    for index in range(responses.shape[1]):
        slots = free.argmin(axis=1)
        starts[:, index] = start = np.maximum(free[replicas, slots], release)
        free[replicas, slots] = start + responses[:, index]
    return starts
