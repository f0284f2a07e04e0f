"""Simulated generation with sampled lengths: each replica's seconds and KV cache, a step's sequences and staleness;
also in the waves of dynamic sampling, and with best-of-n.

A replica's prompts are every dp-th prompt of a batch in order of length, as in the runtime
(`profiles.packing.replica_rows`). Of a replica's rows of one prompt the first to be admitted is prefilled. With
dynamic sampling each group is kept with a probability that is sampled from the distribution of the workload; with
best-of-n rewards are assumed independent of length, so each sample of a prompt is equally likely to be kept.

In all classes `of_step` returns the generation that delivers a step.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.cost_models.generation_cost import RECOMPUTATION
from meshwright.cost_models.period_ends import DeliveryRule, FirstEnded, WholeStep
from meshwright.cost_models.protocol import Memo
from meshwright.cost_models.sampling_waves import WAVE_REWARDS
from meshwright.planner.plan.plan import Plan
from meshwright.planner.program.durations import HeldBlocks
from meshwright.planner.program.program import generation_version
from meshwright.planner.simulation.pacing import Pacer, num_deferred
from meshwright.planner.simulation.simulated_flight import (
    PeriodResult,
    RoundTimes,
    SimulatedFlight,
    SimulatedSequence,
    combined_use,
    held_blocks,
    weighted_use,
)
from meshwright.profiles.packing import replica_rows, rows_per_prompt
from meshwright.profiles.stages import GENERATE
from meshwright.profiles.workload import Workload

Lengths: TypeAlias = NDArray[np.int64]

LengthsOfStep: TypeAlias = Callable[[int], tuple[Lengths, Lengths]]
"""Return the prompt lengths of a step's batch, ascending, and their response lengths, in tokens."""

OvercommitOfStep: TypeAlias = Callable[[int], int]
"""Return the overcommit, in sequences over all replicas, of the period that delivers a step."""

_NUM_SPLITS = 33
"""Minimum number of points at which rounds are split into runs, since a run is costed at its midpoint."""


@dataclass(frozen=True, kw_only=True)
class Generated:
    """The sequences that are delivered as one step, in tokens, and the generation of each replica.

    `seconds` leaves out what an engine in its own process does outside its rounds (`OUTSIDE_ROUNDS`).

    `sampled` has each sequence's sampled tokens, without tool tokens. `live` has each replica's mean number of live
    sequences (those in a slot) over its rounds, `held` the KV blocks that they held (empty if not known).
    """

    prompts: Lengths
    responses: Lengths
    sampled: Lengths
    seconds: tuple[float, ...]
    live: tuple[float, ...]
    held: tuple[HeldBlocks, ...]
    tokens_by_staleness: Mapping[int, int]


class SynchronousGeneration:
    """Generation in which each step's sequences start and end in one period.

    `level` multiplies the seconds of all rounds: it is the plan's seconds of generation over the cost model's.
    """

    def __init__(self, plan: Plan, lengths: LengthsOfStep, times: RoundTimes, level: float) -> None:
        self._plan, self._lengths, self._times, self._level = plan, lengths, times, level
        self._rows_of_replica = [list(_share(plan, replica)) for replica in range(plan.placement(GENERATE).layout.dp)]

    def of_step(self, step: int) -> Generated:
        prompts, responses = self._lengths(step)
        placement, same_prompt = self._plan.placement(GENERATE), _rows_per_prompt(self._plan)
        pp, slots = placement.layout.pp, placement.schedule.generation_slots
        results = [
            simulate_batch(prompts[rows], responses[rows], slots, pp, self._times, same_prompt=same_prompt)
            for rows in self._rows_of_replica
        ]
        return Generated(
            prompts=prompts,
            responses=responses,
            sampled=responses,
            seconds=tuple(self._level * result.seconds for result in results),
            live=tuple(result.live for result in results),
            held=tuple(result.held for result in results),
            tokens_by_staleness={staleness_of_period(self._plan, step, step): int(responses.sum())},
        )


class InFlightGeneration:
    """Generation in which sequences stay in flight from period to period.

    Periods are simulated in order from step 0, once each. `level` multiplies the seconds of all rounds: it is the
    plan's seconds of generation over the cost model's.
    """

    def __init__(
        self, plan: Plan, lengths: LengthsOfStep, times: RoundTimes, level: float, overcommit: OvercommitOfStep
    ) -> None:
        self._plan, self._lengths, self._level, self._overcommit_of = plan, lengths, level, overcommit
        placement = plan.placement(GENERATE)
        layout, schedule = placement.layout, placement.schedule
        self._overcommits = schedule.overcommit > 0
        self._max_deferral = plan.staleness - placement.steps_ahead
        self._rows_of_replica = [_share(plan, replica) for replica in range(layout.dp)]
        self._per_step, self._rows_per_prompt = [len(rows) for rows in self._rows_of_replica], _rows_per_prompt(plan)
        self._batches_ahead = schedule.batches_in_flight - 1
        self._num_admitted = [0] * layout.dp
        self._flights = [
            SimulatedFlight(schedule.generation_slots, layout.pp, times, same_prompt=self._rows_per_prompt)
            for _ in range(layout.dp)
        ]
        self._pacers = [Pacer(plan) for _ in range(layout.dp)]
        self._recompute_seconds = placement.cost.amount(RECOMPUTATION)
        """Planned seconds of recomputing the cache in a period; the first one starts with nothing in flight."""
        self._generated: list[Generated] = []

    def of_step(self, step: int) -> Generated:
        while len(self._generated) <= step:
            self._generated.append(self._simulate_period(len(self._generated)))
        return self._generated[step]

    def _simulate_period(self, step: int) -> Generated:
        results = [self._simulate_replica(replica, step) for replica in range(len(self._per_step))]
        delivered = [sequence for result in results for sequence in result.delivered]
        responses = np.array([sequence.response_tokens for sequence in delivered])
        return Generated(
            prompts=np.array([sequence.prompt_tokens for sequence in delivered]),
            responses=responses,
            sampled=responses,
            seconds=tuple(self._level * result.seconds + self._recompute_seconds * (step > 0) for result in results),
            live=tuple(result.live for result in results),
            held=tuple(result.held for result in results),
            tokens_by_staleness=self._tokens_by_staleness(step, delivered),
        )

    def _simulate_replica(self, replica: int, step: int) -> PeriodResult:
        num_rows, pace = self._per_step[replica], self._pacers[replica]
        delivery: DeliveryRule = FirstEnded(num_rows, self._max_deferral) if self._overcommits else WholeStep(step)
        admitted = [
            self._sequence(replica, *divmod(position, num_rows)) for position in self._next_prompts(replica, step)
        ]
        result = self._flights[replica].run_period(admitted, delivery, pace.min_rounds)
        pace.record_delivered([sequence.response_tokens for sequence in result.delivered])
        return result

    def _next_prompts(self, replica: int, step: int) -> range:
        """Return the indices of the prompts that a replica admits next, in its concatenated shares of the batches."""
        first, num_rows = self._num_admitted[replica], self._per_step[replica]
        ahead = self._batches_ahead * num_rows
        if self._overcommits:
            max_overcommit = self._overcommit_of(step) // len(self._per_step)
            ahead = num_deferred(step, first - step * num_rows, max_overcommit, num_rows)
        self._num_admitted[replica] = max(first, (step + 1) * num_rows + ahead)
        return range(first, self._num_admitted[replica])

    def _sequence(self, replica: int, step: int, index: int) -> SimulatedSequence:
        prompts, responses = self._lengths(step)
        row = self._rows_of_replica[replica][index]
        return SimulatedSequence(
            step=step,
            row=row,
            prompt_tokens=int(prompts[row]),
            response_tokens=int(responses[row]),
            is_prefilled=index % self._rows_per_prompt == 0,
        )

    def _tokens_by_staleness(self, step: int, delivered: Iterable[SimulatedSequence]) -> Mapping[int, int]:
        tokens: Counter[int] = Counter()
        for sequence in delivered:
            tokens.update(
                {staleness_of_period(self._plan, step, period): n for period, n in sequence.tokens_by_period().items()}
            )
        return dict(sorted(tokens.items()))


def _share(plan: Plan, replica: int) -> tuple[int, ...]:
    """Return the rows of a step that a replica generates."""
    workload = plan.facts.workload
    return replica_rows(workload.batch_size, workload.group_size, replica, plan.placement(GENERATE).layout.dp)


def _rows_per_prompt(plan: Plan) -> int:
    """Return the number of rows of one prompt on one replica."""
    workload = plan.facts.workload
    return rows_per_prompt(workload.batch_size, workload.group_size, plan.placement(GENERATE).layout.dp)


def staleness_of_period(plan: Plan, step: int, sampled_for: int) -> int:
    """Return the staleness of tokens that are sampled in the period of step `sampled_for` and used in that of
    `step`."""
    return step - generation_version(plan, sampled_for - plan.placement(GENERATE).steps_ahead, 0)


class BatchResult(NamedTuple):
    """One replica's generation: seconds, mean number of live sequences over its rounds, and KV blocks held."""

    seconds: float
    live: float
    held: HeldBlocks


def simulate_batch(
    prompts: Lengths,
    responses: Lengths,
    num_slots: int,
    num_stages: int,
    times: RoundTimes,
    *,
    same_prompt: int = 1,
) -> BatchResult:
    """Simulate one replica's generation, in short runs of rounds in which no sequence starts or ends.

    A sequence takes the slot that is free first, prefills in its first round and decodes in the others; the first of
    `same_prompt` rows is prefilled for all of them. `prompts` and `responses` are lengths in tokens, in order of
    arrival.
    """
    starts = _starts(responses.tolist(), num_slots)
    ends = starts + responses
    num_rounds = int(ends.max())
    splits = np.arange(_NUM_SPLITS) * num_rounds // (_NUM_SPLITS - 1)
    bounds = np.unique(np.concatenate([starts, starts + 1, ends, splits]))
    first, after = bounds[:-1], bounds[1:]
    decoding = (starts[:, None] + 1 <= first) & (first < ends[:, None])  # [sequence, run]
    live = decoding.sum(axis=0)
    cached = (prompts - starts)[:, None] + (first + after - 1) / 2 - 1
    context = np.where(decoding, cached, 0.0).sum(axis=0) / np.maximum(live, 1)
    rounds = np.where(live > 0, after - first, 0)
    decode = rounds * times.round_(np.maximum(live, 1).astype(float), context)
    num_groups, prefilled = min(num_stages, num_slots), slice(None, None, same_prompt)
    begins, prefill = _prefill_seconds(
        prompts[prefilled],
        starts[prefilled],
        _DecodeRuns(first, live, context),
        times,
        num_groups=num_groups,
        num_stages=num_stages,
    )
    held = held_blocks(prompts, starts, ends, _read_until(ends, same_prompt), num_rounds)
    runs = np.concatenate([first, begins]), np.concatenate([after, begins + 1])
    return BatchResult(
        seconds=float(decode.sum()) + float(prefill.sum()),
        live=float(responses.sum() / num_rounds),
        held=weighted_use(held, *runs, np.concatenate([decode, prefill])),
    )


def _read_until(ends: Lengths, same_prompt: int) -> Lengths:
    """Return for each row the round in which the last earlier row with its prompt ends, and stops reading the shared
    KV blocks of the prompt."""
    ends_before = np.zeros((len(ends) // same_prompt, same_prompt), dtype=np.int64)
    ends_before[:, 1:] = np.maximum.accumulate(ends.reshape(-1, same_prompt), axis=1)[:, :-1]
    return ends_before.ravel()


def _starts(responses: Sequence[int], num_slots: int) -> Lengths:
    """Return the round in which each sequence is admitted."""
    if len(responses) <= num_slots:
        return np.zeros(len(responses), dtype=np.int64)
    free, starts = [0] * num_slots, []
    for length in responses:
        starts.append(free[0])
        heapq.heapreplace(free, free[0] + length)
    return np.array(starts)


class _DecodeRuns(NamedTuple):
    """Runs of rounds in which no sequence starts or ends: the first round of each, the sequences that decode in it, and
    their mean context."""

    first: Lengths
    live: Lengths
    context: NDArray[np.float64]


def _prefill_seconds(
    prompts: Lengths, starts: Lengths, decodes: _DecodeRuns, times: RoundTimes, *, num_groups: int, num_stages: int
) -> tuple[Lengths, NDArray[np.float64]]:
    """Return the rounds with prefills, and the seconds in each.

    The first prefills fill the pipeline; later prompts are admitted by one group at a time, in one of its passes.
    """
    begins, indices = np.unique(starts, return_index=True)
    rows = np.diff(indices, append=len(starts)).astype(float)
    tokens = np.add.reduceat(prompts, indices) / rows
    share = np.ones(len(rows))
    share[1:] = 1 / num_stages
    rows[1:] *= num_groups
    run = np.searchsorted(decodes.first, begins)
    return begins, share * times.refill(rows, tokens, decodes.live[run] > 0, decodes.context[run])


_MAX_WAVES = 10_000
"""Maximum number of waves of a step; keeping one group in a hundred needs about a hundred."""


class StepWaves(NamedTuple):
    """The waves of a step: for each, the rows that are trained on."""

    kept: tuple[Lengths, ...]

    @property
    def number(self) -> int:
        return len(self.kept)


def sample_waves(plan: Plan, *, seed: int, step: int) -> StepWaves:
    """Return the waves of a step, which depend only on the seed and the step."""
    workload = plan.facts.workload
    sampling, rng = workload.dynamic_sampling, np.random.default_rng([seed, step, 3])
    assert sampling
    shares, chances = zip(*sampling.shares, strict=True)
    share, size, missing = (
        float(rng.choice(shares, p=chances)),
        sampling.wave_size(workload.num_prompts),
        workload.num_prompts,
    )
    kept: list[Lengths] = []
    while missing and len(kept) < _MAX_WAVES:
        groups = np.flatnonzero(rng.random(size) < share)
        chosen = rng.permutation(groups)[:missing]  # unlike in a run, groups are sorted by length here
        kept.append(_random_samples(workload, chosen, rng))
        missing -= len(chosen)
    return StepWaves(tuple(kept))


class WaveGeneration:
    """Generation of a step wave by wave; `of_wave` simulates one wave, numbered over all steps."""

    def __init__(self, plan: Plan, of_wave: Callable[[int], Generated], *, seed: int) -> None:
        self._plan, self._of_wave, self._seed = plan, of_wave, seed
        placement = plan.placement(GENERATE)
        workload = plan.facts.workload
        assert workload.dynamic_sampling
        self._expected_waves = workload.dynamic_sampling.expected_waves(workload.num_prompts)
        self._reward_seconds = placement.cost.amount(WAVE_REWARDS) / self._expected_waves

    def of_step(self, step: int) -> Generated:
        """Return the generation of a step; every replica waits after each wave for the slowest one and the scores."""
        waves = sample_waves(self._plan, seed=self._seed, step=step)
        waves_generated = [self._of_wave(step * _MAX_WAVES + number) for number in range(waves.number)]
        seconds = sum(max(wave.seconds) + self._reward_seconds for wave in waves_generated)
        prompts, responses, sampled = (
            np.concatenate([lengths[rows] for lengths, rows in zip(parts, waves.kept, strict=True)])
            for parts in (
                [wave.prompts for wave in waves_generated],
                [wave.responses for wave in waves_generated],
                [wave.sampled for wave in waves_generated],
            )
        )
        return Generated(
            prompts=prompts,
            responses=responses,
            sampled=sampled,
            seconds=(seconds,) * len(waves_generated[0].seconds),
            live=waves_generated[0].live,
            held=tuple(
                combined_use(
                    (wave.held[replica] for wave in waves_generated),
                    (wave.seconds[replica] for wave in waves_generated),
                )
                for replica in range(len(waves_generated[0].held))
            ),
            tokens_by_staleness={staleness_of_period(self._plan, step, step): int(sampled.sum())},
        )

    def waves_ratio(self, step: int) -> float:
        """Return the number of waves of a step over the expected number."""
        return sample_waves(self._plan, seed=self._seed, step=step).number / self._expected_waves


class BestOfGeneration:
    """Generation of a step that delivers only the kept samples; `of_all` simulates the generation of all samples."""

    def __init__(self, plan: Plan, of_all: Callable[[int], Generated], *, seed: int) -> None:
        self._plan, self._of_all, self._seed = plan, of_all, seed
        self._generated: Memo[int, Generated] = Memo()
        self._reward_seconds = plan.placement(GENERATE).cost.amount(WAVE_REWARDS)

    def of_step(self, step: int) -> Generated:
        """Return the generation of a step; every replica waits for the scores of its samples."""
        generated, kept = self._all_samples(step), self.kept(step)
        sampled = generated.sampled[kept]
        return Generated(
            prompts=generated.prompts[kept],
            responses=generated.responses[kept],
            sampled=sampled,
            seconds=tuple(seconds + self._reward_seconds for seconds in generated.seconds),
            live=generated.live,
            held=generated.held,
            tokens_by_staleness={staleness_of_period(self._plan, step, step): int(sampled.sum())},
        )

    def scored(self, step: int) -> Lengths:
        """Return the tokens of each sample of a step, prompts included."""
        generated = self._all_samples(step)
        return generated.prompts + generated.responses

    def _all_samples(self, step: int) -> Generated:
        """Return the generation of all samples of a step."""
        return self._generated.memoize(step, lambda: self._of_all(step))

    def kept(self, step: int) -> NDArray[np.int64]:
        """Return the rows that are trained on, ascending; rows of a prompt are adjacent."""
        workload = self._plan.facts.workload
        return _random_samples(workload, np.arange(workload.num_prompts), np.random.default_rng([self._seed, step, 3]))


def _random_samples(workload: Workload, prompts: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Return the rows of the samples of these prompts that are trained on, ascending within a prompt: with best-of-n
    a random choice, all equally likely, and otherwise all."""
    num_sampled, num_kept = workload.candidates.group_size, workload.group_size
    if num_sampled == num_kept:
        samples = np.arange(num_kept)[None, :]
    else:
        samples = np.sort(rng.random((len(prompts), num_sampled)).argsort(axis=1)[:, :num_kept], axis=1)
    return (prompts[:, None] * num_sampled + samples).ravel()
