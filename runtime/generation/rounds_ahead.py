"""Multi-step decoding: rounds of a group in which nothing can be admitted and no sequence reaches its length limit.

On a CPU every round's tokens are checked for end tokens before the next round. A GPU would have to synchronise with its
host for every check: there several rounds are launched, each on the tokens sampled by the one before, and are checked
together. What lies after the first end token is dropped and sampled again later with the same random numbers, so both
ways sample the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt

import numpy as np
import torch
from torch import Tensor

from meshwright.runtime.generation.passes import ForwardPasses, StepRows
from meshwright.runtime.generation.records import NO_LIMIT, Reals
from meshwright.runtime.generation.sampling import Uniforms
from meshwright.runtime.generation.seating import Scheduler
from meshwright.runtime.generation.slots import LiveGroup
from meshwright.runtime.generation.stopping import Stopping
from meshwright.runtime.model.cache_blocks import Numbers

SampleTokens = Callable[[Tensor, Tensor], Tensor]
"""Samples tokens and log-probabilities [2, B] float64 from logits [B, V / tp] and random numbers [B]."""


class StepsPerSync:
    """The number of rounds launched between two synchronisations.

    With an end token every n rounds, launching k at a time drops (k - 1) / 2 of them at each end and saves all but one
    of k synchronisations: the cheapest k grows with the square root of n. The factor is that of a synchronisation that
    costs the host a tenth to a third of what a round costs the device (Qwen2.5-0.5B to Llama-3.1-8B on an H200,
    2026-11-26).
    """

    _MAX_ROUNDS = 16

    def __init__(self, *, may_end: bool) -> None:
        """`may_end` is False without end tokens: nothing is ever dropped then."""
        self._num_rounds, self._num_ends, self._may_end = 0, 0, may_end

    @property
    def rounds(self) -> int:
        if not self._may_end:
            return self._MAX_ROUNDS
        return max(1, min(self._MAX_ROUNDS, isqrt(self._num_rounds // (4 * (1 + self._num_ends)))))

    def record(self, num_rounds: int, *, ended: bool) -> None:
        """Record that an end token was sampled after `num_rounds` rounds, or none in these rounds."""
        self._num_rounds += num_rounds
        self._num_ends += ended


class MultiStepDecoding:
    """Multi-step decoding of a generator with one pipeline stage, for which nothing else waits."""

    def __init__(
        self,
        passes: ForwardPasses,
        seating: Scheduler,
        stopping: Stopping,
        uniforms: Uniforms,
        sample: SampleTokens,
        *,
        checks_each: bool,
    ) -> None:
        """If `looks`, every round is checked before the next, as on a CPU."""
        self._passes, self._seating, self._stopping = passes, seating, stopping
        self._uniforms, self._sample, self._checks_each = uniforms, sample, checks_each
        self.pace = StepsPerSync(may_end=bool(stopping.eos_tokens))

    def run(self, group: LiveGroup, sampled: Tensor, max_rounds: int | None, version: int) -> tuple[int, Tensor]:
        """Sample until an end token, at most `most` rounds if given. Return how many rounds were recorded, as sampled
        by policy `version`, and the tokens and log-probabilities [2, B] sampled last, which are not recorded yet, as
        `drawn` were before."""
        records, rows, slots = group.records, group.rows, group.first_slot + group.rows
        cached, positions = records.cached(rows) + 1, records.num_sampled[rows] + 1
        limits = (
            self._stopping.num_tokens_left(group) - 1,
            Uniforms.num_hashed(positions),
            NO_LIMIT if max_rounds is None else max_rounds,
        )
        if self._checks_each:
            count = min(*limits, self._seating.num_tokens_covered(slots, cached))
        else:
            count = self._seating.allocate_ahead(slots, cached, min(*limits, self.pace.rounds))
        if count <= 0:
            return 0, sampled
        uniforms = self._uniforms.ahead(slots, records.sample_ids[rows], positions, count)
        decode = self._one_by_one if self._checks_each else self.run_together
        recorded, sampled = decode(StepRows(slots, cached, cached), sampled, uniforms)
        records.add_several(rows, recorded, version)
        if not self._checks_each:
            self._seating.free_ahead(slots, cached + len(recorded))
        return len(recorded), sampled

    def _one_by_one(self, rows: StepRows, sampled: Tensor, uniforms: Tensor) -> tuple[Reals, Tensor]:
        """Check every round: return what was sampled before the first end token [rounds, 2, B], and what was sampled
        next."""
        recorded = list[Reals]()
        while len(recorded) < len(uniforms):
            tokens = sampled[0].numpy().astype(int)
            if self._stopping.is_end(tokens):
                break
            logits = self._passes(StepRows(rows.slots, rows.cached + len(recorded), tokens), (), ())
            assert logits is not None, "a single stage has logits"
            recorded.append(sampled.numpy())
            sampled = self._sample(logits, uniforms[len(recorded) - 1])
        return np.array(recorded), sampled

    def run_together(self, rows: StepRows, drawn: Tensor, uniforms: Tensor) -> tuple[Reals, Tensor]:
        """Check once after the last round: return what was sampled before the first end token [rounds, 2, B], and what
        was sampled next."""
        step, rounds = self._passes.multi_step(rows, len(uniforms)), [drawn]
        for number in uniforms.to(drawn.device):
            rounds.append(self._sample(step(rounds[-1][0].long()), number))
        sampled = torch.stack(rounds).cpu()
        on_host: Reals = sampled.numpy()
        first_end = self._first_end(on_host[:-1, 0].astype(int))
        self.pace.record(first_end, ended=first_end < len(uniforms))
        return on_host[:first_end], sampled[first_end]

    def _first_end(self, tokens: Numbers) -> int:
        """Return the index of the first round in `tokens` [rounds, B] with an end token, or the number of rounds."""
        return next((index for index, of_round in enumerate(tokens) if self._stopping.is_end(of_round)), len(tokens))
