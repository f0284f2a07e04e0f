"""A stage that reads responses while they are generated, in chunks, and keeps their keys and values between chunks.

The idea is the intra-step overlap of OPPO (Yan et al., arXiv:2509.25762): a prompt is prefilled when its generation
starts and each chunk of its response when it has been drawn, so that little is left when the last token is. The price
is more and smaller passes, each of which attends to what is cached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.cost_models.compute import AnalyticShard, Shard, Time
from meshwright.cost_models.cost import least_trusted
from meshwright.cost_models.pipeline import MicroBatches, micro_batches
from meshwright.profiles.table import Body
from meshwright.profiles.workload import Workload

STREAMING_STAGES = ("reward_score", "ref_logprob", "critic_value")
"""The stages that may read responses while they are generated."""


class Passes(NamedTuple):
    """The passes of one replica, and the mean number of cached tokens before those of a width."""

    batches: tuple[MicroBatches, ...]
    contexts: Mapping[int, float]


def all_passes(workload: Workload, num_rows: int, micro_batch_size: int, chunk_tokens: int) -> Passes:
    """Prompts sorted by length; whole chunks; and what is left of each response, as wide as it is on average.

    Rows of different responses share a pass when their chunks are ready together.
    """
    rows = min(micro_batch_size, num_rows)
    prompt, responses = workload.prompt_lengths.mean, workload.response_lengths.strata(num_rows)
    whole = [length // chunk_tokens for length in responses]
    rests = [(length % chunk_tokens, length) for length in responses if length % chunk_tokens]
    found = [(batches, 0.0) for batches in micro_batches(workload.prompt_lengths, num_rows, micro_batch_size)]
    if sum(whole):
        cached = chunk_tokens * sum(count * (count - 1) / 2 for count in whole) / sum(whole)
        found.append((MicroBatches(-(-sum(whole) // rows), rows, chunk_tokens), prompt + cached))
    if rests:
        width = round(sum(rest for rest, _ in rests) / len(rests))
        cached = sum(length - rest for rest, length in rests) / len(rests)
        found.append((MicroBatches(-(-len(rests) // rows), rows, width), prompt + cached))
    return _passes(found)


def last_passes(workload: Workload, num_rows: int, micro_batch_size: int, chunk_tokens: int) -> Passes:
    """The last chunk of the longest response, and of those that may end with it: all that reach into that chunk."""
    responses = workload.response_lengths.strata(num_rows)
    longest = max(responses[-1], round(workload.response_lengths.expected_maximum(workload.batch_size)))
    width = (longest - 1) % chunk_tokens + 1
    count = max(1, sum(length > longest - width for length in responses))
    rows = min(micro_batch_size, count)
    cached = workload.prompt_lengths.mean + longest - width
    return _passes([(MicroBatches(-(-count // rows), rows, width), cached)])


def _passes(found: list[tuple[MicroBatches, float]]) -> Passes:
    widths = {batches.tokens for batches, _ in found}
    number = {width: sum(b.number for b, _ in found if b.tokens == width) for width in widths}
    cached = {width: sum(b.number * context for b, context in found if b.tokens == width) for width in widths}
    return Passes(tuple(batches for batches, _ in found), {width: cached[width] / number[width] for width in widths})


@dataclass(frozen=True)
class ChunkShard:
    """Times of a shard whose forward passes attend to cached tokens.

    Layers are those of a prefill, which keeps keys and values; ends are those of a forward pass, which scores every
    token. Prefills are measured without cached tokens: attending to some is added by equation.
    """

    shard: Shard
    analytic: AnalyticShard
    contexts: Mapping[int, float]

    def time(self, body: Body, rows: float, tokens: float, context: float = 0) -> Time:
        layers, ends = self.shard.time(Body.PREFILL, rows, tokens), self.shard.time(body, rows, tokens)
        cached = context + self.contexts[int(tokens)]
        behind, alone = (self.analytic.time(Body.PREFILL, rows, tokens, before) for before in (cached, 0))
        more = max(0.0, behind.layer - alone.layer)
        sources = [layers.source, ends.source, *([behind.source] if more else [])]
        return Time(layers.layer + more, ends.ends, least_trusted(sources))
