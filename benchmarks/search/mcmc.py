"""ReaL's search on the problem that our search gets: a random walk over modes, one task at a time.

A step changes the mode of one task to another drawn uniformly; it is accepted with probability
min(1, exp(-beta * delta)), delta being the change of the cost (ReaL, arXiv:2406.14088, section 5.2). The cost is the
makespan, times a large factor where memory does not suffice. Costs are relative to the first one, so that one beta
serves every job; it grows, so that the walk settles.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass

from meshwright.planner.solver.greedy_schedule import Greedy, Picks
from meshwright.planner.solver.problem import Problem

_BETAS = (10.0, 10_000.0)
"""First and last beta: a step that is 1 % worse is taken nine times in ten at first, and never at the end."""

_OUT_OF_MEMORY = 10.0
"""Factor on the cost of what does not fit, per device's worth of blocks in excess, and once more."""


@dataclass(frozen=True, kw_only=True)
class Walk:
    """The best choice that fits, its makespan in ticks, and how many steps were tried; no choice when none fitted."""

    picks: Picks | None
    makespan: int | None
    num_steps: int


def walk(problem: Problem, *, seconds: float, seed: int) -> Walk:
    """A walk of so many seconds of wall time, from the fastest mode of every task."""
    greedy, draw = Greedy(problem), random.Random(seed)
    sizes = [len(task.modes) for task in problem.tasks]
    movable = [task for task, size in enumerate(sizes) if size > 1]
    picks = tuple(min(range(len(c.modes)), key=lambda i: c.modes[i].ticks) for c in problem.tasks)
    cost, makespan = _cost(problem, greedy, picks)
    unit = cost
    best, best_makespan = (picks, makespan) if makespan is not None else (None, None)
    began, num_steps = time.perf_counter(), 0
    while movable and (share := (time.perf_counter() - began) / seconds) < 1:
        num_steps += 1
        task = draw.choice(movable)
        mode = draw.randrange(sizes[task] - 1)
        other = (*picks[:task], mode + (mode >= picks[task]), *picks[task + 1 :])
        other_cost, makespan = _cost(problem, greedy, other)
        delta = (other_cost - cost) / unit
        if delta <= 0 or draw.random() < math.exp(-_beta(share) * delta):
            picks, cost = other, other_cost
            if makespan is not None and (best_makespan is None or makespan < best_makespan):
                best, best_makespan = picks, makespan
    return Walk(picks=best, makespan=best_makespan, num_steps=num_steps)


def _cost(problem: Problem, greedy: Greedy, picks: Picks) -> tuple[float, int | None]:
    """The cost, and the makespan of what fits."""
    score = greedy.score(picks)
    if not score.excess_units:
        return float(score.makespan), score.makespan
    return score.makespan * _OUT_OF_MEMORY * (1 + score.excess_units / problem.device_units), None


def _beta(share: float) -> float:
    first, last = _BETAS
    return float(first * (last / first) ** share)
