"""A good answer quickly: coordinate descent over options, each scored with a greedy schedule.

What it finds is a starting point and an upper bound; no proof depends on how good it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, product

from meshwright.planner.solver.greedy import Greedy, Near, Picks, Score

_SWEEPS = 20
"""Descents have always ended by themselves long before."""


def descend(greedy: Greedy, picks: Picks, score: Score) -> tuple[Picks, Score]:
    """A choice that no change of a single call improves."""
    for _ in range(_SWEEPS):
        before = score
        for call, options in enumerate(greedy.options):
            picks, score = _best(greedy, picks, score, _changes(picks, (call,), [range(len(options))]))
        if score == before:
            break
    return picks, score


def descend_in_pairs(greedy: Greedy, picks: Picks, score: Score, near: Near) -> tuple[Picks, Score]:
    """A choice that no change of two calls to options in `near` improves, each change followed by a descent."""
    pairs = list(combinations(range(len(near)), 2))
    for _ in range(_SWEEPS):
        before = score
        for one, other in pairs:
            changes = _changes(picks, (one, other), (near[one], near[other]))
            picks, score = _best(greedy, picks, score, changes)
        if score == before:
            break
        picks, score = descend(greedy, picks, score)
    return picks, score


def _changes(picks: Picks, calls: tuple[int, ...], options: Sequence[Iterable[int]]) -> Iterator[Picks]:
    for chosen in product(*options):
        changed = list(picks)
        for call, option in zip(calls, chosen, strict=True):
            changed[call] = option
        yield tuple(changed)


def _best(greedy: Greedy, picks: Picks, score: Score, changes: Iterable[Picks]) -> tuple[Picks, Score]:
    for changed in changes:
        found = greedy.score(changed, score)
        if found < score:
            picks, score = changed, found
    return picks, score
