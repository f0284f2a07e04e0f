"""Compute of a context-parallel rank: an equal share of every sequence's tokens and of its attention scores.

A sequence is split into 2 x cp slices, of which rank r holds slices r and 2 x cp - 1 - r: under a causal mask all ranks
then have equally many scores (Llama 3 report, arXiv:2407.21783, section 3.3.2). A fraction 1/cp of the tokens and
scores of some rows costs as much as a fraction 1/cp of the rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.cost_models.compute import AnalyticShard, Passes, PassSeconds, Shard
from meshwright.cost_models.cost import Source, least_trusted
from meshwright.cost_models.dealing import MicroBatches
from meshwright.profiles.table import TimedPass


def context_parallel_batches(batches: Iterable[MicroBatches], cp: int) -> tuple[MicroBatches, ...]:
    """Return the share of one of `cp` ranks of these micro-batches."""
    return tuple(MicroBatches(number, rows / cp, tokens) for number, rows, tokens in batches)


def context_parallel_tokens(tokens: int, cp: int) -> int:
    """Return the tokens that a rank holds of a sequence of `tokens` tokens, with slices padded to equal length."""
    return tokens if cp == 1 else 2 * -(-tokens // (2 * cp))


@dataclass(frozen=True)
class ContextShard(Shard):
    """Times of one of `cp` ranks, from those of a shard that may be measured.

    A measured shard has whole sequences that attend to themselves: it is asked for sequences as long as the rank's part
    of them, and attention from that part to all keys before it is added by equation.
    """

    shard: Shard
    analytic: AnalyticShard
    cp: int

    def time(self, body: TimedPass, rows: float, tokens: float, context: float = 0) -> PassSeconds:
        if body is TimedPass.OPTIMIZER:
            return self.shard.time(body, rows, tokens, context)
        return self.total(body, ((1, rows, tokens, context),))

    def total(self, body: TimedPass, passes: Passes) -> PassSeconds:
        local_passes = [(number, rows * self.cp, tokens / self.cp, context) for number, rows, tokens, context in passes]
        local, trains = self.shard.total(body, local_passes), body is TimedPass.TRAIN
        attention, attention_seconds = self.analytic.attention, 0.0
        for (number, rows, tokens, _), (_, local_rows, local_tokens, _) in zip(passes, local_passes, strict=True):
            local_attention = attention(local_rows, local_tokens, trains=trains)
            attention_seconds += number * max(0.0, attention(rows, tokens, trains=trains) - local_attention)
        return PassSeconds(local.layer + attention_seconds, local.ends, least_trusted([local.source, Source.ANALYTIC]))
