"""Finds good answers quickly by coordinate descent, one task after the other, and keeps the best one (the incumbent).

A choice (`Picks`) has the index of a mode for each task, and is scored by its greedy schedule. The answer is a start
and an upper bound; no proof depends on its quality.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations

from meshwright.planner.solver.greedy_schedule import Greedy, Neighbours, Picks, Score
from meshwright.planner.solver.lower_bounds import modes_within
from meshwright.planner.solver.problem import Mode, Problem
from meshwright.planner.solver.result import Answer, Limits, Progress, Result

_SWEEPS = 20
"""Limit on sweeps over all tasks; descents have always ended long before it."""


def descend(greedy: Greedy, picks: Picks, score: Score) -> tuple[Picks, Score]:
    """Return a choice that no change of a single task improves, with its score."""
    num_unchanged, max_changes = 0, len(greedy.modes) * _SWEEPS
    for number in range(max_changes):
        task = number % len(greedy.modes)
        before, choices = score, range(len(greedy.modes[task]))
        picks, score = greedy.best_change(picks, score, (task,), [choices])
        num_unchanged = num_unchanged + 1 if score == before else 1
        if num_unchanged == len(greedy.modes):
            break
    return picks, score


def descend_in_pairs(
    greedy: Greedy, picks: Picks, score: Score, neighbours: Neighbours, limits: Limits
) -> tuple[Picks, Score]:
    """Return a choice that no change of two tasks to modes in `neighbours` improves.

    Changes that improve it are followed by a descent.
    Raises OutOfTimeError if the limits leave no time.
    """
    pairs = list(combinations(range(len(neighbours)), 2))
    for _ in range(_SWEEPS):
        before = score
        for one, other in pairs:
            limits.require_time()
            picks, score = greedy.best_change(picks, score, (one, other), [neighbours[one], neighbours[other]])
        if score == before:
            break
        picks, score = descend(greedy, picks, score)
    return picks, score


_RANDOM_STARTS = 16
"""Number of descents from random choices, after those from the fastest and the smallest modes."""

_KICKS, _NUM_CHANGED = 24, 2
"""Perturbation stops after this many kicks in a row without a better choice; each changes this many tasks."""


@dataclass
class Incumbent:
    """The best answer so far to one problem.

    It stores modes rather than their indices, which change as modes are dropped.
    """

    problem: Problem
    progress: Progress
    limits: Limits = field(default_factory=Limits)
    bound: int = 0
    makespan: int | None = None
    modes: tuple[Mode, ...] = ()
    starts: dict[str, int] = field(default_factory=dict)

    @property
    def target(self) -> int:
        """The largest makespan worth finding: within the limits, and better than the answer by more than the gap.

        There must be an answer.
        """
        assert self.makespan is not None
        return self.limits.target(self.makespan)

    def offer(self, modes: tuple[Mode, ...], makespan: int, starts: dict[str, int]) -> None:
        """Replace the answer if this one is better."""
        if self.makespan is None or makespan < self.makespan:
            self.makespan, self.modes, self.starts = makespan, modes, starts
            self.progress(makespan, self.bound)

    def descend_from(self, greedy: Greedy, picks: Picks, neighbours: Neighbours | None = None) -> None:
        """Offer the result of a descent from this choice, including pairs of changes within `neighbours` if given."""
        picks, score = descend(greedy, picks, greedy.score(picks))
        if neighbours is not None:
            picks, score = descend_in_pairs(greedy, picks, score, neighbours, self.limits)
        if score.excess_units == 0:
            self._offer_picks(greedy, picks)

    def _offer_picks(self, greedy: Greedy, picks: Picks) -> None:
        period = greedy.timed_period(picks)
        self.offer(greedy.picked(picks), period.makespan, dict(period.starts))

    def try_suggestion(self, greedy: Greedy, picks: Picks, neighbours: Neighbours | None) -> None:
        """Descend from a suggested choice; without `neighbours`, only if its greedy makespan beats the answer.

        With `neighbours`, the answer itself is improved by pairs of changes first.
        """
        if neighbours is not None and self._is_still_possible(greedy):
            self.descend_from(greedy, greedy.indices(self.modes), neighbours)
        if neighbours is not None or self.makespan is None or greedy.score(picks).makespan < self.makespan:
            self.descend_from(greedy, picks, neighbours)

    def _is_still_possible(self, greedy: Greedy) -> bool:
        """True if no mode of the answer has been dropped from the problem."""
        return all(mode in left for mode, left in zip(self.modes, greedy.modes, strict=False))

    def start(self, problem: Problem, limits: Limits) -> None:
        """Descend from the fastest and the smallest modes and, if no makespan is required, from random ones.

        After each improvement only modes that can still win are kept; the descents end when some task has none.
        Raises OutOfTimeError once there is an answer and no time is left.
        """
        rng, greedy = random.Random(limits.seed), Greedy(problem)
        random_starts = [_at_random(rng)] * (_RANDOM_STARTS if limits.max_makespan is None else 0)
        for start in (_fastest, _smallest, *random_starts):
            makespan = self.makespan
            if makespan is not None:
                limits.require_time()
            self.descend_from(greedy, start(problem))
            if self.makespan is not None and self.makespan != makespan:
                problem = modes_within(problem, limits.target(self.makespan))
                if any(not task.modes for task in problem.tasks):
                    return
                greedy = Greedy(problem)

    def kick(self, problem: Problem) -> bool:
        """Perturb two tasks of a choice at random and descend, again and again; True if that improves the answer.

        This is iterated local search (Lourenço et al., 2003). Raises OutOfTimeError if the limits leave no time.
        """
        greedy, rng, makespan = Greedy(problem), random.Random(self.limits.seed), self.makespan
        picks = _fastest(problem)
        picks, score = descend(greedy, picks, greedy.score(picks))
        kicks_left = _KICKS
        while kicks_left:
            self.limits.require_time()
            perturbed = list(picks)
            for task in rng.sample(range(len(picks)), min(_NUM_CHANGED, len(picks))):
                perturbed[task] = rng.randrange(len(greedy.modes[task]))
            descended = descend(greedy, tuple(perturbed), greedy.score(tuple(perturbed)))
            kicks_left -= 1
            if descended[1] < score:
                kicks_left = _KICKS if descended[1].makespan < score.makespan else kicks_left
                picks, score = descended
        if score.excess_units == 0:
            self._offer_picks(greedy, picks)
        return self.makespan != makespan

    def polish(self) -> None:
        """Give every task the mode with the least work that keeps the makespan."""
        greedy = Greedy(self.problem)
        picks = greedy.indices(self.modes)
        picks, score = descend(greedy, picks, greedy.score(picks))
        assert self.makespan is not None
        if score.excess_units == 0 and score.makespan <= self.makespan:
            period = greedy.timed_period(picks)
            if period.makespan <= self.makespan:
                self.makespan, self.starts = period.makespan, dict(period.starts)
                self.modes = greedy.picked(picks)

    def result(self) -> Result:
        """Return the answer with the proven bound."""
        assert self.makespan is not None
        picked = {c.name: c.modes.index(o) for c, o in zip(self.problem.tasks, self.modes, strict=True)}
        return Result(
            status="optimal" if self.bound == self.makespan else "feasible",
            answer=Answer(
                picked=picked,
                first_ranks={
                    c.name: o.resource.first_rank for c, o in zip(self.problem.tasks, self.modes, strict=True)
                },
                starts=self.starts,
            ),
            objective=self.makespan,
            bound=self.bound,
        )


def _fastest(problem: Problem) -> Picks:
    return tuple(min(range(len(c.modes)), key=lambda i: c.modes[i].ticks) for c in problem.tasks)


def _smallest(problem: Problem) -> Picks:
    return tuple(min(range(len(c.modes)), key=lambda i: _peak(c.modes[i])) for c in problem.tasks)


def _at_random(rng: random.Random) -> Callable[[Problem], Picks]:
    return lambda problem: tuple(rng.randrange(len(c.modes)) for c in problem.tasks)


def _peak(mode: Mode) -> int:
    return mode.resident_units + mode.transient_units
