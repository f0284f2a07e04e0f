"""What a search may use, and what it answers. No solver is known here."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Self, TypeAlias

from meshwright.planner.solver.problem import Option, Problem

Progress: TypeAlias = Callable[[int | None, int], None]
"""Called with the makespan of the best answer, None before there is one, and with the bound, in ticks, when one of them
has become better."""

_KEPT = 0.99
"""The part of the gap that the search uses; the rest is for seconds that are not whole ticks."""

_SPARE = 1e-5
"""Of the seconds of a plan that is known: what its tasks lose when they are rounded to ticks."""

_MANY_RANKS, _GAP, _GAP_OF_MANY = 1024, 0.01, 0.03
"""The gap at which a search for a plan ends where none is asked: of up to so many ranks, and of more."""


class OutOfTimeError(Exception):
    """The time that was given is over, or it was asked to stop."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the search may use. The same limits give the same answer on every machine.

    The search ends when (makespan - bound) / makespan is at most `gap`; 0 asks for the best answer and its proof. A
    search for a plan takes the usual gap where none is given (`on`), the solver alone then takes 0. It may end without
    an answer when none takes at most `most` ticks, and with what it has when `deadline` comes, in seconds of
    `time.monotonic`, or `stop` is set: then machines differ.

    More workers than one take turns to stay deterministic, which is slower on every problem tried so far.
    """

    seed: int = 0
    num_workers: int = 1
    max_deterministic_time: float = 60.0
    gap: float | None = None
    most: int | None = None
    deadline: float | None = None
    stop: threading.Event | None = None

    @classmethod
    def within(cls, seconds: float, *, gap: float | None = None, began: float | None = None) -> Self:
        """So many seconds from `began` on, of `time.monotonic`, by default from now."""
        start = time.monotonic() if began is None else began
        return cls(max_deterministic_time=seconds, gap=gap, deadline=start + seconds)

    def on(self, num_ranks: int) -> Self:
        """The same with the gap that is usual on so many ranks where none is given."""
        usual = _GAP if num_ranks <= _MANY_RANKS else _GAP_OF_MANY
        return self if self.gap is not None else replace(self, gap=usual)

    @property
    def tolerance(self) -> float:
        """The gap, 0 where none is given."""
        return self.gap or 0.0

    @property
    def seconds_left(self) -> float:
        """Until the deadline, infinite without one; none once it is asked to stop."""
        if self.stop is not None and self.stop.is_set():
            return 0.0
        return math.inf if self.deadline is None else self.deadline - time.monotonic()

    def require_time(self) -> None:
        """Raises OutOfTimeError where none is left."""
        if self.seconds_left <= 0:
            raise OutOfTimeError

    def target(self, makespan: int) -> int:
        """The largest makespan worth finding once this is known: `most`, then what is shorter by more than the gap."""
        if self.most is not None and makespan > self.most:
            return self.most
        return self.shorter(makespan)

    def shorter(self, makespan: int) -> int:
        """The largest makespan that is shorter than this one by more than the gap."""
        return math.ceil(makespan * (1 - _KEPT * self.tolerance)) - 1

    def shorter_seconds(self, seconds: float) -> float:
        """Seconds than which a plan that takes so many is longer by the gap."""
        return seconds * (1 - _KEPT * self.tolerance)

    def as_short_seconds(self, seconds: float) -> float:
        """Seconds than which a plan that takes so many is shorter by the gap; what tasks lose when they are rounded to
        ticks is spare."""
        return seconds * (1 + _SPARE) / (1 - self.tolerance)

    def as_short(self, makespan: int) -> int:
        """The largest makespan that this one is not shorter than by more than the gap."""
        return math.floor(makespan / (1 - _KEPT * self.tolerance))


@dataclass
class Effort:
    """What a search has asked of CP-SAT so far, in numbers that no clock moves."""

    num_models: int = 0
    deterministic_time: float = 0.0

    def add(self, deterministic_time: float) -> None:
        """One more model."""
        self.num_models += 1
        self.deterministic_time += deterministic_time


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The index of an option and the first of its ranks per call, and the tick at which each task starts."""

    picked: Mapping[str, int]
    first_ranks: Mapping[str, int]
    starts: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Result:
    """`out_of_limit` means that the limit passed before any answer was found, and `beaten` that every answer takes at
    least `bound`, which is too long; `objective` is then None."""

    status: Literal["optimal", "feasible", "infeasible", "out_of_limit", "beaten"]
    answer: Answer | None
    objective: int | None
    bound: int

    @classmethod
    def beaten(cls, target: int) -> Self:
        """No answer is within the target."""
        return cls(status="beaten", answer=None, objective=None, bound=target + 1)


def picked_options(problem: Problem, answer: Answer) -> dict[str, Option]:
    """The options that an answer picked, on the ranks that it gave them."""
    return {c.name: c.options[answer.picked[c.name]].at(answer.first_ranks[c.name]) for c in problem.calls}
