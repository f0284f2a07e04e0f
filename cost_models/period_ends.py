"""The rule by which a period of generation ends, and which sequences it delivers.

A period waits for the sequences that it requires, and until `count` sequences have ended:

| generation | required | `count` |
|---|---|---|
| synchronous (`AllSequences`) | all in flight | 0 |
| batches in flight (`WholeStep`) | those of its own batch | 0 |
| batches of multi-turn rollouts in flight (`WholeTurns`) | all in flight, up to their last turn of the period | 0 |
| overcommit (`FirstEnded`) | those that are due: started `max_deferral` periods ago or earlier | those of a batch |

It delivers the required sequences and then, up to `count`, those that ended first; if fewer are in flight, all of them.
Of multi-turn rollouts it delivers those of its own batch.

The engine and the simulation (`planner.simulation.flight`) apply the rule after each decode round, to the sequences of
one replica. The cost model (`cost_models.steady_state`) knows in which round each sequence ends and applies the rule to
arrays with a row for each replica (`PeriodEnds`). Both call `has_ended` and `is_delivered`, except where the end of a
period is the largest of known rounds: batches in flight here, a synchronous generation in `cost_models.rounds`, and
multi-turn rollouts in `cost_models.rollout_cost` and `planner.simulation.simulated_rollouts`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Protocol, TypeAlias, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from meshwright.cost_models.rounds import Integers
from meshwright.profiles.errors import BadInput

Flags: TypeAlias = NDArray[np.bool_]


@overload
def has_ended(num_required: int, num_ended: int, num_unfinished: int, count: int) -> bool: ...
@overload
def has_ended(num_required: Integers, num_ended: Integers, num_unfinished: Integers, count: int) -> Flags: ...
def has_ended(
    num_required: int | Integers, num_ended: int | Integers, num_unfinished: int | Integers, count: int
) -> bool | Flags:
    """True if a period ends now, with `num_required` required and `num_unfinished` sequences that have not ended."""
    return (num_required == 0) & ((num_ended >= count) | (num_unfinished == 0))


def is_delivered(is_required: Flags, count: int) -> Flags:
    """Return which sequences a period delivers, given which are required; both [..., sequence], in the order in which
    the sequences ended."""
    num_others = count - is_required.sum(axis=-1, keepdims=True)
    delivered: Flags = is_required | ((~is_required).cumsum(axis=-1) <= num_others)
    return delivered


def last_due_period(period: int, max_deferral: int) -> int:
    """Return the period such that sequences whose first token was sampled in it or earlier are due in `period`."""
    return period - max_deferral


class Queued(Protocol):
    """A prompt or its sequence; `row` is its index in the prompt batch of `step`."""

    @property
    def step(self) -> int: ...
    @property
    def row(self) -> int: ...


class Started(Queued, Protocol):
    """A sequence with at least one sampled token."""

    @property
    def first_period(self) -> int:
        """The period in which its first token was sampled."""
        ...


E = TypeVar("E", bound=Started)
E_co = TypeVar("E_co", bound=Started, covariant=True)


class InFlight(Protocol[E_co]):
    """The sequences in flight on one replica, as far as the rule needs them."""

    period: int
    """The current period."""
    num_unfinished: Counter[int]
    """Number of admitted sequences that have not ended, by step."""
    num_live: Counter[int]
    """Number of started sequences that have not ended, by the period in which they started."""
    num_held: int
    """Number of unfinished sequences that sample nothing more in the current period."""

    @property
    def ended(self) -> Sequence[E_co]:
        """Sequences that have ended and are not delivered, in the order in which they ended."""
        ...


@dataclass(frozen=True)
class AllSequences:
    """The rule of synchronous generation: the period ends when all sequences have, and delivers all of them."""

    def __call__(self, flight: InFlight[E]) -> Sequence[E] | None:
        return _delivered(flight, flight.num_unfinished.total(), (True for _ in flight.ended))


@dataclass(frozen=True)
class WholeStep:
    """The rule for batches in flight: the period ends when all sequences of batch `step` have, and delivers them."""

    step: int

    def __call__(self, flight: InFlight[E]) -> Sequence[E] | None:
        return _delivered(
            flight, flight.num_unfinished[self.step], (sequence.step == self.step for sequence in flight.ended)
        )


@dataclass(frozen=True)
class WholeTurns:
    """The rule for multi-turn rollouts with batches in flight: rollouts of up to `num_turns` turns run to a turn that
    depends on how many periods are left until their batch is delivered. The period ends when every rollout in flight
    has ended or has reached that turn, and delivers those of batch `step`.

    How fast tools answer decides how many decode rounds a period takes, but not which turn is sampled in which period:
    with B batches in flight and T turns, turns ceil(T (j - 1) / B) + 1 to ceil(T j / B) are sampled in the j-th of the
    B periods that a batch may take. So the version of every token follows from its turn.
    """

    step: int
    num_batches: int
    num_turns: int

    def __call__(self, flight: InFlight[E]) -> Sequence[E] | None:
        return _delivered(
            flight,
            flight.num_unfinished.total() - flight.num_held,
            (sequence.step == self.step for sequence in flight.ended),
        )

    def last_turn(self, step: int) -> int:
        """Return the turn to which rollouts of batch `step` run in this period; turns are numbered from 1."""
        return last_turn(self.num_turns, self.num_batches, step - self.step)


def last_turn(num_turns: int, num_batches: int, periods_left: int) -> int:
    """Return the turn to which rollouts of up to `num_turns` turns run in the period that has `periods_left` periods
    between it and the end of the one that delivers them, with `num_batches` batches in flight."""
    return -(-num_turns * (num_batches - periods_left) // num_batches)


@dataclass(frozen=True)
class FirstEnded:
    """The rule for overcommit: the period delivers `count` sequences, those that are due and then the first to end.

    A sequence is due `max_deferral` periods after the one that sampled its first token, and the period does not end
    before every due sequence has. If fewer than `count` sequences are in flight, all of them are delivered.
    """

    count: int
    max_deferral: int

    def __call__(self, flight: InFlight[E]) -> Sequence[E] | None:
        """Return the sequences to deliver, or None. Raises BadInput if more are due than are delivered."""
        last_due = last_due_period(flight.period, self.max_deferral)
        num_due = sum(number for period, number in flight.num_live.items() if period <= last_due)
        due = (sequence.first_period <= last_due for sequence in flight.ended)
        delivered = _delivered(flight, num_due, due, self.count)
        if delivered and len(delivered) > self.count:
            raise BadInput(
                f"overcommit: {len(delivered)} sequences are due in one period that delivers {self.count}; "
                "overcommit at most as many prompts as the batch has."
            )
        return delivered


DeliveryRule: TypeAlias = AllSequences | WholeStep | WholeTurns | FirstEnded
"""The rule that returns the ended sequences to deliver, or None while the period continues."""


def _delivered(
    flight: InFlight[E], num_required: int, is_required: Iterable[bool], count: int = 0
) -> Sequence[E] | None:
    """Return the sequences to deliver, or None if the period continues; `num_required` required ones have not ended."""
    if not has_ended(num_required, len(flight.ended), flight.num_unfinished.total(), count):
        return None
    return tuple(compress(flight.ended, is_delivered(np.fromiter(is_required, dtype=np.bool_), count)))


class PeriodEnds:
    """The periods of replicas with equally many sequences; each period delivers `num_rows` of them per replica.

    The rule is `WholeStep` without `max_deferral`, and `FirstEnded` with it. A period takes at least `min_rounds` while
    tokens are left to sample.
    """

    def __init__(self, num_replicas: int, num_rows: int, max_deferral: int | None, *, min_rounds: int = 0) -> None:
        self._num_rows, self._max_deferral, self._min_rounds = num_rows, max_deferral, min_rounds
        self._bounds = [np.zeros(num_replicas, dtype=np.int64)]
        self._start = self._end = np.zeros((num_replicas, 0), dtype=np.int64)

    @property
    def bounds(self) -> Integers:
        """The rounds at which the periods begin and end, [replica, 1 + periods]."""
        return np.stack(self._bounds, axis=1)

    def add(self, start: Integers, end: Integers) -> None:
        """Add admitted sequences in order of arrival, with their first and end rounds: [replica, sequence]."""
        self._start, self._end = (np.concatenate(both, axis=1) for both in ((self._start, start), (self._end, end)))

    def end_period(self) -> Integers:
        """End the current period and deliver its sequences; return the rounds in which it ends, [replica]."""
        ended = self._whole_step() if self._max_deferral is None else self._first_ended(self._max_deferral)
        begin = self._bounds[-1]
        if self._min_rounds:
            ended = np.maximum(ended, np.minimum(begin + self._min_rounds, self._end.max(axis=1, initial=0)))
        self._bounds.append(np.maximum(begin, ended))
        return self._bounds[-1]

    def _whole_step(self) -> Integers:
        """Deliver the batch that arrived first; return the rounds in which its last sequences end."""
        ended: Integers = self._end[:, : self._num_rows].max(axis=1)
        self._start, self._end = self._start[:, self._num_rows :], self._end[:, self._num_rows :]
        return ended

    def _first_ended(self, max_deferral: int) -> Integers:
        """Deliver the sequences that are due and then the first to end; return the rounds in which the periods end."""
        num_replicas, num_sequences = self._end.shape
        last_due, num_ended = last_due_period(len(self._bounds) - 1, max_deferral), np.arange(1, num_sequences + 1)
        order = self._end.argsort(axis=1, kind="stable") + np.arange(num_replicas)[:, None] * num_sequences
        start, end = self._start.take(order), self._end.take(order)
        due = start < (self._bounds[last_due + 1][:, None] if last_due >= 0 else 0)
        num_due = due.sum(axis=1, keepdims=True) - due.cumsum(axis=1)
        first = has_ended(num_due, num_ended, num_sequences - num_ended, self._num_rows).argmax(axis=1)
        is_left = ~is_delivered(due, self._num_rows)
        self._start, self._end = (rounds[is_left].reshape(num_replicas, -1) for rounds in (start, end))
        ended: Integers = end[np.arange(num_replicas), first]
        return ended
