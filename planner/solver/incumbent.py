"""The best answer so far, and the descents that improve it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from meshwright.planner.solver.bounds import within
from meshwright.planner.solver.descent import descend, descend_in_pairs
from meshwright.planner.solver.greedy import Greedy, Near, Picks
from meshwright.planner.solver.problem import Option, Problem
from meshwright.planner.solver.result import Answer, Limits, Progress, Result

_RANDOM_STARTS = 16
"""Descents from choices at random, behind those from the fastest and the smallest options."""

_KICKS, _KICKED = 24, 2
"""So many kicks in a row without a better choice are the last, each of so many calls."""


@dataclass
class Incumbent:
    """The best answer so far to one problem; options are kept, since their indices change as others are dropped."""

    problem: Problem
    progress: Progress
    limits: Limits = field(default_factory=Limits)
    bound: int = 0
    makespan: int | None = None
    options: tuple[Option, ...] = ()
    starts: dict[str, int] = field(default_factory=dict)

    @property
    def target(self) -> int:
        """The largest makespan that is asked for, and better than the answer, which there is, by more than the gap."""
        assert self.makespan is not None
        return self.limits.target(self.makespan)

    def offer(self, options: tuple[Option, ...], makespan: int, starts: dict[str, int]) -> None:
        """Takes the answer if it is better."""
        if self.makespan is None or makespan < self.makespan:
            self.makespan, self.options, self.starts = makespan, options, starts
            self.progress(makespan, self.bound)

    def descend_from(self, greedy: Greedy, picks: Picks, near: Near | None = None) -> None:
        """Offers what a descent from this choice finds, in pairs within `near` when that is given."""
        picks, score = descend(greedy, picks, greedy.score(picks))
        if near is not None:
            picks, score = descend_in_pairs(greedy, picks, score, near, self.limits)
        if score.excess_blocks == 0:
            self._offer_picks(greedy, picks)

    def _offer_picks(self, greedy: Greedy, picks: Picks) -> None:
        turn = greedy.turn(picks)
        self.offer(greedy.picked(picks), turn.makespan, dict(turn.starts))

    def consider(self, greedy: Greedy, picks: Picks, near: Near | None) -> None:
        """Descends from a choice that comes with what is near it, from others only when they would be fast enough."""
        if near is not None and self._is_left(greedy):
            self.descend_from(greedy, greedy.indices(self.options), near)
        if near is not None or self.makespan is None or greedy.score(picks).makespan < self.makespan:
            self.descend_from(greedy, picks, near)

    def _is_left(self, greedy: Greedy) -> bool:
        """Whether the answer's own options are all among those that are left."""
        return all(option in left for option, left in zip(self.options, greedy.options, strict=False))

    def start(self, problem: Problem, limits: Limits) -> None:
        """Descents from the fastest options of a problem with fewer of them, from the smallest and, where no makespan
        is asked for, from some at random, each among those that can still win, until none can.

        Raises OutOfTimeError once there is an answer and no time.
        """
        rng, greedy = random.Random(limits.seed), Greedy(problem)
        at_random = [_any(rng)] * (_RANDOM_STARTS if limits.most is None else 0)
        for start in (_fastest, _smallest, *at_random):
            known = self.makespan
            if known is not None:
                limits.require_time()
            self.descend_from(greedy, start(problem))
            if self.makespan is not None and self.makespan != known:
                problem = within(problem, limits.target(self.makespan))
                if any(not call.options for call in problem.calls):
                    return
                greedy = Greedy(problem)

    def kick(self, problem: Problem) -> bool:
        """Offers what descents find from a choice of this problem of which two calls are changed at random, again and
        again from the best of them (Lourenço et al., Iterated local search, 2003); whether it is better than the
        answer.

        Raises OutOfTimeError where the limits leave no time.
        """
        greedy, rng, known = Greedy(problem), random.Random(self.limits.seed), self.makespan
        picks = _fastest(problem)
        picks, score = descend(greedy, picks, greedy.score(picks))
        left = _KICKS
        while left:
            self.limits.require_time()
            kicked = list(picks)
            for call in rng.sample(range(len(picks)), min(_KICKED, len(picks))):
                kicked[call] = rng.randrange(len(greedy.options[call]))
            found = descend(greedy, tuple(kicked), greedy.score(tuple(kicked)))
            left -= 1
            if found[1] < score:
                left = _KICKS if found[1].makespan < score.makespan else left
                picks, score = found
        if score.excess_blocks == 0:
            self._offer_picks(greedy, picks)
        return self.makespan != known

    def polish(self) -> None:
        """Gives every call that does not matter for the makespan its least work."""
        greedy = Greedy(self.problem)
        picks = greedy.indices(self.options)
        picks, score = descend(greedy, picks, greedy.score(picks))
        assert self.makespan is not None
        if score.excess_blocks == 0 and score.makespan <= self.makespan:
            turn = greedy.turn(picks)
            if turn.makespan <= self.makespan:
                self.makespan, self.starts = turn.makespan, dict(turn.starts)
                self.options = greedy.picked(picks)

    def result(self) -> Result:
        """The answer with what is proven of it."""
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


def _any(rng: random.Random) -> Callable[[Problem], Picks]:
    return lambda problem: tuple(rng.randrange(len(c.options)) for c in problem.calls)


def _peak(option: Option) -> int:
    return option.resident_blocks + option.transient_blocks
