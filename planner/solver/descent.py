"""Finds a good answer quickly by coordinate descent over options, each scored with a greedy schedule.

The answer is a start and an upper bound; no proof depends on its quality.
"""

from __future__ import annotations

from itertools import combinations

from meshwright.planner.solver.greedy import Greedy, Neighbours, Picks, Score
from meshwright.planner.solver.result import Limits

_SWEEPS = 20
"""Limit on sweeps over all calls; descents have always ended long before it."""


def descend(greedy: Greedy, picks: Picks, score: Score) -> tuple[Picks, Score]:
    """Return a choice that no change of a single call improves, with its score."""
    num_unchanged, max_changes = 0, len(greedy.options) * _SWEEPS
    for number in range(max_changes):
        call = number % len(greedy.options)
        before, choices = score, range(len(greedy.options[call]))
        picks, score = greedy.best_change(picks, score, (call,), [choices])
        num_unchanged = num_unchanged + 1 if score == before else 1
        if num_unchanged == len(greedy.options):
            break
    return picks, score


def descend_in_pairs(
    greedy: Greedy, picks: Picks, score: Score, near: Neighbours, limits: Limits
) -> tuple[Picks, Score]:
    """Return a choice that no change of two calls to options in `near` improves; each change is followed by a descent.

    Raises OutOfTimeError if the limits leave no time.
    """
    pairs = list(combinations(range(len(near)), 2))
    for _ in range(_SWEEPS):
        before = score
        for one, other in pairs:
            limits.require_time()
            picks, score = greedy.best_change(picks, score, (one, other), [near[one], near[other]])
        if score == before:
            break
        picks, score = descend(greedy, picks, score)
    return picks, score
