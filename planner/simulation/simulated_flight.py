"""Simulated generation of one replica: when each sequence is admitted, ends and is delivered, the seconds of its
decode rounds and prefills, and the KV blocks that it holds.

The rules are those of `planner.simulation.flight`, which the runtime uses too; passes in which no sequence starts or
ends are combined. Seconds are interpolated on a grid, whose points are the cost model's seconds for small batches of
equal lengths. Sequences never wait for a KV block here, so they may hold more blocks than the plan has.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.cost_models.generation_cost import OUTSIDE_ROUNDS
from meshwright.cost_models.period_ends import DeliveryRule
from meshwright.cost_models.protocol import StageQuery
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.cost_queries import CostModelBuilder
from meshwright.planner.program.durations import HeldBlocks
from meshwright.planner.simulation.flight import Flight, SlotGroup
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.packing import BLOCK_TOKENS
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.workload import Workload

Numbers = NDArray[np.float64]

_NUM_RATIOS, _NUM_STEPS = 6, 24
"""Numbers of grid points of the lengths, geometrically and linearly spaced up to the longest sequence."""


@dataclass(frozen=True)
class Grid:
    """Seconds over rows and tokens, both ascending; linear between the points and constant beyond them."""

    rows: Numbers
    tokens: Numbers
    seconds: Numbers  # [rows, tokens]

    def __call__(self, rows: Numbers, tokens: Numbers) -> Numbers:
        row, across = _place(self.rows, rows)
        column, along = _place(self.tokens, tokens)
        low = self.seconds[row, column] * (1 - along) + self.seconds[row, column + 1] * along
        high = self.seconds[row + 1, column] * (1 - along) + self.seconds[row + 1, column + 1] * along
        interpolated: Numbers = low * (1 - across) + high * across
        return interpolated


def _place(points: Numbers, values: Numbers) -> tuple[NDArray[np.intp], Numbers]:
    """Return for each value the index of the point below it, and its relative position towards the next one."""
    below = np.minimum(np.maximum(np.searchsorted(points, values, side="right") - 1, 0), len(points) - 2)
    share = (values - points[below]) / (points[below + 1] - points[below])
    return below, np.minimum(np.maximum(share, 0.0), 1.0)  # np.clip takes several times as long for arrays this small


@dataclass(frozen=True, kw_only=True)
class RoundTimes:
    """Seconds on one replica: `prefill` by rows and tokens on an empty pipeline, and a decode round (`round_`) of all
    groups by live sequences and cached tokens."""

    prefill: Grid
    round_: Grid
    has_mixed_batches: bool = False
    """True if the prefill and the decode step of a round are one pass."""

    def refill(self, rows: Numbers, tokens: Numbers, decoding: NDArray[np.bool_], context: Numbers) -> Numbers:
        """Return the seconds that prefills of `rows` rows of `tokens` tokens add to their rounds.

        `decoding` says in which of these rounds other sequences decode, at a mean `context`. If both are one pass, the
        fixed seconds of a pass are subtracted there, since they are in the prefill and in the decode step. They are
        taken to be those of a decode step of one row, as in `Generation`.
        """
        seconds = self.prefill(rows, tokens)
        if self.has_mixed_batches:
            seconds = seconds - decoding * self.round_(np.ones_like(context), context)
        return seconds


def round_times(facts: Facts, query: StageQuery, remodel: CostModelBuilder) -> RoundTimes:
    """Return seconds by the cost model of `facts`, by length and rows, up to twice the slots of `query`.

    With drafts, `round_` is the seconds of a round divided by the tokens that a sequence samples in it: the simulation
    lets sequences grow by one token in each of more and shorter rounds.
    """
    slots = query.schedule.generation_slots
    rows = sorted({*(2**k for k in range(slots.bit_length())), slots, 2 * slots})
    longest = max(2, facts.workload.max_tokens)
    points = (*np.geomspace(1, longest, _NUM_RATIOS), *np.linspace(1, longest, _NUM_STEPS))
    lengths = sorted({round(n) for n in points})
    prefills, rounds = np.empty((len(rows), len(lengths))), np.empty((len(rows), len(lengths)))
    for i, num_rows in enumerate(rows):
        schedule = Schedule(generation_slots=num_rows, draft_tokens=query.schedule.draft_tokens)
        grid_query = replace(query, schedule=schedule, max_deferral=0)
        for j, length in enumerate(lengths):
            costs = (remodel(_with(facts, query, num_rows, length, n)).seconds(grid_query) for n in (1, 3))
            first, third = (cost.total - cost.amount(*OUTSIDE_ROUNDS) for cost in costs)
            prefills[i, j], rounds[i, j] = first, (third - first) / 2
    axes = np.array(rows, dtype=float), np.array(lengths, dtype=float)
    has_mixed_batches = remodel(facts).has_mixed_batches(query)
    return RoundTimes(prefill=Grid(*axes, prefills), round_=Grid(*axes, rounds), has_mixed_batches=has_mixed_batches)


def _with(facts: Facts, query: StageQuery, num_rows: int, prompt: int, response: int) -> Facts:
    """Return the facts with `num_rows` sequences of equal lengths on each replica."""
    workload = Workload(
        batch_size=num_rows * query.layout.dp,
        prompt=LengthSpec(max=prompt, fixed=prompt),
        response=LengthSpec(max=response, fixed=response),
        speculation=facts.workload.speculation,
    )
    return facts.model_copy(update={"workload": workload})


Integers = NDArray[np.int64]


def held_blocks(
    prompts: Integers, starts: Integers, ends: Integers, read_until: Integers, num_rounds: int
) -> NDArray[np.float64]:
    """Return the blocks held in each round from 0 to `num_rounds` by sequences that are live in rounds [start, end).

    A start is negative if tokens were sampled before round 0, and an end exceeds `num_rounds` if a sequence stays in
    flight. Another row of the same prompt holds the prompt's blocks until `read_until`.
    """
    first, after = np.maximum(starts, 0), np.minimum(ends, num_rounds)
    before = prompts - starts  # a sequence has `before + r` tokens in round r
    counted = np.maximum(first, starts + 1)
    last = np.maximum(after - 1, counted)
    size = (num_rounds // BLOCK_TOKENS + 3) * BLOCK_TOKENS

    def next_block(rounds: Integers) -> Integers:
        """Return the first round after these in which a sequence needs another block."""
        return rounds + 1 + -(before + rounds) % BLOCK_TOKENS

    # After its first new block, a sequence takes another one every BLOCK_TOKENS rounds.
    begin, stop = (np.bincount(next_block(rounds), minlength=size) for rounds in (counted, last))
    taken = (begin - stop).reshape(-1, BLOCK_TOKENS).cumsum(axis=0).ravel()
    shared, until = prompts // BLOCK_TOKENS, np.minimum(np.maximum(read_until, first), after)
    changes = -(-(before + counted) // BLOCK_TOKENS) - shared, shared, -(before + last) // BLOCK_TOKENS
    rounds, blocks = np.concatenate([first, until, after]), np.concatenate(changes)
    held: NDArray[np.float64] = (taken + np.bincount(rounds, weights=blocks, minlength=size)).cumsum()
    return held[:num_rounds]


def weighted_use(
    held: NDArray[np.float64], first: Integers, after: Integers, seconds: NDArray[np.float64]
) -> HeldBlocks:
    """Return the mean and the peak of the held blocks over ranges of rounds [first, after).

    The mean is weighted by the seconds of each range, or by its rounds if all seconds are 0.

    Ranges may overlap.
    """
    sums = np.zeros(len(held) + 1)
    held.cumsum(out=sums[1:])
    total = float(seconds.sum())
    mean = (sums[after] - sums[first]) / (after - first) @ seconds / total if total else held.mean()
    return HeldBlocks(mean=float(mean), peak=int(held.max()))


def combined_use(held: Iterable[HeldBlocks], seconds: Iterable[float]) -> HeldBlocks:
    """Return the mean and the peak of the held blocks of several replicas or generations, weighted by their seconds."""
    means, most = zip(*held, strict=True)
    weights = np.fromiter(seconds, dtype=np.float64)
    return HeldBlocks(mean=float(np.average(means, weights=weights if weights.any() else None)), peak=max(most))


_MAX_PASSES = 256
"""The largest number of passes that are costed together, at their midpoint."""


@dataclass(slots=True, kw_only=True, eq=False)
class SimulatedSequence:
    """One simulated sequence: prompt and response tokens, and its progress; `step` is the step of its prompt batch.

    A sequence that is not `is_prefilled` copies the keys and values of another one with the same prompt.
    """

    step: int
    row: int
    prompt_tokens: int
    response_tokens: int
    is_prefilled: bool = True
    first_period: int = -1
    first_pass: int = 0
    tokens_at_period_ends: list[int] = field(default_factory=list)
    """Response tokens at the end of each period since the first."""

    @property
    def last_pass(self) -> int:
        """The pass of its group that samples its last token."""
        return self.first_pass + self.response_tokens - 1

    def tokens_by_period(self) -> dict[int, int]:
        """Return the number of tokens sampled in each period, for a response that has ended."""
        totals = [0, *self.tokens_at_period_ends, self.response_tokens]
        parts = {self.first_period + i: after - before for i, (before, after) in enumerate(pairwise(totals))}
        return {period: tokens for period, tokens in parts.items() if tokens}


class SimulatedGroup(SlotGroup[SimulatedSequence]):
    """A group of slots that knows the pass in which its next sequence ends."""

    def __init__(self, first_slot: int, num_slots: int) -> None:
        super().__init__(first_slot, num_slots)
        self.num_passes = 0
        self._has_sampled = False
        self._next_end, self._cached_offset = 0, 0

    @property
    def num_passes_left(self) -> int:
        """Passes until the next sequence ends."""
        return self._next_end - self.num_passes

    @property
    def cached(self) -> int:
        """Cached tokens of the live sequences in the next pass."""
        return self._cached_offset + len(self.live) * self.num_passes

    def process_sampled(self) -> list[SimulatedSequence]:
        """Remove the sequences that ended in the last pass and return them, in the order of their slots."""
        if not self._has_sampled:
            return []
        self._has_sampled = False
        if self.num_passes < self._next_end:
            return []
        ends_now = [sequence.last_pass == self.num_passes for sequence in self.live]
        ended = [sequence for sequence, ends in zip(self.live, ends_now, strict=True) if ends]
        self._keep(not ends for ends in ends_now)
        self._update_next_end()
        return ended

    def _update_next_end(self) -> None:
        if self.live:
            self._next_end = min(sequence.last_pass for sequence in self.live)
            self._cached_offset = sum(sequence.prompt_tokens - sequence.first_pass for sequence in self.live)

    def step(self, waiting: deque[SimulatedSequence], period: int) -> list[SimulatedSequence]:
        """Fill the free slots and sample a token for each live sequence; return the admitted sequences."""
        admitted = self._next(waiting)
        self.live += admitted
        self.multi_step(1)
        for sequence in admitted:
            sequence.first_period, sequence.first_pass = period, self.num_passes
        if admitted:
            self._update_next_end()
        return admitted

    def multi_step(self, num_passes: int) -> None:
        """Run passes in which no sequence starts."""
        if self.live and num_passes:
            self.num_passes += num_passes
            self._has_sampled = True


_Flight: TypeAlias = Flight[SimulatedSequence, SimulatedGroup, SimulatedSequence]


@dataclass(frozen=True, kw_only=True)
class PeriodResult:
    """The result of a period: delivered sequences in order of step and row, seconds, the mean number of live sequences
    (those in a slot) over its rounds, and the KV blocks that they held."""

    delivered: tuple[SimulatedSequence, ...]
    seconds: float
    live: float
    held: HeldBlocks


class SimulatedFlight:
    """The sequences of one replica that have been admitted and not delivered, in simulated generation."""

    def __init__(self, num_slots: int, num_stages: int, times: RoundTimes, *, same_prompt: int = 1) -> None:
        """Every `same_prompt` consecutive rows have the same prompt."""
        self._flight: _Flight = Flight(SimulatedGroup.split(num_slots, num_stages))
        self._num_stages, self._times, self._same_prompt = num_stages, times, same_prompt

    @property
    def num_rounds(self) -> int:
        """Rounds of the last period."""
        return self._flight.num_rounds

    def run_period(
        self, admitted: Collection[SimulatedSequence], delivery: DeliveryRule, least_rounds: int = 0
    ) -> PeriodResult:
        """Simulate the next period, by the rules of `Flight.run_period`."""
        work = _PeriodWork(self._flight, self._num_stages)
        delivered = self._flight.run_period(
            admitted,
            delivery,
            process_sampled=SimulatedGroup.process_sampled,
            step=work.step,
            multi_step=work.multi_step,
            min_rounds=least_rounds,
        )
        work.end()
        for group in self._flight.groups:
            for sequence in group.live:
                sequence.tokens_at_period_ends.append(group.num_passes - sequence.first_pass + 1)
        seconds, held = work.seconds_and_cache(self._times, self._same_prompt)
        return PeriodResult(delivered=delivered, seconds=seconds, live=work.live, held=held)


class _PeriodWork:
    """The work of a period: its decode rounds with their sequences and cached tokens, and its prefills."""

    def __init__(self, flight: _Flight, num_stages: int) -> None:
        self._flight, self._num_groups, self._num_stages = flight, len(flight.groups), num_stages
        self._num_advanced, self._rows, self._cached = 0, 0, 0  # of the current round
        self._decodes: list[tuple[float, float, float, float]] = []  # round, rounds, rows, cached tokens
        self._first: list[SimulatedSequence] = []
        self._refills: list[tuple[float, int, float, int, float]] = []
        """Round, rows and mean tokens of each prefill; number and mean context of the sequences that decode in its
        round."""
        self._num_rounds, self._row_rounds = 0.0, 0.0
        self._sequences = [
            (sequence, sequence.first_pass - group.num_passes - 1) for group in flight.groups for sequence in group.live
        ]
        """Every sequence that is live in the period, with the round of its first token (negative if earlier)."""

    def step(self, group: SimulatedGroup) -> int:
        """Run one pass of the group; return the number of sequences that it admitted."""
        self._num_advanced += 1
        decoding, cached = len(group.live), group.cached if group.live else 0
        self._rows += decoding
        self._cached += cached
        admitted = group.step(self._flight.waiting, self._flight.period)
        self._admit(admitted, decoding, cached)
        if self._num_advanced == self._num_groups:
            self.end()
        return len(admitted)

    def multi_step(self, max_passes: int | None) -> int:
        """Run all passes until a sequence ends, at most `max_passes` if given; return their number."""
        busy = [group for group in self._flight.groups if group.live]
        skipped = min(group.num_passes_left for group in busy)
        if max_passes is not None:
            skipped = min(skipped, max_passes)
        remaining, rows = skipped, sum(len(group.live) for group in busy)
        while remaining:
            passes = min(remaining, _MAX_PASSES)
            self._decode(passes, rows, sum(group.cached for group in busy) / rows + (passes - 1) / 2)
            for group in busy:
                group.multi_step(passes)
            remaining -= passes
        return skipped

    def end(self) -> None:
        """Account for the current round, or for the part of it before a period ends."""
        if self._num_advanced:
            rows = self._rows * self._num_groups / self._num_advanced
            self._decode(self._num_advanced / self._num_groups, rows, self._cached / max(1, self._rows))
        self._num_advanced, self._rows, self._cached = 0, 0, 0

    def _admit(self, admitted: Sequence[SimulatedSequence], decoding: int, cached: int) -> None:
        """Record the prompts that a group prefills in one round; those of the first round fill the pipeline together.

        In this round `decoding` other sequences with `cached` tokens in total decode.
        """
        self._row_rounds += len(admitted)
        self._sequences += [(sequence, int(self._num_rounds)) for sequence in admitted]
        prefilled = [sequence for sequence in admitted if sequence.is_prefilled]
        if not self._num_rounds:
            self._first += prefilled
        elif prefilled:
            context = cached / max(1, decoding)
            self._refills.append((self._num_rounds, len(prefilled), _mean_prompt(prefilled), decoding, context))

    def _decode(self, rounds: float, rows: float, context: float) -> None:
        if rounds and rows:
            self._decodes.append((self._num_rounds, rounds, rows, context))
        self._num_rounds += rounds
        self._row_rounds += rounds * rows

    @property
    def live(self) -> float:
        return self._row_rounds / self._num_rounds if self._num_rounds else 0.0

    def seconds_and_cache(self, times: RoundTimes, same_prompt: int) -> tuple[float, HeldBlocks]:
        """Return the seconds of the period, and the KV blocks held.

        A later prefill delays one group only, so its seconds are those of a prefill in which every group has as many
        prompts, divided by the number of pipeline stages.
        """
        total, runs = 0.0, [np.zeros((3, 0))]  # first round, rounds, seconds
        if self._decodes:
            first, rounds, rows, contexts = np.array(self._decodes).T
            decode = rounds * times.round_(rows, contexts)
            total += float(decode.sum())
            runs.append(np.array([first, np.ceil(rounds), decode]))
        if self._first:
            rows, tokens = np.array([[len(self._first)], [_mean_prompt(self._first)]])
            prefill = times.prefill(rows, tokens)
            total += float(prefill.sum())
            runs.append(np.array([[0.0], [1.0], prefill]))
        if self._refills:
            first, rows, tokens, decoding, contexts = np.array(self._refills).T
            prefill = times.refill(rows * self._num_groups, tokens, decoding > 0, contexts)
            total += float(prefill.sum()) / self._num_stages
            runs.append(np.array([first, np.ones(len(first)), prefill / self._num_stages]))
        return total, self._held(np.concatenate(runs, axis=1), same_prompt)

    def _held(self, runs: NDArray[np.float64], same_prompt: int) -> HeldBlocks:
        if not self._sequences:
            return HeldBlocks(0.0, 0)
        prompts, starts, responses = np.array(
            [(sequence.prompt_tokens, start, sequence.response_tokens) for sequence, start in self._sequences]
        ).T
        ends, num_rounds = starts + responses, max(1, math.ceil(self._num_rounds))
        until = self._read_until(ends, same_prompt) if same_prompt > 1 else np.zeros_like(ends)
        held = held_blocks(prompts, starts, ends, until, num_rounds)
        first, rounds = runs[:2].astype(np.int64)
        return weighted_use(held, first, first + rounds, runs[2])

    def _read_until(self, ends: NDArray[np.int64], same_prompt: int) -> NDArray[np.int64]:
        """Return for each sequence the round in which the last earlier one ends that shares its prompt.

        Sequences share a prompt's blocks only if they started in the same period.
        """
        ends_before, last_ends = list[int](), dict[tuple[int, int, int], int]()
        for (sequence, _), end in zip(self._sequences, ends.tolist(), strict=True):
            prompt = sequence.step, sequence.row // same_prompt, sequence.first_period
            ends_before.append(last_ends.get(prompt, 0))
            last_ends[prompt] = max(ends_before[-1], end)
        return np.array(ends_before)


def _mean_prompt(admitted: Sequence[SimulatedSequence]) -> float:
    return statistics.fmean(sequence.prompt_tokens for sequence in admitted)
