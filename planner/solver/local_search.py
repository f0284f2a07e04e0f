"""Finds good answers quickly by coordinate descent, one task after the other.

A choice (`Picks`) has the index of a mode for each task, and is scored by its greedy schedule. The answer is a start
and an upper bound; no proof depends on its quality.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np

from meshwright.planner.solver.greedy_schedule import Array, Greedy, Picks
from meshwright.planner.solver.model import Incumbent
from meshwright.planner.solver.problem import Mode, Problem
from meshwright.planner.solver.result import Limits

_SWEEPS = 20
"""Limit on sweeps over all tasks; it is a safeguard, which no descent has reached."""


def descend(greedy: Greedy, picks: Array) -> tuple[Array, Array]:
    """Return for each choice, [choices, tasks], one that no change of a single task improves, and their scores.

    `picks` are overwritten. All descents advance together: a step seeks better modes of one task, which is the same
    task for every choice.
    """
    scores, num_tasks = greedy.scores(picks), len(greedy.modes)
    num_unchanged = np.zeros(len(picks), dtype=np.int64)
    for number in range(num_tasks * _SWEEPS):
        active = np.flatnonzero(num_unchanged < num_tasks)
        if not len(active):
            break
        before = scores[active]
        picks[active], scores[active] = greedy.best_changes(picks[active], before, number % num_tasks)
        is_unchanged = (scores[active] == before).all(axis=1)
        num_unchanged[active] = np.where(is_unchanged, num_unchanged[active] + 1, 1)
    return picks, scores


_RANDOM_STARTS = 16
"""Number of descents from random choices, beside those from the fastest and the smallest modes."""

_MAX_CELLS = 10**7
"""Largest number of choices x atoms that are compared at once."""


def descents(problem: Problem, limits: Limits) -> Iterator[Incumbent]:
    """Yield better and better answers of descents from the fastest, the smallest and random modes.

    They end early when there is an answer and no time is left.
    """
    rng, greedy, makespan = random.Random(limits.seed), Greedy(problem), None
    starts = [_fastest(problem), _smallest(problem), *(_at_random(rng, problem) for _ in range(_RANDOM_STARTS))]
    max_modes = max(len(task.modes) for task in problem.tasks)
    num_together = max(1, _MAX_CELLS // (max_modes * len(problem.atoms)))
    for first in range(0, len(starts), num_together):
        if makespan is not None and limits.seconds_left <= 0:
            return
        picks, scores = descend(greedy, np.array(starts[first : first + num_together]))
        # The first element of a score is the excess of memory; it is 0 for a choice that fits.
        for incumbent in (_incumbent(greedy, row) for row, score in zip(picks, scores, strict=True) if score[0] == 0):
            if makespan is None or incumbent.period.makespan < makespan:
                makespan = incumbent.period.makespan
                yield incumbent


def descent_from(problem: Problem, modes: Sequence[Mode]) -> Incumbent | None:
    """Return the answer at which a descent from these modes ends, or None if it does not fit in memory."""
    greedy = Greedy(problem)
    picks, scores = descend(greedy, np.array([greedy.indices(modes)]))
    return _incumbent(greedy, picks[0]) if scores[0, 0] == 0 else None


def _incumbent(greedy: Greedy, picks: Array) -> Incumbent:
    chosen = tuple(picks.tolist())
    return Incumbent(greedy.picked(chosen), greedy.timed_period(chosen))


def _fastest(problem: Problem) -> Picks:
    return tuple(min(range(len(c.modes)), key=lambda i: c.modes[i].ticks) for c in problem.tasks)


def _smallest(problem: Problem) -> Picks:
    return tuple(min(range(len(c.modes)), key=lambda i: _peak(c.modes[i])) for c in problem.tasks)


def _at_random(rng: random.Random, problem: Problem) -> Picks:
    return tuple(rng.randrange(len(c.modes)) for c in problem.tasks)


def _peak(mode: Mode) -> int:
    return mode.resident_units + mode.transient_units
