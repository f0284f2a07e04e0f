"""Blocks of a replica's cache that its drawn sequences hold, round by round.

A sequence holds blocks for its prompt, for what it has drawn and in its first round for one token more, from the round
that prefills it to the one that draws its last token, as `runtime.generation.seating` gives and frees them. The blocks
that a prompt fills are held once for its rows that are live together. Nothing waits for a block here: what is drawn may
hold more than a plan has.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.program.instruction_durations import HeldBlocks
from meshwright.profiles.packing import BLOCK_TOKENS

Numbers = NDArray[np.int64]


def held_blocks(
    prompts: Numbers, starts: Numbers, ends: Numbers, read_until: Numbers, num_rounds: int
) -> NDArray[np.float64]:
    """Those of sequences in rounds [start, end), in each round from 0 to `num_rounds`.

    A start lies before round 0 where so many tokens were drawn by then, and an end beyond `num_rounds` where a sequence
    runs on. Another row of its prompt holds the prompt until `read_until`.
    """
    first, after = np.maximum(starts, 0), np.minimum(ends, num_rounds)
    before = prompts - starts  # the tokens of a round are these and its number
    counted = np.maximum(first, starts + 1)
    last = np.maximum(after - 1, counted)
    size = (num_rounds // BLOCK_TOKENS + 3) * BLOCK_TOKENS

    def next_block(rounds: Numbers) -> Numbers:
        """The first round after these in which a sequence needs another block."""
        return rounds + 1 + -(before + rounds) % BLOCK_TOKENS

    # From its first one on, a sequence takes a block every BLOCK_TOKENS rounds.
    begin, stop = (np.bincount(next_block(rounds), minlength=size) for rounds in (counted, last))
    taken = (begin - stop).reshape(-1, BLOCK_TOKENS).cumsum(axis=0).ravel()
    shared, until = prompts // BLOCK_TOKENS, np.minimum(np.maximum(read_until, first), after)
    changes = -(-(before + counted) // BLOCK_TOKENS) - shared, shared, -(before + last) // BLOCK_TOKENS
    rounds, blocks = np.concatenate([first, until, after]), np.concatenate(changes)
    held: NDArray[np.float64] = (taken + np.bincount(rounds, weights=blocks, minlength=size)).cumsum()
    return held[:num_rounds]


def use_of(held: NDArray[np.float64], first: Numbers, after: Numbers, seconds: NDArray[np.float64]) -> HeldBlocks:
    """Of runs of rounds [first, after), which may meet, by their seconds; where none takes any, by the rounds."""
    sums = np.zeros(len(held) + 1)
    held.cumsum(out=sums[1:])
    total = float(seconds.sum())
    mean = (sums[after] - sums[first]) / (after - first) @ seconds / total if total else held.mean()
    return HeldBlocks(mean=float(mean), most=int(held.max()))


def together(held: Iterable[HeldBlocks], seconds: Iterable[float]) -> HeldBlocks:
    """Of replicas or one generation after the other, each by its seconds."""
    means, most = zip(*held, strict=True)
    weights = np.fromiter(seconds, dtype=np.float64)
    return HeldBlocks(mean=float(np.average(means, weights=weights if weights.any() else None)), most=max(most))
