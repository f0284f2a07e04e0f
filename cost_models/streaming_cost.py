"""Cost of a stage that streams: it reads responses in chunks while they are generated, and keeps a KV cache.

This is the intra-step overlap of OPPO (Yan et al., arXiv:2509.25762): a prompt is prefilled when its generation starts
and each chunk of its response once it has been sampled, so that little is left after the last token. The price is more
and smaller passes, each of which attends to the cached tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from meshwright.cost_models.compute import AnalyticShard, Passes, PassSeconds, Shard
from meshwright.cost_models.cost import least_trusted
from meshwright.cost_models.dealing import MicroBatchCache, MicroBatches
from meshwright.cost_models.question import Memo
from meshwright.profiles.table import TimedPass
from meshwright.profiles.workload import Workload


class Chunks(NamedTuple):
    """Chunks of one replica's responses: their number, tokens per chunk, and mean number of tokens before a chunk."""

    number: int
    width: int
    before: float


class ReplicaPasses(NamedTuple):
    """The passes of one replica, and for each number of tokens per row the mean number of cached tokens."""

    batches: tuple[MicroBatches, ...]
    contexts: Mapping[float, float]


def all_chunks(workload: Workload, num_rows: int, chunk_tokens: int) -> tuple[Chunks, ...]:
    """Return the whole chunks, and the remainders of the responses at their mean width."""
    responses, prompt = workload.response_lengths.stratified_sample(num_rows), workload.prompt_lengths.mean
    whole, remainder = np.divmod(responses, chunk_tokens)
    chunks = []
    num_whole, num_remainders = int(whole.sum()), int(np.count_nonzero(remainder))
    if num_whole:
        before = chunk_tokens * float((whole * (whole - 1)).sum()) / 2 / num_whole
        chunks.append(Chunks(num_whole, chunk_tokens, prompt + before))
    if num_remainders:
        before = chunk_tokens * float(whole[remainder > 0].sum()) / num_remainders
        chunks.append(Chunks(num_remainders, round(float(remainder.sum()) / num_remainders), prompt + before))
    return tuple(chunks)


def last_chunks(workload: Workload, num_rows: int, chunk_tokens: int) -> tuple[Chunks, ...]:
    """Return the last chunk of the longest response, for it and all responses that reach into that chunk."""
    responses = workload.response_lengths.stratified_sample(num_rows)
    longest = max(int(responses[-1]), round(workload.response_lengths.expected_maximum(workload.batch_size)))
    width = (longest - 1) % chunk_tokens + 1
    number = max(1, int(np.count_nonzero(responses > longest - width)))
    return (Chunks(number, width, workload.prompt_lengths.mean + longest - width),)


def streaming_passes(
    prompts: tuple[MicroBatches, ...], chunks: tuple[Chunks, ...], micro_batch_size: int
) -> ReplicaPasses:
    """Return the passes over prompts and then chunks; chunks of different rows that are ready together share a pass."""
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


ChunkFunction: TypeAlias = Callable[[Workload, int, int], tuple[Chunks, ...]]
"""Return chunks for a workload, a number of rows and a chunk width: `all_chunks` or `last_chunks`."""


class StreamingCache:
    """The streaming passes of one workload's replicas, cached."""

    def __init__(self, workload: Workload) -> None:
        self._workload, self._prompts = workload, MicroBatchCache(workload.prompt_lengths)
        self._chunks: Memo[tuple[ChunkFunction, int, int], tuple[Chunks, ...]] = Memo()
        self._passes: Memo[tuple[ChunkFunction, int, int, int], ReplicaPasses] = Memo()

    def passes(
        self, chunks_of: ChunkFunction, num_rows: int, micro_batch_size: int, chunk_tokens: int
    ) -> ReplicaPasses:
        """Return the passes over prompts and all chunks, or over the last chunks alone."""

        def passes() -> ReplicaPasses:
            width = chunks_of, num_rows, chunk_tokens
            chunks = self._chunks.memoize(width, lambda: chunks_of(self._workload, num_rows, chunk_tokens))
            prompts = () if chunks_of is last_chunks else self._prompts.micro_batches(num_rows, micro_batch_size)
            return streaming_passes(prompts, chunks, micro_batch_size)

        return self._passes.memoize((chunks_of, num_rows, micro_batch_size, chunk_tokens), passes)


@dataclass(frozen=True)
class ChunkShard(Shard):
    """Times of a shard whose forward passes attend to cached tokens.

    Layers take the seconds of a prefill, which keeps keys and values; embedding and head those of a forward pass, which
    scores every token. Prefills are measured without cached tokens: attention to them is added by equation.
    """

    shard: Shard
    analytic: AnalyticShard
    contexts: Mapping[float, float]

    def time(self, body: TimedPass, rows: float, tokens: float, context: float = 0) -> PassSeconds:
        return self.total(body, ((1, rows, tokens, context),))

    def total(self, body: TimedPass, passes: Passes) -> PassSeconds:
        layers, ends = self.shard.total(TimedPass.PREFILL, passes), self.shard.total(body, passes)
        cached = [(n, rows, tokens, context + self.contexts[tokens]) for n, rows, tokens, context in passes]
        attention_seconds, source = 0.0, least_trusted([layers.source, ends.source])
        for number, rows, tokens, num_cached in cached:
            if num_cached:
                with_cache = self.analytic.time(TimedPass.PREFILL, rows, tokens, num_cached)
                without_cache = self.analytic.time(TimedPass.PREFILL, rows, tokens)
                attention_seconds += number * max(0.0, with_cache.layer - without_cache.layer)
                source = least_trusted([source, with_cache.source])
        return PassSeconds(layers.layer + attention_seconds, ends.ends, source)
