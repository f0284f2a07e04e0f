"""Decode rounds of one period in the steady state of a generation whose sequences stay in flight between periods.

Batches in flight: slots are refilled from the next prompt batches, and a period ends when its own batch is complete.
Overcommit: more prompts than a batch are in flight, and a period ends when as many sequences as a batch has have ended,
among them all that are due; the first to end are delivered and the others continue (Yan et al., OPPO,
arXiv:2509.25762, inter-step overlap). Prompts arrive in one stream, so both differ only in when a period ends; the
rule is that of `cost_models.period_ends`, applied to arrays with one row for each replica.

A period waits for the longest response of its batch. A long one delays the batches behind it and a short one does not
make up for it, so several sampled batches are simulated, not one mean batch. A period lasts as long as that of the
slowest replica: the one with the longest response or, if sequences wait for slots, with a long response late in its
queue. Replicas that wait for each other continue for a minimum number of rounds (`planner.simulation.pacing`), which
makes periods more equal, and slower if a replica has few rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from meshwright.cost_models.period_ends import PeriodEnds
from meshwright.cost_models.rounds import (
    NUM_ORDERS,
    Batch,
    Integers,
    Prefill,
    Rounds,
    admit,
    batch_rounds,
    mean_windows,
    round_counts,
)
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.workload import Workload


def period_bounds(
    responses: Integers,
    *,
    num_slots: int,
    num_rows: int,
    in_flight: int,
    num_periods: int,
    max_deferral: int | None,
    min_rounds: int = 0,
) -> Integers:
    """Return the rounds at which the periods begin and end, [replica, 1 + num_periods], by the rule of `PeriodEnds`.

    `responses` [replica, sequence] arrive in order: `in_flight` of them at the start, `num_rows` in each later
    period.
    """
    num_replicas = len(responses)
    free = np.zeros((num_replicas, num_slots), dtype=np.int64)
    periods = PeriodEnds(num_replicas, num_rows, max_deferral, min_rounds=min_rounds)
    arriving, release = responses[:, :in_flight], np.zeros(num_replicas, dtype=np.int64)
    for period in range(num_periods):
        start = _admit(free, arriving, release)
        periods.add(start, start + arriving)
        release = periods.end_period()
        arriving = responses[:, in_flight + period * num_rows : in_flight + (period + 1) * num_rows]
    return periods.bounds


def _admit(free: Integers, responses: Integers, release: Integers) -> Integers:
    """Return the rounds in which responses start that arrive in round `release` [replica].

    `free` [replica, slot] holds the rounds from which the slots are free; it is updated.
    """
    starts, replicas = np.empty_like(responses), np.arange(len(responses))
    for index in range(responses.shape[1]):
        slots = free.argmin(axis=1)
        starts[:, index] = start = np.maximum(free[replicas, slots], release)
        free[replicas, slots] = start + responses[:, index]
    return starts


_NUM_SEQUENCES, _MIN_BATCHES, _MAX_BATCHES = 8192, 8, 128
"""Sequences that are simulated to find the slowest replica, and the bounds on the number of their batches."""

_MAX_SEQUENCES = 65536
"""Maximum number of sequences of a period that are simulated; the time of more replicas is extrapolated from them."""

_MIN_TOGETHER = 16
"""Number of replicas from which simulating them together, as arrays, is faster than one by one."""

_OVERCOMMIT_STEPS = 8
"""Overcommit is rounded down to eighths of a replica's rows."""


class Overlap(NamedTuple):
    """The overlap of one replica's batches in flight.

    `overcommit` counts sequences of the replica, `max_deferral` periods that a sequence may take beyond its first.
    """

    batches_in_flight: int = 1
    overcommit: int = 0
    max_deferral: int = 0

    def in_flight(self, num_rows: int) -> int:
        """Return the sequences, waiting ones included, of a replica with `num_rows` rows at the start of a period."""
        return self.batches_in_flight * num_rows + self.overcommit

    @classmethod
    def of(cls, schedule: Schedule, dp: int, num_rows: int, max_deferral: int) -> Overlap:
        """Return the overlap of one of `dp` replicas with `num_rows` rows of a batch, with rounded overcommit."""
        if not schedule.overcommit:
            return cls(schedule.batches_in_flight)
        overcommit = whole_steps(schedule.overcommit // dp, num_rows)
        return cls(overcommit=overcommit, max_deferral=max_deferral) if overcommit else cls()

    @property
    def deferral(self) -> int | None:
        """The periods beyond its first that a sequence may take with overcommit; None if a period delivers its own
        batch."""
        return self.max_deferral if self.overcommit else None

    @property
    def max_periods(self) -> int:
        """Periods that a sequence may take."""
        return self.batches_in_flight + (self.deferral or 0)


class _SampledBatches(NamedTuple):
    """Response lengths of several sampled batches, [batch, replica, row], and the batches of the first replica with
    their prompts. `total` is the expected number of response tokens of a replica's batch, which a period samples on
    average. The sampled lengths may add up to less or more: they are medians of strata, and a few strata represent a
    long tail, or a distribution over few lengths, only roughly."""

    responses: Integers
    batches: tuple[Batch, ...]
    total: float


class SteadyState:
    """Decode rounds of a period for one workload, cached."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._sampled_batches: dict[int, _SampledBatches] = {}
        self._replica_rounds: dict[tuple[int, int, Overlap], Rounds] = {}
        self._cache: dict[tuple[int, int, Overlap, bool], Rounds] = {}

    def rounds(self, num_rows: int, generation_slots: int, overlap: Overlap) -> Rounds:
        """Return the rounds of a period of a replica with `num_rows` rows a batch.

        A setting is never slower than a smaller one (fewer batches, less overcommit, shorter deferral), which it could
        imitate: the fewest rounds of all of them are returned. Batches in flight and steps of overcommit are simulated
        as powers of two; a setting between two of them is never faster than the larger one.
        """
        return self._rounds(num_rows, generation_slots, overlap, paced=True)

    def unpaced_rounds(self, num_rows: int, generation_slots: int, overlap: Overlap) -> float:
        """Return the rounds of a period without a minimum; in a run of several replicas they are the minimum of every
        period."""
        return self._rounds(num_rows, generation_slots, overlap, paced=False).num_rounds

    def _rounds(self, num_rows: int, generation_slots: int, overlap: Overlap, *, paced: bool) -> Rounds:
        key = num_rows, generation_slots, overlap, paced
        if key not in self._cache:
            fewest = self._fewest(num_rows, generation_slots, overlap, paced=paced)
            if larger := _larger_setting(overlap, num_rows):
                slower = self._rounds(num_rows, generation_slots, larger, paced=paced)
                fewest = max(fewest, slower, key=_num_rounds)
            self._cache[key] = fewest
        return self._cache[key]

    def _fewest(self, num_rows: int, generation_slots: int, overlap: Overlap, *, paced: bool) -> Rounds:
        """Return the fewest rounds of this setting and all smaller ones.

        The setting is not simulated if a smaller one leaves no slot empty, and otherwise only until the periods of some
        replica are as long as those of a smaller setting.
        """
        in_flight = overlap.in_flight(num_rows)
        num_slots = min(generation_slots, in_flight)
        if in_flight == num_rows:
            return self._synchronous(num_rows, num_slots)
        smaller = (
            self._rounds(num_rows, generation_slots, setting, paced=paced)
            for setting in _smaller_settings(overlap, num_rows)
        )
        fewest = min(smaller, key=_num_rounds)
        sampled = self._sampled(num_rows)
        if fewest.num_rounds <= sampled.total / num_slots:
            return fewest
        min_rounds = int(self.unpaced_rounds(num_rows, generation_slots, overlap)) if paced else 0
        slowest = self._slowest_rounds(num_rows, num_slots, overlap, fewest.num_rounds, min_rounds)
        if slowest >= fewest.num_rounds:
            return fewest
        candidate = _stretch(self._steady_rounds(num_rows, num_slots, overlap), slowest)
        return min(fewest, candidate, key=_num_rounds)

    def _steady_rounds(self, num_rows: int, num_slots: int, overlap: Overlap) -> Rounds:
        key = num_rows, num_slots, overlap
        if key not in self._replica_rounds:
            self._replica_rounds[key] = _steady_rounds(self._workload, self._sampled(num_rows), num_slots, overlap)
        return self._replica_rounds[key]

    def _synchronous(self, num_rows: int, num_slots: int) -> Rounds:
        """Return the rounds of periods in which all sequences start and end.

        If sequences wait for slots, their order of arrival decides which replica ends last.
        """
        rounds = batch_rounds(self._workload, num_rows, num_slots)
        if num_slots == num_rows:
            return rounds
        return _stretch(rounds, self._slowest_rounds(num_rows, num_slots, Overlap()))

    def _slowest_rounds(
        self, num_rows: int, num_slots: int, overlap: Overlap, stop_at: float = math.inf, min_rounds: int = 0
    ) -> float:
        num_replicas = _num_replicas(self._workload, num_rows)
        return _slowest_rounds(
            self._sampled(num_rows).responses, num_replicas, num_slots, overlap, stop_at=stop_at, min_rounds=min_rounds
        )

    def _sampled(self, num_rows: int) -> _SampledBatches:
        if num_rows not in self._sampled_batches:
            self._sampled_batches[num_rows] = _sampled_batches(self._workload, num_rows)
        return self._sampled_batches[num_rows]


def _num_replicas(workload: Workload, num_rows: int) -> int:
    """Return the number of replicas of `num_rows` rows that hold a batch."""
    return -(-workload.batch_size // num_rows)


def whole_steps(overcommit: int, num_rows: int) -> int:
    """Return the overcommit of a replica, rounded down to eighths of its rows (to rows if it has fewer than eight)."""
    step = _step(num_rows)
    return overcommit // step * step


def _step(num_rows: int) -> int:
    """Return the step of a replica's overcommit, in sequences: overcommit is rounded down to a multiple of it."""
    return max(1, num_rows // _OVERCOMMIT_STEPS)


def _smaller_settings(overlap: Overlap, num_rows: int) -> Iterator[Overlap]:
    """Yield the next smaller settings. Each lowers one number: the batches in flight or the steps of overcommit (a
    power of two to its half, any other number by one), or the deferral by one."""
    if overlap.batches_in_flight > 1:
        yield Overlap(batches_in_flight=_next_smaller(overlap.batches_in_flight))
    if overlap.overcommit:
        smaller = _next_smaller(overlap.overcommit // _step(num_rows)) * _step(num_rows)
        yield Overlap(overcommit=smaller, max_deferral=overlap.max_deferral) if smaller else Overlap()
    if overlap.overcommit and overlap.max_deferral > 1:
        yield Overlap(overcommit=overlap.overcommit, max_deferral=overlap.max_deferral - 1)


def _next_smaller(number: int) -> int:
    return number - 1 if number.bit_count() > 1 else number // 2


def _larger_setting(overlap: Overlap, num_rows: int) -> Overlap | None:
    """Return the setting at the next power of two; None if the setting is at one already, or if the next overcommits
    more than a batch."""
    if overlap.batches_in_flight.bit_count() > 1:
        return Overlap(batches_in_flight=1 << overlap.batches_in_flight.bit_length())
    steps = overlap.overcommit // _step(num_rows)
    larger = (1 << steps.bit_length()) * _step(num_rows)
    if steps.bit_count() < 2 or larger > num_rows:
        return None
    return Overlap(overcommit=larger, max_deferral=overlap.max_deferral)


def _num_rounds(rounds: Rounds) -> float:
    return rounds.num_rounds


def _steady_rounds(workload: Workload, sampled: _SampledBatches, num_slots: int, overlap: Overlap) -> Rounds:
    """Return the mean rounds of the first replica's periods after a warm-up, at least one period for each of its
    batches.

    The averaged periods start and end with different sequences in flight. Row-rounds, admissions and the number of
    rounds are therefore scaled to the work of one batch.
    """
    _, batches, total = sampled
    num_rows = len(batches[0].responses)
    warm_up, num_periods = _num_simulated_periods(max(NUM_ORDERS, len(batches)), overlap)
    start, end, prompts, bounds = simulate_periods(batches, num_slots, num_periods, overlap)
    passes = [round_counts(start, end, prompts, *period) for period in pairwise(bounds[warm_up:])]
    count = len(passes)
    decoded = float(sum(period.row_rounds.sum() for period in passes)) / count
    first, refilled = (sum(rows) / count for rows in zip(*((p.num_first, p.num_refilled) for p in passes), strict=True))
    admission_factor = num_rows / (first + refilled)
    decode_factor = (total - num_rows) / decoded if decoded else 1.0
    num_rounds = sum(period.num_rounds for period in passes) / count * total / (decoded + first + refilled)
    return Rounds(
        num_rounds=max(num_rounds, total / num_slots),
        windows=tuple(window._replace(rounds=window.rounds * decode_factor) for window in mean_windows(passes)),
        first=_prefill(
            workload,
            sum(period.num_first > 0 for period in passes) / count * admission_factor,
            first * admission_factor,
        ),
        refills=_prefill(
            workload,
            sum(period.num_refills for period in passes) / count * admission_factor,
            refilled * admission_factor,
        ),
    )


def sampled_responses(workload: Workload, num_rows: int) -> Integers:
    """Return response lengths of several batches, [batch, replica, row]: strata of their distribution, shuffled
    with a fixed seed.

    Batches and replicas differ from each other as in a random sample. Of very many replicas only some are simulated.
    """
    num_replicas = min(_num_replicas(workload, num_rows), max(1, _MAX_SEQUENCES // num_rows))
    batch_size = num_replicas * num_rows
    num_batches = min(max(-(-_NUM_SEQUENCES // batch_size), _MIN_BATCHES), _MAX_BATCHES)
    responses = workload.response_lengths.stratified_sample(num_batches * batch_size)
    shuffled: Integers = np.random.default_rng(0).permutation(responses).reshape(num_batches, num_replicas, num_rows)
    return shuffled


def _sampled_batches(workload: Workload, num_rows: int) -> _SampledBatches:
    """Return the sampled batches, each with the prompts in another order; a single one if all rows are equal."""
    sampled, total = sampled_responses(workload, num_rows), num_rows * workload.response_lengths.mean
    prompts, orders = workload.prompt_lengths.stratified_sample(num_rows), np.random.default_rng(1)
    batches = tuple(Batch(responses, orders.permutation(prompts)) for responses in sampled[:, 0])
    all_equal = np.ptp(sampled[:, 0]) == np.ptp(prompts) == 0
    return _SampledBatches(sampled, batches[:1] if all_equal else batches, total)


def _slowest_rounds(
    responses: Integers,
    num_replicas: int,
    num_slots: int,
    overlap: Overlap,
    *,
    stop_at: float = math.inf,
    min_rounds: int = 0,
) -> float:
    """Return the mean rounds of the slowest of `num_replicas` replicas; 0 for one replica or equal responses.

    Simulating replicas one by one stops once the mean reaches `stop_at`.

    If fewer replicas are simulated, they are a sample of all: of N periods, x_1 <= ... <= x_N, the longest of R others
    is expected to take sum_i x_i ((i/N)^R - ((i-1)/N)^R) rounds (David and Nagaraja, Order Statistics, section 2.1, at
    the empirical distribution).
    """
    if num_replicas == 1 or np.ptp(responses) == 0:
        return 0.0
    if num_replicas < _MIN_TOGETHER:
        return _slowest_in_sequence(responses, num_slots, overlap, stop_at, min_rounds)
    rounds = np.diff(_simulate_together(responses, num_slots, overlap, min_rounds))
    if num_replicas == responses.shape[1]:
        return float(rounds.max(axis=0).mean())
    reached = np.linspace(0, 1, rounds.size + 1) ** num_replicas
    return float(np.sort(rounds, axis=None) @ np.diff(reached))


def _slowest_in_sequence(
    responses: Integers, num_slots: int, overlap: Overlap, stop_at: float, min_rounds: int
) -> float:
    """Simulate the replicas in order of their longest responses, longest first, until the mean reaches `stop_at`."""
    warm_up, num_periods = _num_simulated_periods(len(responses), overlap)
    slowest, mean = np.zeros(num_periods - warm_up, dtype=np.int64), 0.0
    for replica in np.argsort(-responses.max(axis=2).sum(axis=0), kind="stable").tolist():
        batches = tuple(Batch(rows, rows) for rows in responses[:, replica])
        bounds = simulate_periods(batches, num_slots, num_periods, overlap, min_rounds=min_rounds).bounds[warm_up:]
        slowest = np.maximum(slowest, np.diff(bounds))
        mean = float(slowest.mean())
        if mean >= stop_at:
            break
    return mean


def _simulate_together(responses: Integers, num_slots: int, overlap: Overlap, min_rounds: int) -> Integers:
    """Return the rounds at which the periods of each replica end, [replica, period], after a warm-up."""
    num_batches, num_replicas, num_rows = responses.shape
    warm_up, num_periods = _num_simulated_periods(num_batches, overlap)
    in_flight = overlap.in_flight(num_rows)
    repeats = -(-(in_flight // num_rows + 1 + num_periods) // num_batches)
    return period_bounds(
        np.tile(responses.swapaxes(0, 1).reshape(num_replicas, -1), repeats),
        num_slots=num_slots,
        num_rows=num_rows,
        in_flight=in_flight,
        num_periods=num_periods,
        max_deferral=overlap.deferral,
        min_rounds=min_rounds,
    )[:, warm_up:]


def _num_simulated_periods(num_batches: int, overlap: Overlap) -> tuple[int, int]:
    """Return the number of warm-up periods and of all periods.

    Those after the warm-up are at least one for each batch, and a multiple of the periods that a sequence may take.
    """
    warm_up = 2 * overlap.max_periods
    return warm_up, warm_up + -(-num_batches // overlap.max_periods) * overlap.max_periods


def _stretch(rounds: Rounds, num_rounds: float) -> Rounds:
    """Return the same work in more rounds, each with fewer sequences."""
    factor = num_rounds / rounds.num_rounds
    if factor <= 1:
        return rounds
    windows = tuple(w._replace(rounds=w.rounds * factor, live=w.live / factor) for w in rounds.windows)
    return Rounds(num_rounds=num_rounds, windows=windows, first=rounds.first, refills=rounds.refills)


def _prefill(workload: Workload, calls: float, rows: float) -> Prefill:
    """Return the prefill of `rows` prompts of a period, admitted in `calls` rounds."""
    if not calls:
        return Prefill(0, 0, 0)
    return Prefill(calls, rows / calls, workload.prompt_lengths.mean)


class SimulatedPeriods(NamedTuple):
    """The rounds in which each sequence starts and ends, its prompt tokens, and the rounds at which the periods end."""

    start: Integers
    end: Integers
    prompts: Integers
    bounds: list[int]


def simulate_periods(
    batches: tuple[Batch, ...], num_slots: int, num_periods: int, overlap: Overlap, *, min_rounds: int = 0
) -> SimulatedPeriods:
    """Simulate the first periods of a generation.

    The first period starts with all prompts that may be in flight; each later one queues one batch of new prompts.
    """
    num_rows = len(batches[0].responses)
    in_flight = overlap.in_flight(num_rows)
    repeats = -(-(in_flight // num_rows + 1 + num_periods) // len(batches))
    responses, prompts = (np.concatenate(lengths * repeats) for lengths in zip(*batches, strict=True))
    free, num_admitted = [0] * num_slots, in_flight
    periods = PeriodEnds(1, num_rows, overlap.deferral, min_rounds=min_rounds)
    starts = [admit(free, responses[:num_admitted], 0)]
    for _ in range(num_periods):
        last_starts = starts[-1]
        periods.add(last_starts[None], (last_starts + responses[num_admitted - len(last_starts) : num_admitted])[None])
        starts.append(admit(free, responses[num_admitted : num_admitted + num_rows], int(periods.end_period()[0])))
        num_admitted += num_rows
    start = np.concatenate(starts)
    return SimulatedPeriods(start, start + responses[:num_admitted], prompts[:num_admitted], periods.bounds[0].tolist())
