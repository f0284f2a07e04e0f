"""KV blocks of a replica that its simulated sequences hold, round by round.

From the round that prefills it to the one that samples its last token, a sequence holds blocks for its prompt and its
sampled tokens (in its first round for one token more), as `runtime.generation.seating` allocates and frees them. The
blocks that a prompt fills are shared by its rows that are live at the same time. Sequences never wait for a block here,
so they may hold more blocks than the plan has.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.program.instruction_durations import HeldBlocks
from meshwright.profiles.packing import BLOCK_TOKENS

Integers = NDArray[np.int64]


def held_blocks(
    prompts: Integers, starts: Integers, ends: Integers, read_until: Integers, num_rounds: int
) -> NDArray[np.float64]:
    """Return the blocks held in each round from 0 to `num_rounds` by sequences that are live in rounds [start, end).

    A start is negative if tokens were sampled before round 0, and an end exceeds `num_rounds` if a sequence stays in
    flight. Another row of the same prompt holds the prompt's blocks until `read_until`.
    """
    first, after = np.maximum(starts, 0), np.minimum(ends, num_rounds)
    before = prompts - starts  # the tokens of a round are these and its number
    counted = np.maximum(first, starts + 1)
    last = np.maximum(after - 1, counted)
    size = (num_rounds // BLOCK_TOKENS + 3) * BLOCK_TOKENS

    def next_block(rounds: Integers) -> Integers:
        """Return the first round after these in which a sequence needs another block."""
        return rounds + 1 + -(before + rounds) % BLOCK_TOKENS

    # From its first one on, a sequence takes a block every BLOCK_TOKENS rounds.
    begin, stop = (np.bincount(next_block(rounds), minlength=size) for rounds in (counted, last))
    taken = (begin - stop).reshape(-1, BLOCK_TOKENS).cumsum(axis=0).ravel()
    shared, until = prompts // BLOCK_TOKENS, np.minimum(np.maximum(read_until, first), after)
    changes = -(-(before + counted) // BLOCK_TOKENS) - shared, shared, -(before + last) // BLOCK_TOKENS
    rounds, blocks = np.concatenate([first, until, after]), np.concatenate(changes)
    held: NDArray[np.float64] = (taken + np.bincount(rounds, weights=blocks, minlength=size)).cumsum()
    return held[:num_rounds]


def weighted_use(
    held: NDArray[np.float64], first: Integers, after: Integers, seconds: NDArray[np.float64]
) -> HeldBlocks:
    """Return the use over runs of rounds [first, after), weighted by their seconds (by rounds if those are 0).

    Runs may overlap.
    """
    sums = np.zeros(len(held) + 1)
    held.cumsum(out=sums[1:])
    total = float(seconds.sum())
    mean = (sums[after] - sums[first]) / (after - first) @ seconds / total if total else held.mean()
    return HeldBlocks(mean=float(mean), peak=int(held.max()))


def combined_use(held: Iterable[HeldBlocks], seconds: Iterable[float]) -> HeldBlocks:
    """Return the combined use of several replicas or generations, weighted by their seconds."""
    means, most = zip(*held, strict=True)
    weights = np.fromiter(seconds, dtype=np.float64)
    return HeldBlocks(mean=float(np.average(means, weights=weights if weights.any() else None)), peak=max(most))
