"""A stage that reads responses while they are generated, in chunks, and keeps their keys and values between chunks.

The idea is the intra-step overlap of OPPO (Yan et al., arXiv:2509.25762): a prompt is prefilled when its generation
starts and each chunk of its response when it has been drawn, so that little is left when the last token is. The price
is more and smaller passes, each of which attends to what is cached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from meshwright.cost_models.compute import AnalyticShard, Passes, Shard, Time
from meshwright.cost_models.cost import least_trusted
from meshwright.cost_models.dealing import Deals, MicroBatches
from meshwright.cost_models.question import Once
from meshwright.profiles.table import Body
from meshwright.profiles.workload import Workload


class Chunks(NamedTuple):
    """Some chunks of one replica's responses: their number, their width, and the mean number of tokens before them."""

    number: int
    width: int
    before: float


class ReplicaPasses(NamedTuple):
    """The passes of one replica, and the mean number of cached tokens before those of a width."""

    batches: tuple[MicroBatches, ...]
    contexts: Mapping[float, float]


def all_chunks(workload: Workload, num_rows: int, chunk_tokens: int) -> tuple[Chunks, ...]:
    """Whole chunks; and what is left of each response, as wide as it is on average."""
    responses, prompt = workload.response_lengths.strata(num_rows), workload.prompt_lengths.mean
    whole, rest = np.divmod(responses, chunk_tokens)
    found = []
    num_whole, num_rests = int(whole.sum()), int(np.count_nonzero(rest))
    if num_whole:
        before = chunk_tokens * float((whole * (whole - 1)).sum()) / 2 / num_whole
        found.append(Chunks(num_whole, chunk_tokens, prompt + before))
    if num_rests:
        before = chunk_tokens * float(whole[rest > 0].sum()) / num_rests
        found.append(Chunks(num_rests, round(float(rest.sum()) / num_rests), prompt + before))
    return tuple(found)


def last_chunks(workload: Workload, num_rows: int, chunk_tokens: int) -> tuple[Chunks, ...]:
    """The last chunk of the longest response, and of those that may end with it: all that reach into that chunk."""
    responses = workload.response_lengths.strata(num_rows)
    longest = max(int(responses[-1]), round(workload.response_lengths.expected_maximum(workload.batch_size)))
    width = (longest - 1) % chunk_tokens + 1
    number = max(1, int(np.count_nonzero(responses > longest - width)))
    return (Chunks(number, width, workload.prompt_lengths.mean + longest - width),)


def passes_of(prompts: tuple[MicroBatches, ...], chunks: tuple[Chunks, ...], micro_batch_size: int) -> ReplicaPasses:
    """Prompts as they come, then chunks: rows of different responses share a pass when theirs are ready together."""
    batches, cached = list(prompts), dict.fromkeys((batch.tokens for batch in prompts), 0.0)
    numbers: dict[float, float] = {}
    for batch in prompts:
        numbers[batch.tokens] = numbers.get(batch.tokens, 0) + batch.number
    for number, width, before in chunks:
        rows = min(micro_batch_size, number)
        batch = MicroBatches(-(-number // rows), rows, width)
        batches.append(batch)
        numbers[width] = numbers.get(width, 0) + batch.number
        cached[width] = cached.get(width, 0.0) + batch.number * before
    return ReplicaPasses(tuple(batches), {width: cached[width] / numbers[width] for width in numbers})


ChunksOf: TypeAlias = Callable[[Workload, int, int], tuple[Chunks, ...]]
"""All chunks of so many rows by a width, or the last."""


class Streams:
    """The passes of one workload's replicas, each dealt once for all who ask."""

    def __init__(self, workload: Workload) -> None:
        self._workload, self._prompts = workload, Deals(workload.prompt_lengths)
        self._chunks: Once[tuple[ChunksOf, int, int], tuple[Chunks, ...]] = Once()
        self._passes: Once[tuple[ChunksOf, int, int, int], ReplicaPasses] = Once()

    def of(self, chunks_of: ChunksOf, num_rows: int, micro_batch_size: int, chunk_tokens: int) -> ReplicaPasses:
        """All chunks behind their prompts, or the last alone."""

        def passes() -> ReplicaPasses:
            width = chunks_of, num_rows, chunk_tokens
            chunks = self._chunks.of(width, lambda: chunks_of(self._workload, num_rows, chunk_tokens))
            prompts = () if chunks_of is last_chunks else self._prompts.of(num_rows, micro_batch_size)
            return passes_of(prompts, chunks, micro_batch_size)

        return self._passes.of((chunks_of, num_rows, micro_batch_size, chunk_tokens), passes)


@dataclass(frozen=True)
class ChunkShard(Shard):
    """Times of a shard whose forward passes attend to cached tokens.

    Layers are those of a prefill, which keeps keys and values; ends are those of a forward pass, which scores every
    token. Prefills are measured without cached tokens: attending to some is added by equation.
    """

    shard: Shard
    analytic: AnalyticShard
    contexts: Mapping[float, float]

    def time(self, body: Body, rows: float, tokens: float, context: float = 0) -> Time:
        return self.total(body, ((1, rows, tokens, context),))

    def total(self, body: Body, passes: Passes) -> Time:
        layers, ends = self.shard.total(Body.PREFILL, passes), self.shard.total(body, passes)
        cached = [(n, rows, tokens, context + self.contexts[tokens]) for n, rows, tokens, context in passes]
        more, source = 0.0, least_trusted([layers.source, ends.source])
        for number, rows, tokens, before in cached:
            if before:
                behind = self.analytic.time(Body.PREFILL, rows, tokens, before)
                alone = self.analytic.time(Body.PREFILL, rows, tokens)
                more += number * max(0.0, behind.layer - alone.layer)
                source = least_trusted([source, behind.source])
        return Time(layers.layer + more, ends.ends, source)
