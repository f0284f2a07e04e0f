"""Durations of steps whose lengths are drawn from the workload: generation round by round, the rest by padded tokens.

Every level is the plan's: a drawn step takes the planned seconds times what the drawn lengths cost over what the
distribution costs, by one and the same model. Drawn lengths equal to the typical ones give the planned step back.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.cost_models.pipeline import micro_batches
from meshwright.cost_models.question import Call
from meshwright.planner.durations import StepWork, refit_seconds
from meshwright.planner.frontier import call_of
from meshwright.planner.plan import Placement, Plan
from meshwright.planner.probe import Remodel, RoundTimes, round_times
from meshwright.profiles.lengths import Histogram
from meshwright.profiles.stages import STAGE_BY_NAME
from meshwright.profiles.workload import Workload

Lengths = NDArray[np.int64]

_NUM_CUTS = 33
"""A run of rounds is costed at its middle, so runs are cut at as many points at least."""


class Sampled:
    """`seed` and the number of the step decide its lengths."""

    name = "sampled"

    def __init__(self, plan: Plan, remodel: Remodel, *, seed: int) -> None:
        self._plan, self._seed, self._workload = plan, seed, plan.facts.workload
        self._placements = plan.placements
        placement = plan.placement("actor_generate")
        call = _call(plan, placement)
        self._times = round_times(plan.facts, call, remodel)
        self._generation_level = placement.cost.total / remodel(plan.facts).seconds(call).total

    def of_step(self, step: int, /) -> StepWork:
        prompts, responses = draw_lengths(self._workload, seed=self._seed, step=step)
        seconds = refit_seconds(self._plan)
        live: dict[str, tuple[float, ...]] = {}
        for placement in self._placements:
            stage = STAGE_BY_NAME[placement.stage]
            if stage.generates:
                seconds[stage.name] = self._generation(placement, prompts, responses)
                live[stage.name] = _live_sequences(placement, responses)
            elif stage.trains:
                seconds[stage.name] = (self._training(placement, prompts + responses, step),)
            else:
                seconds[stage.name] = self._forward(placement, prompts + responses)
        return StepWork(seconds=seconds, num_tokens=float(responses.sum()), live_sequences=live)

    def _generation(self, placement: Placement, prompts: Lengths, responses: Lengths) -> tuple[float, ...]:
        """Each replica takes every dp-th prompt in order of length, as the runtime shares them."""
        dp, pp, slots = placement.layout.dp, placement.layout.pp, placement.schedule.generation_slots
        return tuple(
            self._generation_level
            * generation_seconds(prompts[replica::dp], responses[replica::dp], slots, pp, self._times)
            for replica in range(dp)
        )

    def _forward(self, placement: Placement, lengths: Lengths) -> tuple[float, ...]:
        padded = padded_tokens(lengths, placement.layout.dp, placement.schedule.micro_batch_size)
        typical = _typical_tokens(self._workload.sequence_lengths, len(lengths), placement)
        return tuple(float(seconds) for seconds in placement.cost.total * padded / typical)

    def _training(self, placement: Placement, lengths: Lengths, step: int) -> float:
        """Replicas meet at every update, which the one with the most padded tokens decides."""
        num_minibatches, num_epochs = self._workload.num_minibatches, self._workload.num_epochs
        draw = np.random.default_rng([self._seed, step, 1])
        rows = len(lengths) // num_minibatches
        orders = [draw.permutation(lengths) for _ in range(num_epochs)]
        updates = [order[i * rows : (i + 1) * rows] for order in orders for i in range(num_minibatches)]
        layout, size = placement.layout, placement.schedule.micro_batch_size
        slowest = sum(float(padded_tokens(update, layout.dp, size).max()) for update in updates)
        typical = _typical_tokens(self._workload.sequence_lengths, rows, placement)
        return placement.cost.total * slowest / (len(updates) * typical)


def draw_lengths(workload: Workload, *, seed: int, step: int) -> tuple[Lengths, Lengths]:
    """Prompts and responses of one step's batch, in order of the prompts' lengths."""
    draw = np.random.default_rng([seed, step])
    prompts = np.sort(_sample(draw, workload.prompt_lengths, workload.batch_size))
    return prompts, _sample(draw, workload.response_lengths, workload.batch_size)


def padded_tokens(lengths: Lengths, num_replicas: int, micro_batch_size: int) -> NDArray[np.float64]:
    """Tokens of each replica's micro-batches, every row as long as the longest of its micro-batch.

    Rows are shared as the runtime shares them: every `num_replicas`-th in order of length, then in consecutive groups.
    """
    by_replica = np.sort(lengths).reshape(-1, num_replicas).T  # [replica, row]
    longest = by_replica[:, micro_batch_size - 1 :: micro_batch_size]
    padded: NDArray[np.float64] = longest.sum(axis=1) * float(micro_batch_size)
    return padded


def generation_seconds(
    prompts: Lengths, responses: Lengths, num_slots: int, num_stages: int, times: RoundTimes
) -> float:
    """One replica's generation, in short runs of rounds in which no sequence begins or ends.

    A sequence takes the slot that is free first, prefills in its first round and decodes in the others.
    """
    starts = _starts(responses.tolist(), num_slots)
    ends = starts + responses
    cuts = np.linspace(0, ends.max(), _NUM_CUTS).astype(np.int64)
    bounds = np.unique(np.concatenate([starts, starts + 1, ends, cuts]))
    first, after = bounds[:-1], bounds[1:]
    decoding = (starts[:, None] + 1 <= first) & (first < ends[:, None])  # [sequence, run]
    live = decoding.sum(axis=0)
    cached = (prompts - starts)[:, None] + (first + after - 1) / 2 - 1
    context = np.where(decoding, cached, 0.0).max(axis=0)
    rounds = np.where(live > 0, after - first, 0)
    decode = float((rounds * times.round_(np.maximum(live, 1).astype(float), context)).sum())
    return decode + _prefill_seconds(prompts, starts, min(num_stages, num_slots), num_stages, times)


def _live_sequences(placement: Placement, responses: Lengths) -> tuple[float, ...]:
    """Sequences in flight on each replica, on average over its rounds."""
    dp, slots = placement.layout.dp, placement.schedule.generation_slots
    shares = (responses[replica::dp] for replica in range(dp))
    return tuple(float(share.sum() / (_starts(share.tolist(), slots) + share).max()) for share in shares)


def _starts(responses: Sequence[int], num_slots: int) -> Lengths:
    """The round in which each sequence is admitted."""
    if len(responses) <= num_slots:
        return np.zeros(len(responses), dtype=np.int64)
    free, starts = [0] * num_slots, []
    for length in responses:
        starts.append(free[0])
        heapq.heapreplace(free, free[0] + length)
    return np.array(starts)


def _prefill_seconds(prompts: Lengths, starts: Lengths, num_groups: int, num_stages: int, times: RoundTimes) -> float:
    """The first prompts fill the pipeline; later ones are admitted by a group at a time, in one pass of it."""
    _, begins = np.unique(starts, return_index=True)
    rows = np.diff([*begins, len(starts)]).astype(float)
    longest = np.maximum.reduceat(prompts, begins).astype(float)
    whole = np.ones(len(rows))
    whole[1:] = 1 / num_stages
    rows[1:] *= num_groups
    return float((whole * times.prefill(rows, longest)).sum())


def _sample(draw: np.random.Generator, lengths: Histogram, size: int) -> Lengths:
    return draw.choice(np.array(lengths.tokens), size=size, p=np.array(lengths.probabilities))


def _typical_tokens(lengths: Histogram, rows: int, placement: Placement) -> float:
    """Padded tokens of one replica's typical micro-batches, as the cost model counts them."""
    share = -(-rows // placement.layout.dp)
    kinds = micro_batches(lengths, share, placement.schedule.micro_batch_size)
    return float(sum(kind.number * kind.rows * kind.tokens for kind in kinds))


def _call(plan: Plan, placement: Placement) -> Call:
    return call_of(
        plan.facts,
        STAGE_BY_NAME[placement.stage],
        placement.layout,
        placement.schedule,
        plan.facts.staleness - placement.lead,
    )
