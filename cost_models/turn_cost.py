"""Generation whose sequences outlive a turn: the rounds of one turn in the steady state.

Batches in flight: slots are refilled from the next prompt batches, and a turn ends when its own batch is complete.
Overcommit: more prompts than a batch are in flight, and a turn ends when a batch's number of sequences has ended,
those that are due included; the first to end are delivered and the others go on (Yan et al., OPPO, arXiv:2509.25762,
inter-step overlap). Prompts arrive in one stream, so both differ only in when a turn ends.

A turn waits for the longest response of its own batch, and batches differ: a long one holds up those behind it, which
a short one cannot make good. So several drawn batches are played, and not the mean one again and again. Every replica
ends its turn by its own sequences, and the turn of all lasts as long as the slowest one's: the replica that draws the
longest response of a batch has had no more of a head start than its own turn before took, and where sequences wait for
slots, the one in which a long response comes late is the slowest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from meshwright.cost_models.rounds import (
    NUM_ORDERS,
    Batch,
    Integers,
    Prefill,
    Rounds,
    admit,
    batches_of,
    mean_windows,
    pass_of,
    rounds_of,
)
from meshwright.cost_models.turn_ends import TurnEnds, bounds_of
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.workload import Workload

_NUM_SEQUENCES, _FEWEST_TURNS, _MOST_TURNS = 8192, 8, 64
"""The slowest replica is looked for among about so many sequences, in a number of turns within these bounds."""

_MOST_SEQUENCES = 65536
"""Of a turn, that are played; what more replicas would take follows from those."""

_SIDE_BY_SIDE = 16
"""So many replicas are played faster side by side, as arrays, than one by one."""

_OVERCOMMIT_STEPS = 8
"""Overcommit counts in whole eighths of a replica's rows, rounded down."""


class Overlap(NamedTuple):
    """How one replica's generation of a step runs into that of the next ones; `overcommit` counts its own sequences,
    `max_deferral` the turns that a sequence may take beyond its first."""

    batches_in_flight: int = 1
    overcommit: int = 0
    max_deferral: int = 0

    def in_flight(self, num_rows: int) -> int:
        """Sequences, waiting ones included, that a replica of `num_rows` rows has at the start of a turn."""
        return self.batches_in_flight * num_rows + self.overcommit

    @classmethod
    def of(cls, schedule: Schedule, dp: int, num_rows: int, max_deferral: int) -> Overlap:
        """That of one of `dp` replicas, which has `num_rows` rows of a batch; its overcommit in whole steps."""
        if not schedule.overcommit:
            return cls(schedule.batches_in_flight)
        overcommit = whole_steps(schedule.overcommit // dp, num_rows)
        return cls(overcommit=overcommit, max_deferral=max_deferral) if overcommit else cls()

    @property
    def deferral(self) -> int | None:
        """The turns beyond its first that a sequence may take where the first to end are delivered; None where a turn
        delivers its own batch."""
        return self.max_deferral if self.overcommit else None

    @property
    def num_turns(self) -> int:
        """Turns that a sequence may take."""
        return self.batches_in_flight + (self.deferral or 0)


class _Dealt(NamedTuple):
    """Drawn responses of several batches, [batch, replica, row], those of the first replica with their prompts, and the
    response tokens that a replica's batch is counted with."""

    shares: Integers
    batches: tuple[Batch, ...]
    total: int


class Turns:
    """Rounds of a turn for one workload. Every answer is computed once."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._dealt: dict[int, _Dealt] = {}
        self._known: dict[tuple[int, int, Overlap], Rounds] = {}

    def rounds(self, num_rows: int, generation_slots: int, overlap: Overlap) -> Rounds:
        """The rounds of a turn of a replica with `num_rows` rows a batch; slots beyond those in flight hold nothing.

        A setting is never slower than a smaller one, which it could imitate: of its own rounds and those of smaller
        ones (fewer batches, less overcommit, shorter deferral) the fewest are answered. Batches and steps of overcommit
        are played as powers of two; what lies between two of those is never faster than the larger one.
        """
        key = num_rows, generation_slots, overlap
        if key not in self._known:
            found, larger = self._fewest(*key), _larger(overlap, num_rows)
            if larger:
                found = max(found, self.rounds(num_rows, generation_slots, larger), key=_num_rounds)
            self._known[key] = found
        return self._known[key]

    def _fewest(self, num_rows: int, generation_slots: int, overlap: Overlap) -> Rounds:
        """The fewest of its own and all smaller settings; it is not played where a smaller one leaves no slot empty,
        and no further than until some replica's turns are as long as those of a smaller one."""
        in_flight = overlap.in_flight(num_rows)
        num_slots = min(generation_slots, in_flight)
        if in_flight == num_rows:
            return self._synchronous(num_rows, num_slots)
        smaller = (self.rounds(num_rows, generation_slots, less) for less in _smaller(overlap, num_rows))
        fewest = min(smaller, key=_num_rounds)
        dealt = self._dealt_of(num_rows)
        if fewest.num_rounds <= dealt.total / num_slots:
            return fewest
        slowest = self._slowest_rounds(num_rows, num_slots, overlap, fewest.num_rounds)
        if slowest >= fewest.num_rounds:
            return fewest
        own = _stretched(_steady(self._workload, dealt, num_slots, overlap), slowest)
        return min(fewest, own, key=_num_rounds)

    def _synchronous(self, num_rows: int, num_slots: int) -> Rounds:
        """Of turns that are all that their sequences have: where some wait for slots, the order of their arrival
        decides which replica ends last."""
        rounds = rounds_of(self._workload, num_rows, num_slots)
        if num_slots == num_rows:
            return rounds
        return _stretched(rounds, self._slowest_rounds(num_rows, num_slots, Overlap()))

    def _slowest_rounds(self, num_rows: int, num_slots: int, overlap: Overlap, enough: float = math.inf) -> float:
        num_replicas = _num_replicas(self._workload, num_rows)
        return _slowest_rounds(self._dealt_of(num_rows).shares, num_replicas, num_slots, overlap, enough)

    def _dealt_of(self, num_rows: int) -> _Dealt:
        if num_rows not in self._dealt:
            self._dealt[num_rows] = _dealt(self._workload, num_rows)
        return self._dealt[num_rows]


def _num_replicas(workload: Workload, num_rows: int) -> int:
    """That hold a batch, if they have so many rows each."""
    return -(-workload.batch_size // num_rows)


def whole_steps(overcommit: int, num_rows: int) -> int:
    """The overcommit of a replica in whole steps, which are one row where it has few."""
    step = _step(num_rows)
    return overcommit // step * step


def _step(num_rows: int) -> int:
    return max(1, num_rows // _OVERCOMMIT_STEPS)


def _smaller(overlap: Overlap, num_rows: int) -> Iterator[Overlap]:
    """The settings below: half as much of what is a power of two, one less of what is not."""
    if overlap.batches_in_flight > 1:
        yield Overlap(batches_in_flight=_below(overlap.batches_in_flight))
    if overlap.overcommit:
        less = _below(overlap.overcommit // _step(num_rows)) * _step(num_rows)
        yield Overlap(overcommit=less, max_deferral=overlap.max_deferral) if less else Overlap()
    if overlap.overcommit and overlap.max_deferral > 1:
        yield Overlap(overcommit=overlap.overcommit, max_deferral=overlap.max_deferral - 1)


def _below(number: int) -> int:
    return number - 1 if number.bit_count() > 1 else number // 2


def _larger(overlap: Overlap, num_rows: int) -> Overlap | None:
    """The next power of two above what is none, unless it is an overcommit of more than a batch."""
    if overlap.batches_in_flight.bit_count() > 1:
        return Overlap(batches_in_flight=1 << overlap.batches_in_flight.bit_length())
    steps = overlap.overcommit // _step(num_rows)
    more = (1 << steps.bit_length()) * _step(num_rows)
    if steps.bit_count() < 2 or more > num_rows:
        return None
    return Overlap(overcommit=more, max_deferral=overlap.max_deferral)


def _num_rounds(rounds: Rounds) -> float:
    return rounds.num_rounds


def _steady(workload: Workload, dealt: _Dealt, num_slots: int, overlap: Overlap) -> Rounds:
    """The first replica's turns played after a warm-up, one for each of its batches or a few more, and averaged.

    The turns that are averaged start with some sequences under way and end with others. Row-rounds and admissions are
    scaled to those of one batch, so that a turn does one batch's work; their number of rounds with them.
    """
    _, batches, total = dealt
    num_rows = len(batches[0].responses)
    warm_up, num_turns = _played_turns(max(NUM_ORDERS, len(batches)), overlap)
    start, end, prompts, bounds = play(batches, num_slots, num_turns, overlap)
    passes = [pass_of(start, end, prompts, *turn) for turn in pairwise(bounds[warm_up:])]
    count = len(passes)
    decoded = float(sum(one.row_rounds.sum() for one in passes)) / count
    first, refilled = (sum(rows) / count for rows in zip(*((p.num_first, p.num_refilled) for p in passes), strict=True))
    admitting = num_rows / (first + refilled)
    decoding = (total - num_rows) / decoded if decoded else 1.0
    num_rounds = sum(one.num_rounds for one in passes) / count * total / (decoded + first + refilled)
    return Rounds(
        num_rounds=max(num_rounds, total / num_slots),
        windows=tuple(window._replace(rounds=window.rounds * decoding) for window in mean_windows(passes)),
        first=_prefill(workload, sum(one.num_first > 0 for one in passes) / count * admitting, first * admitting),
        refills=_prefill(workload, sum(one.num_refills for one in passes) / count * admitting, refilled * admitting),
    )


def shares_of(workload: Workload, num_rows: int) -> Integers:
    """Responses of several batches, [batch, replica, row]: equally likely parts of their distribution, dealt at random
    from a fixed seed. Batches and replicas differ as drawn ones do; of very many replicas some stand for all."""
    num_replicas = min(_num_replicas(workload, num_rows), max(1, _MOST_SEQUENCES // num_rows))
    batch_size = num_replicas * num_rows
    num_batches = min(max(-(-_NUM_SEQUENCES // batch_size), _FEWEST_TURNS), _MOST_TURNS)
    responses = workload.response_lengths.strata(num_batches * batch_size)
    dealt: Integers = np.random.default_rng(0).permutation(responses).reshape(num_batches, num_replicas, num_rows)
    return dealt


def _dealt(workload: Workload, num_rows: int) -> _Dealt:
    """Each batch has the prompts in another order; one batch stands for all where all rows are alike."""
    shares, total = shares_of(workload, num_rows), int(batches_of(workload, num_rows)[0].responses.sum())
    prompts, orders = workload.prompt_lengths.strata(num_rows), np.random.default_rng(1)
    batches = tuple(Batch(responses, orders.permutation(prompts)) for responses in shares[:, 0])
    alike = np.ptp(shares[:, 0]) == np.ptp(prompts) == 0
    return _Dealt(shares, batches[:1] if alike else batches, total)


def _slowest_rounds(
    shares: Integers, num_replicas: int, num_slots: int, overlap: Overlap, enough: float = math.inf
) -> float:
    """Rounds of the slowest of so many replicas' turns, on average over the turns; 0 for a replica that is alone, and
    for those whose responses are all alike. Of replicas that are played one by one no more are played than show that
    they are `enough`.

    Where fewer are played they are a sample of all: of N turns, x_1 <= ... <= x_N, the longest of R others is expected
    to take sum_i x_i ((i/N)^R - ((i-1)/N)^R) rounds (David and Nagaraja, Order Statistics, section 2.1, at the
    empirical distribution).
    """
    if num_replicas == 1 or np.ptp(shares) == 0:
        return 0.0
    if num_replicas < _SIDE_BY_SIDE:
        return _slowest_one_by_one(shares, num_slots, overlap, enough)
    rounds = np.diff(_side_by_side(shares, num_slots, overlap))
    if num_replicas == shares.shape[1]:
        return float(rounds.max(axis=0).mean())
    reached = np.linspace(0, 1, rounds.size + 1) ** num_replicas
    return float(np.sort(rounds, axis=None) @ np.diff(reached))


def _slowest_one_by_one(shares: Integers, num_slots: int, overlap: Overlap, enough: float) -> float:
    """Those with the longest responses first."""
    warm_up, num_turns = _played_turns(len(shares), overlap)
    slowest, mean = np.zeros(num_turns - warm_up, dtype=np.int64), 0.0
    for replica in np.argsort(-shares.max(axis=2).sum(axis=0), kind="stable").tolist():
        batches = tuple(Batch(rows, rows) for rows in shares[:, replica])
        bounds = play(batches, num_slots, num_turns, overlap).bounds[warm_up:]
        slowest = np.maximum(slowest, np.diff(bounds))
        mean = float(slowest.mean())
        if mean >= enough:
            break
    return mean


def _side_by_side(shares: Integers, num_slots: int, overlap: Overlap) -> Integers:
    """The rounds between which the turns of each replica lie, [replica, turn], after a warm-up."""
    num_batches, num_replicas, num_rows = shares.shape
    warm_up, num_turns = _played_turns(num_batches, overlap)
    in_flight = overlap.in_flight(num_rows)
    repeats = -(-(in_flight // num_rows + 1 + num_turns) // num_batches)
    return bounds_of(
        np.tile(shares.swapaxes(0, 1).reshape(num_replicas, -1), repeats),
        num_slots=num_slots,
        num_rows=num_rows,
        in_flight=in_flight,
        num_turns=num_turns,
        max_deferral=overlap.deferral,
    )[:, warm_up:]


def _played_turns(num_batches: int, overlap: Overlap) -> tuple[int, int]:
    """Those that warm up, and all: whole lives of sequences, until every batch has had a turn."""
    warm_up = 2 * overlap.num_turns
    return warm_up, warm_up + -(-num_batches // overlap.num_turns) * overlap.num_turns


def _stretched(rounds: Rounds, num_rounds: float) -> Rounds:
    """The same work in more rounds, each with fewer sequences."""
    factor = num_rounds / rounds.num_rounds
    if factor <= 1:
        return rounds
    windows = tuple(w._replace(rounds=w.rounds * factor, live=w.live / factor) for w in rounds.windows)
    return Rounds(num_rounds=num_rounds, windows=windows, first=rounds.first, refills=rounds.refills)


def _prefill(workload: Workload, calls: float, rows: float) -> Prefill:
    """`rows` prompts of a turn, admitted in `calls` rounds."""
    if not calls:
        return Prefill(0, 0, 0)
    return Prefill(calls, rows / calls, workload.prompt_lengths.mean)


class Played(NamedTuple):
    """Rounds in which each sequence starts and ends, its prompt, and the rounds between which the turns lie."""

    start: Integers
    end: Integers
    prompts: Integers
    bounds: list[int]


def play(batches: tuple[Batch, ...], num_slots: int, num_turns: int, overlap: Overlap) -> Played:
    """The first turns of a generation. The first one starts with all that may be in flight; each later one with a
    batch's number of new prompts behind those that wait."""
    num_rows = len(batches[0].responses)
    in_flight = overlap.in_flight(num_rows)
    repeats = -(-(in_flight // num_rows + 1 + num_turns) // len(batches))
    responses, prompts = (np.concatenate(lengths * repeats) for lengths in zip(*batches, strict=True))
    free, known, turns = [0] * num_slots, in_flight, TurnEnds(1, num_rows, overlap.deferral)
    starts = [admit(free, responses[:known], 0)]
    for _ in range(num_turns):
        new = starts[-1]
        turns.add(new[None], (new + responses[known - len(new) : known])[None])
        starts.append(admit(free, responses[known : known + num_rows], int(turns.next()[0])))
        known += num_rows
    start = np.concatenate(starts)
    return Played(start, start + responses[:known], prompts[:known], turns.bounds[0].tolist())
