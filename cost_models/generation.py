"""Seconds of continuous batching over the distribution of lengths.

A replica holds its slots in min(pp, slots) groups that are in flight together. In a turn a group learns its last
tokens, admits prompts into free slots and draws one token for each live sequence, so a response of n tokens takes n
turns, the first of which is its prefill. A round is one turn of every group; with m live groups it takes
max(m, p) x tau(group), because a group's next token waits for its last one to leave the last stage (DESIGN.md; the
bubble of a pipeline with fewer than p groups is Narayanan et al., arXiv:2104.04473, section 2.2, with m < p).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.cost_models.collectives import ALL_GATHER, ALL_REDUCE, SEND_RECEIVE, Groups, Network
from meshwright.cost_models.compute import Shard
from meshwright.cost_models.cost import Cost, Tally, least_trusted
from meshwright.cost_models.question import Call
from meshwright.profiles.frameworks import Framework
from meshwright.profiles.table import Body
from meshwright.profiles.workload import Workload

_NUM_WINDOWS = 8
"""Rounds are costed in this many windows of equal length, each at its mean number of live sequences."""

_NUM_ORDERS = 8
"""Arrival orders that the rounds are averaged over: the longest response may come early or late."""

_GOLDEN = (math.sqrt(5) - 1) / 2
"""Multiples of the golden ratio modulo 1 spread evenly: an order without chance and without pattern."""

_DRAWN_BYTES = 16
"""A sampled token and its log-probability, both sent in fp64."""


class Window(NamedTuple):
    """`rounds` rounds in which `live` sequences decode, the longest of them with `context` cached tokens."""

    rounds: float
    live: float
    context: float


class Prefill(NamedTuple):
    """`calls` rounds in which `rows` prompts are admitted, padded to `tokens`."""

    calls: float
    rows: float
    tokens: float


@dataclass(frozen=True)
class Rounds:
    """What one replica does during a generation: how many rounds, and how full they are."""

    num_rounds: float
    windows: tuple[Window, ...]
    first: Prefill
    refills: Prefill


def rounds_of(workload: Workload, num_rows: int, num_slots: int) -> Rounds:
    """The rounds of the replica that holds the batch's longest response, averaged over arrival orders.

    Lengths are the middles of `num_rows` equally likely parts of their distribution; the last one is the expected
    longest response of the whole batch, since every replica waits for the slowest.
    """
    responses = list(workload.response_lengths.strata(num_rows))
    responses[-1] = max(responses[-1], round(workload.response_lengths.expected_maximum(workload.batch_size)))
    prompts = workload.prompt_lengths.strata(num_rows)
    orders = [i / _NUM_ORDERS for i in range(_NUM_ORDERS)]
    runs = [_run(_shuffled(responses, turn), _shuffled(prompts, turn + 0.5), num_slots) for turn in orders]
    calls = sum(run.num_refills for run in runs) / len(runs)
    per_call = (num_rows - num_slots) / calls if calls else 0.0
    longest = workload.prompt_lengths.expected_maximum
    return Rounds(
        num_rounds=sum(run.num_rounds for run in runs) / len(runs),
        windows=_mean_windows(runs),
        first=Prefill(1, num_slots, longest(num_slots)),
        refills=Prefill(calls, per_call, longest(max(1, round(per_call))) if calls else 0.0),
    )


class _Passes(NamedTuple):
    """`number` passes of one group of `rows` rows through one pipeline stage."""

    number: float
    rows: float
    tokens: float
    context: float


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Seconds of `actor_generate` on one replica."""

    call: Call
    shard: Shard
    groups: Groups
    network: Network
    element_bytes: int
    framework: Framework

    def seconds(self, rounds: Rounds, num_slots: int) -> Cost:
        """Prefills and decode rounds; compute and collectives of the slowest pipeline stage; what the host adds."""
        pp = self.call.layout.pp
        num_groups = min(pp, num_slots)
        decodes = [_decode_passes(window, num_groups, pp) for window in rounds.windows]
        first, refills = rounds.first, rounds.refills
        prefills = [_Passes(first.calls * pp, first.rows / num_groups, first.tokens, 0)] if first.calls else []
        if refills.calls:
            prefills.append(_Passes(refills.calls, refills.rows, refills.tokens, 0))
        tally = Tally()
        if decodes:
            self._add(tally, Body.DECODE, decodes)
        if prefills:
            self._add(tally, Body.PREFILL, prefills)
        tally.add("scheduling", self._host_seconds(rounds, num_slots))
        return tally.cost()

    def _host_seconds(self, rounds: Rounds, num_slots: int) -> float:
        """Scheduling of each group in flight, and handing each sequence its token, in rounds of their own."""
        framework = self.framework
        turns = rounds.first.calls + sum(window.rounds for window in rounds.windows)
        drawn = rounds.first.calls * rounds.first.rows + sum(w.rounds * w.live for w in rounds.windows)
        groups = min(self.call.layout.pp, num_slots)
        return turns * groups * framework.round_seconds + drawn * framework.row_seconds

    def _add(self, tally: Tally, body: Body, passes: Sequence[_Passes]) -> None:
        """Adds passes of single groups; exchanges are costed at the mean pass, for they are linear in its size."""
        model = self.call.model
        num_layers = model.num_layers / self.call.layout.pp
        total = total_rows = total_tokens = layer = ends = 0.0
        sources = set()
        for number, rows, tokens, context in passes:
            time = self.shard.time(body, rows, tokens, context)
            layer += number * time.layer
            ends += number * time.ends
            total += number
            total_rows += number * rows
            total_tokens += number * rows * tokens
            sources.add(time.source)
        source = least_trusted(sources)
        tally.add(f"{body.value} layers", num_layers * layer, source)
        tally.add(f"{body.value} embedding and head", ends, source)
        self._add_exchanges(tally, total, total_rows / total, total_tokens / total)

    def _add_exchanges(self, tally: Tally, number: float, rows: float, tokens: float) -> None:
        """Two reductions a layer and one of the embedding; the logits; the hidden state on, the drawn tokens back."""
        model, pp, size = self.call.model, self.call.layout.pp, self.element_bytes
        hidden_bytes = tokens * model.hidden_size * size
        if self.groups.tensor.size > 1:
            reduced, source = self.network.seconds(ALL_REDUCE, self.groups.tensor, hidden_bytes)
            tally.add("tensor-parallel collectives", number * (2 * model.num_layers / pp + 1) * reduced, source)
            logits_bytes = rows * model.padded_vocab_size * size
            gathered, source = self.network.seconds(ALL_GATHER, self.groups.tensor, logits_bytes)
            tally.add("logits gather", number * gathered, source)
        if pp > 1:
            sent, source = self.network.seconds(SEND_RECEIVE, self.groups.neighbours, hidden_bytes)
            back, _ = self.network.seconds(SEND_RECEIVE, self.groups.neighbours, rows * _DRAWN_BYTES)
            tally.add("pipeline messages", number * (sent + (pp - 1) * back), source)


def _decode_passes(window: Window, num_groups: int, pp: int) -> _Passes:
    """A window's turns: max(m, p) passes a round, the live sequences spread over m groups."""
    live = max(1.0, window.live)
    live_groups = min(num_groups, live)
    return _Passes(window.rounds * max(live_groups, pp), live / live_groups, 1, window.context)


def _shuffled(lengths: list[int] | tuple[int, ...], turn: float) -> list[int]:
    """The lengths in a fixed, even, patternless order that starts at `turn` of its cycle."""
    order = sorted(range(len(lengths)), key=lambda i: ((i - len(lengths) + 1) * _GOLDEN + turn) % 1.0)
    return [lengths[i] for i in order]


class _Run(NamedTuple):
    """One arrival order; the arrays have one entry per window."""

    num_rounds: int
    num_refills: int
    rounds: NDArray[np.float64]  # rounds in which some sequence decodes
    row_rounds: NDArray[np.float64]  # the same, counted once per decoding sequence
    contexts: NDArray[np.float64]  # longest cached sequence, times rounds


def _run(responses: list[int], prompts: list[int], num_slots: int) -> _Run:
    """List scheduling of the responses over the slots; a response decodes in all its turns but the first."""
    free, starts = [0] * num_slots, []
    for length in responses:
        starts.append(heapq.heappop(free))
        heapq.heappush(free, starts[-1] + length)
    start, end, prompt = np.array(starts), np.array(starts) + np.array(responses), np.array(prompts)
    num_rounds = int(end.max())
    decoding = np.cumsum(np.bincount(start + 1, minlength=num_rounds + 2) - np.bincount(end, minlength=num_rounds + 2))
    bounds = np.linspace(0, num_rounds, _NUM_WINDOWS + 1).round().astype(int)
    rounds = np.diff(np.concatenate([[0], np.cumsum(decoding > 0)])[bounds]).astype(float)
    row_rounds = np.diff(np.concatenate([[0], np.cumsum(decoding)])[bounds]).astype(float)
    low, high = np.maximum(start + 1, bounds[:-1, None]), np.minimum(end, bounds[1:, None])
    context = np.where(low < high, prompt - start + (low + high - 1) / 2 - 1, 0).max(axis=1)
    return _Run(num_rounds, len(set(starts)) - 1, rounds, row_rounds, context * rounds)


def _mean_windows(runs: list[_Run]) -> tuple[Window, ...]:
    rounds, row_rounds, contexts = (np.sum(column, axis=0) for column in list(zip(*runs, strict=True))[2:])
    return tuple(
        Window(float(n / len(runs)), float(live / n), float(context / n))
        for n, live, context in zip(rounds, row_rounds, contexts, strict=True)
        if n
    )
