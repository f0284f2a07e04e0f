"""What a context-parallel rank computes: a part of every sequence's tokens, with as large a part of its scores.

A sequence is cut in 2 x cp slices, of which rank r holds slices r and 2 x cp - 1 - r: under a causal mask all ranks
then have as many scores (Llama 3 report, arXiv:2407.21783, section 3.3.2). A cp-th of the tokens and of the scores of
some rows are those of a cp-th of the rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.cost_models.compute import AnalyticShard, Passes, Shard, Time
from meshwright.cost_models.cost import Source, least_trusted
from meshwright.cost_models.dealing import MicroBatches
from meshwright.profiles.table import Body


def parts(batches: Iterable[MicroBatches], cp: int) -> tuple[MicroBatches, ...]:
    """What one of `cp` ranks computes of these micro-batches."""
    return tuple(MicroBatches(number, rows / cp, tokens) for number, rows, tokens in batches)


def longest_part(tokens: int, cp: int) -> int:
    """Tokens that a rank holds of a sequence of so many, whose slices are all as long as the longest."""
    return tokens if cp == 1 else 2 * -(-tokens // (2 * cp))


@dataclass(frozen=True)
class ContextShard(Shard):
    """Times of one of `cp` ranks from those of a shard that may be measured.

    A measured shard knows whole sequences that attend to themselves: it is asked for as many sequences as there are, as
    long as the rank's part of them, and attending from that part to all keys before it is added by equation.
    """

    shard: Shard
    analytic: AnalyticShard
    cp: int

    def time(self, body: Body, rows: float, tokens: float, context: float = 0) -> Time:
        if body is Body.OPTIMIZER:
            return self.shard.time(body, rows, tokens, context)
        return self.total(body, ((1, rows, tokens, context),))

    def total(self, body: Body, passes: Passes) -> Time:
        own = [(number, rows * self.cp, tokens / self.cp, context) for number, rows, tokens, context in passes]
        known, trains = self.shard.total(body, own), body is Body.TRAIN
        attention, more = self.analytic.attention, 0.0
        for (number, rows, tokens, _), (_, own_rows, own_tokens, _) in zip(passes, own, strict=True):
            alone = attention(own_rows, own_tokens, trains=trains)
            more += number * max(0.0, attention(rows, tokens, trains=trains) - alone)
        return Time(known.layer + more, known.ends, least_trusted([known.source, Source.ANALYTIC]))
