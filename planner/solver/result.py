"""The limits of a search and its result, independent of any solver."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Self, TypeAlias

from meshwright.planner.solver.problem import Mode, Problem

Progress: TypeAlias = Callable[[int | None, int], None]
"""Called with the makespan of the best answer (None before the first) and the lower bound, in ticks, when one of them
improves."""

_GAP_SHARE = 0.99
"""Share of the gap that the search uses; the rest covers seconds that are not whole ticks."""

_ROUNDING_MARGIN = 1e-5
"""Relative margin on the seconds of a known plan for the rounding of its activities to ticks."""

_MANY_RANKS, _GAP, _GAP_OF_MANY_RANKS = 1024, 0.01, 0.03
"""The default gap is the first one up to this many ranks, and the second one beyond."""


class OutOfTimeError(Exception):
    """The time limit has passed, or a stop was requested."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a search; the same limits without `deadline` and `stop` give the same answer on every machine.

    `max_deterministic_time` is in CP-SAT's unit, which counts operations and is roughly a second.

    The search ends when (makespan - bound) / makespan is at most `gap`; 0 requests the optimum and its proof. If `gap`
    is None, a search for a plan uses the default for its number of ranks (`with_default_gap`), and the solver alone
    uses 0. The search may end without an answer if none takes at most `max_makespan` ticks; a longer answer, of at most
    `max_acceptable_makespan`, ends it too if it is within the gap of the bound. It ends with what it has at `deadline`,
    in seconds of `time.monotonic`, or when `stop` is set; the answer then depends on the machine.

    CP-SAT interleaves several workers to stay deterministic, which was slower than one worker on every problem tried.
    """

    seed: int = 0
    num_workers: int = 1
    max_deterministic_time: float = 60.0
    gap: float | None = None
    max_makespan: int | None = None
    max_acceptable_makespan: int | None = None
    deadline: float | None = None
    stop: threading.Event | None = None

    @classmethod
    def for_seconds(cls, seconds: float, *, gap: float | None = None, began: float | None = None) -> Self:
        """Return limits of this many seconds from `began`, in seconds of `time.monotonic`; `began` defaults to now."""
        start = time.monotonic() if began is None else began
        return cls(max_deterministic_time=seconds, gap=gap, deadline=start + seconds)

    def with_default_gap(self, num_ranks: int) -> Self:
        """Return the limits with the default gap for this number of ranks if none is set."""
        usual = _GAP if num_ranks <= _MANY_RANKS else _GAP_OF_MANY_RANKS
        return self if self.gap is not None else replace(self, gap=usual)

    @property
    def tolerance(self) -> float:
        """The gap, or 0 if none is set."""
        return self.gap or 0.0

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline: infinite without one, 0 once a stop was requested."""
        if self.stop is not None and self.stop.is_set():
            return 0.0
        return math.inf if self.deadline is None else self.deadline - time.monotonic()

    def require_time(self) -> None:
        """Raises OutOfTimeError if no time is left."""
        if self.seconds_left <= 0:
            raise OutOfTimeError

    def target(self, makespan: int) -> int:
        """The largest makespan worth finding once this one is known: shorter by more than the gap, and at most
        `max_makespan`, which alone counts for a makespan that is not acceptable."""
        if self.max_makespan is None:
            return self.improving_makespan(makespan)
        if makespan > max(self.max_makespan, self.max_acceptable_makespan or 0):
            return self.max_makespan
        return min(self.max_makespan, self.improving_makespan(makespan))

    def improving_makespan(self, makespan: int) -> int:
        """The largest makespan that is shorter than this one by more than the gap."""
        return math.ceil(makespan * (1 - _GAP_SHARE * self.tolerance)) - 1

    def improving_seconds(self, seconds: float) -> float:
        """The period, in seconds, that is shorter than the given one by the gap."""
        return seconds * (1 - _GAP_SHARE * self.tolerance)

    def comparable_seconds(self, seconds: float) -> float:
        """The longest period, in seconds, that the given one undercuts by no more than the gap.

        It includes a margin for rounding to ticks.
        """
        return seconds * (1 + _ROUNDING_MARGIN) / (1 - self.tolerance)

    def comparable_makespan(self, makespan: int) -> int:
        """The largest makespan that the given one undercuts by no more than the gap."""
        return math.floor(makespan / (1 - _GAP_SHARE * self.tolerance))


@dataclass
class Effort:
    """Work done by CP-SAT, in numbers that do not depend on the machine."""

    num_models: int = 0
    deterministic_time: float = 0.0

    def add(self, deterministic_time: float) -> None:
        """Count one more model and its deterministic time."""
        self.num_models += 1
        self.deterministic_time += deterministic_time


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The picked mode's index and first rank for each task, and the start tick of each activity."""

    picked: Mapping[str, int]
    first_ranks: Mapping[str, int]
    starts: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a search. `objective` is None unless there is an answer.

    `out_of_limit` means that the limit was reached before any answer was found. `beaten` means that every answer takes
    at least `bound`, which is more than the largest makespan that was allowed.
    """

    status: Literal["optimal", "feasible", "infeasible", "out_of_limit", "beaten"]
    answer: Answer | None
    objective: int | None
    bound: int

    @classmethod
    def beaten(cls, target: int) -> Self:
        """Return the result that no answer meets the target."""
        return cls(status="beaten", answer=None, objective=None, bound=target + 1)


def picked_modes(problem: Problem, answer: Answer) -> dict[str, Mode]:
    """Return the modes that an answer picked, on the ranks that it assigned to them."""
    return {c.name: c.modes[answer.picked[c.name]].at(answer.first_ranks[c.name]) for c in problem.tasks}
