"""Finds good answers quickly by coordinate descent, one call after the other, and keeps the best one (the incumbent).

A choice (`Picks`) has the index of an option for each call, and is scored by its greedy schedule. The answer is a start
and an upper bound; no proof depends on its quality.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations

from meshwright.planner.solver.greedy_schedule import Greedy, Neighbours, Picks, Score
from meshwright.planner.solver.lower_bounds import options_within
from meshwright.planner.solver.problem import Option, Problem
from meshwright.planner.solver.result import Answer, Limits, Progress, Result

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
    greedy: Greedy, picks: Picks, score: Score, neighbours: Neighbours, limits: Limits
) -> tuple[Picks, Score]:
    """Return a choice that no change of two calls to options in `neighbours` improves.

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
"""Number of descents from random choices, after those from the fastest and the smallest options."""

_KICKS, _NUM_CHANGED = 24, 2
"""Perturbation stops after this many kicks in a row without a better choice; each changes this many calls."""


@dataclass
class Incumbent:
    """The best answer so far to one problem.

    It stores options rather than their indices, which change as options are dropped.
    """

    problem: Problem
    progress: Progress
    limits: Limits = field(default_factory=Limits)
    bound: int = 0
    makespan: int | None = None
    options: tuple[Option, ...] = ()
    starts: dict[str, int] = field(default_factory=dict)

    @property
    def target(self) -> int:
        """The largest makespan worth finding: within the limits, and better than the answer by more than the gap.

        There must be an answer.
        """
        assert self.makespan is not None
        return self.limits.target(self.makespan)

    def offer(self, options: tuple[Option, ...], makespan: int, starts: dict[str, int]) -> None:
        """Replace the answer if this one is better."""
        if self.makespan is None or makespan < self.makespan:
            self.makespan, self.options, self.starts = makespan, options, starts
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
            self.descend_from(greedy, greedy.indices(self.options), neighbours)
        if neighbours is not None or self.makespan is None or greedy.score(picks).makespan < self.makespan:
            self.descend_from(greedy, picks, neighbours)

    def _is_still_possible(self, greedy: Greedy) -> bool:
        """True if no option of the answer has been dropped from the problem."""
        return all(option in left for option, left in zip(self.options, greedy.options, strict=False))

    def start(self, problem: Problem, limits: Limits) -> None:
        """Descend from the fastest and the smallest options and, if no makespan is required, from random ones.

        After each improvement only options that can still win are kept; the descents end when some call has none.
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
                problem = options_within(problem, limits.target(self.makespan))
                if any(not call.options for call in problem.calls):
                    return
                greedy = Greedy(problem)

    def kick(self, problem: Problem) -> bool:
        """Perturb two calls of a choice at random and descend, again and again; True if that improves the answer.

        This is iterated local search (Lourenço et al., 2003). Raises OutOfTimeError if the limits leave no time.
        """
        greedy, rng, makespan = Greedy(problem), random.Random(self.limits.seed), self.makespan
        picks = _fastest(problem)
        picks, score = descend(greedy, picks, greedy.score(picks))
        kicks_left = _KICKS
        while kicks_left:
            self.limits.require_time()
            perturbed = list(picks)
            for call in rng.sample(range(len(picks)), min(_NUM_CHANGED, len(picks))):
                perturbed[call] = rng.randrange(len(greedy.options[call]))
            descended = descend(greedy, tuple(perturbed), greedy.score(tuple(perturbed)))
            kicks_left -= 1
            if descended[1] < score:
                kicks_left = _KICKS if descended[1].makespan < score.makespan else kicks_left
                picks, score = descended
        if score.excess_units == 0:
            self._offer_picks(greedy, picks)
        return self.makespan != makespan

    def polish(self) -> None:
        """Give every call the option with the least work that keeps the makespan."""
        greedy = Greedy(self.problem)
        picks = greedy.indices(self.options)
        picks, score = descend(greedy, picks, greedy.score(picks))
        assert self.makespan is not None
        if score.excess_units == 0 and score.makespan <= self.makespan:
            period = greedy.timed_period(picks)
            if period.makespan <= self.makespan:
                self.makespan, self.starts = period.makespan, dict(period.starts)
                self.options = greedy.picked(picks)

    def result(self) -> Result:
        """Return the answer with the proven bound."""
        assert self.makespan is not None
        picked = {c.name: c.options.index(o) for c, o in zip(self.problem.calls, self.options, strict=True)}
        return Result(
            status="optimal" if self.bound == self.makespan else "feasible",
            answer=Answer(
                picked=picked,
                first_ranks={c.name: o.place.first_rank for c, o in zip(self.problem.calls, self.options, strict=True)},
                starts=self.starts,
            ),
            objective=self.makespan,
            bound=self.bound,
        )


def _fastest(problem: Problem) -> Picks:
    return tuple(min(range(len(c.options)), key=lambda i: c.options[i].ticks) for c in problem.calls)


def _smallest(problem: Problem) -> Picks:
    return tuple(min(range(len(c.options)), key=lambda i: _peak(c.options[i])) for c in problem.calls)


def _at_random(rng: random.Random) -> Callable[[Problem], Picks]:
    return lambda problem: tuple(rng.randrange(len(c.options)) for c in problem.calls)


def _peak(option: Option) -> int:
    return option.resident_units + option.transient_units
