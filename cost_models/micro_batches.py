"""The micro-batches of a stage at expected lengths: split by rows or by tokens with the rules of `profiles.packing`, by
which a run splits its batches, shared by context-parallel ranks, or streamed in chunks.

A context-parallel rank holds slices r and 2 x cp - 1 - r of each sequence's 2 x cp slices: under a causal mask all
ranks then have equally many scores (Llama 3 report, arXiv:2407.21783, section 3.3.2). A stage that streams prefills a
prompt when its generation starts and each chunk of its response once it has been sampled (intra-step overlap of OPPO,
Yan et al., arXiv:2509.25762), so that little is left after the last token; the price is more and smaller passes, each
of which attends to the cached tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.cost_models.compute import AnalyticShard, PassColumns, Passes, PassSeconds, Shard
from meshwright.cost_models.cost import Source, least_trusted
from meshwright.cost_models.protocol import Memo
from meshwright.profiles.elementwise import FloatArray, N, where
from meshwright.profiles.lengths import Histogram
from meshwright.profiles.packing import micro_batches_by_rows, micro_batches_by_tokens
from meshwright.profiles.table import TimedPass
from meshwright.profiles.workload import Workload

_MAX_GROUPS, _SIMILAR = 8, 1.1
"""Micro-batches are costed in at most about this many kinds; those whose tokens differ by less than the factor are
always of one kind."""

_MAX_SPLIT_ROWS = 2048
"""Maximum number of rows that are split; a larger batch is represented by a sample of its rows."""

_SAMPLED_ROWS = 4096
"""Number of rows in the batches over which micro-batches are averaged, if tokens are capped."""

_MIN_TOGETHER = 16
"""Number of batches from which splitting all of them together is faster than one by one."""

_MORE_THAN_ANY = 2**62
"""More than any number of tokens."""


class MicroBatches(NamedTuple):
    """`number` micro-batches, each costed as `rows` rows of `tokens` tokens; all three may be fractional."""

    number: float
    rows: float
    tokens: float


class MicroBatchCache:
    """The micro-batches of batches with one distribution of lengths, cached."""

    def __init__(self, lengths: Histogram) -> None:
        self._lengths = lengths
        self._cache: Memo[tuple[int, int, int], tuple[MicroBatches, ...]] = Memo()

    def micro_batches(self, num_rows: int, micro_batch_size: int, most_tokens: int = 0) -> tuple[MicroBatches, ...]:
        """Return micro-batches of at most `most_tokens` tokens if that is given, else of `micro_batch_size` rows."""

        def split() -> tuple[MicroBatches, ...]:
            if most_tokens:
                return capped_micro_batches(self._lengths, num_rows, most_tokens)
            return micro_batches(self._lengths, num_rows, micro_batch_size)

        return self._cache.memoize((num_rows, micro_batch_size, most_tokens), split)


def micro_batches(lengths: Histogram, num_rows: int, micro_batch_size: int) -> tuple[MicroBatches, ...]:
    """Return the micro-batches of a typical batch, split and packed as the runtime does it; similar ones are grouped.

    Rows of lengths l have sum(l) tokens and attention scores proportional to sum(l^2). The equivalent equal rows are
    sum(l)^2 / sum(l^2) rows of sum(l^2) / sum(l) tokens.
    """
    num_batches = -(-num_rows // micro_batch_size)
    num_split = -(-num_batches * min(num_rows, _MAX_SPLIT_ROWS) // num_rows)
    ordered = lengths.stratified_sample(round(num_rows * num_split / num_batches)).tolist()
    if ordered[0] == ordered[-1] and num_rows % micro_batch_size == 0:  # equal rows need no split
        return (MicroBatches(num_batches, float(micro_batch_size), float(ordered[0])),)
    if num_split == 1:
        return (_group(*_totals([ordered]))._replace(number=num_batches),)
    split = [[ordered[i] for i in indices] for indices in micro_batches_by_rows(ordered, micro_batch_size)]
    return tuple(kind._replace(number=kind.number * num_batches / num_split) for kind in _groups(*_totals(split)))


def capped_micro_batches(lengths: Histogram, num_rows: int, most_tokens: int) -> tuple[MicroBatches, ...]:
    """Return the mean micro-batches of a batch, of at most `most_tokens` tokens each, split as the runtime does it.

    Their number depends on the sampled lengths. So several batches of few rows, whose lengths together are typical,
    are split and averaged; of a batch with many rows, a part is split.
    """
    rows = min(num_rows, _MAX_SPLIT_ROWS)
    number = max(1, _SAMPLED_ROWS // num_rows)
    sampled = np.random.default_rng(0).permutation(lengths.stratified_sample(rows * number)).reshape(number, rows)
    totals = (
        _split_together(sampled, most_tokens) if number >= _MIN_TOGETHER else _split_one_by_one(sampled, most_tokens)
    )
    return tuple(kind._replace(number=kind.number * num_rows / (rows * number)) for kind in _groups(*totals))


class _Totals(NamedTuple):
    """Tokens of each micro-batch, and the sum of its squared row lengths, [micro-batches]."""

    tokens: NDArray[np.int64]
    squares: NDArray[np.int64]


def _totals(batches: list[list[int]]) -> _Totals:
    """Return the totals of micro-batches with these row lengths."""
    tokens = [sum(lengths) for lengths in batches]
    squares = [sum(length * length for length in lengths) for lengths in batches]
    return _Totals(np.array(tokens), np.array(squares))


def _split_one_by_one(sampled: NDArray[np.int64], most_tokens: int) -> _Totals:
    """Return the totals of all micro-batches of some batches [batches, rows], each split by
    `micro_batches_by_tokens`."""
    all_lengths = sampled.tolist()
    return _totals(
        [
            [lengths[i] for i in indices]
            for lengths in all_lengths
            for indices in micro_batches_by_tokens(lengths, most_tokens)
        ]
    )


def _split_together(sampled: NDArray[np.int64], most_tokens: int) -> _Totals:
    """Return the same as `_split_one_by_one`, for all batches at once.

    The rule is that of `micro_batches_by_tokens`: the longest row goes first, to the micro-batch with the fewest
    tokens."""
    remaining, totals = -np.sort(-sampled, axis=1), list[_Totals]()
    number = np.maximum((2 * remaining > most_tokens).sum(axis=1), -(-remaining.sum(axis=1) // most_tokens))
    while len(remaining):
        batches, exists = np.arange(len(remaining)), np.arange(number.max()) < number[:, np.newaxis]
        tokens, squares = np.where(exists, 0, _MORE_THAN_ANY), np.zeros(exists.shape, dtype=np.int64)
        for rows in remaining.T:
            lightest = tokens.argmin(axis=1)
            tokens[batches, lightest] += rows
            squares[batches, lightest] += rows * rows
        fits = ((tokens <= most_tokens) | ~exists).all(axis=1)
        in_fitting = exists & fits[:, np.newaxis]
        totals.append(_Totals(tokens[in_fitting], squares[in_fitting]))
        remaining, number = remaining[~fits], number[~fits] + 1
    return _Totals(*map(np.concatenate, zip(*totals, strict=True)))


def _groups(tokens: NDArray[np.int64], squares: NDArray[np.int64]) -> Iterator[MicroBatches]:
    """Yield micro-batches of these totals; similar ones are grouped."""
    order = np.argsort(tokens, kind="stable")
    tokens, squares = tokens[order], squares[order]
    factor = max(_SIMILAR, (int(tokens[-1]) / int(tokens[0])) ** (1 / _MAX_GROUPS))
    first = 0
    while first < len(tokens):
        end = int(np.searchsorted(tokens, factor * int(tokens[first]), side="right"))
        yield _group(tokens[first:end], squares[first:end])
        first = end


def _group(tokens: NDArray[np.int64], squares: NDArray[np.int64]) -> MicroBatches:
    """Return micro-batches of these totals as one group, of at least one row each."""
    number, num_tokens = len(tokens), int(tokens.sum())
    rows = max(1.0, num_tokens**2 / (number * int(squares.sum())))
    return MicroBatches(number, rows, num_tokens / (number * rows))


def context_parallel_batches(batches: Iterable[MicroBatches], cp: int) -> tuple[MicroBatches, ...]:
    """Return one rank's share of micro-batches whose sequences are sharded over `cp` ranks."""
    return tuple(MicroBatches(number, rows / cp, tokens) for number, rows, tokens in batches)


def context_parallel_tokens(tokens: N, cp: N) -> N:
    """Return the tokens that a rank holds of a sequence of `tokens` tokens, with slices padded to equal length."""
    return where(cp == 1, tokens, 2 * -(-tokens // (2 * cp)))


@dataclass(frozen=True)
class ContextShard(Shard):
    """Times of one of `cp` ranks, from those of a shard that may be measured.

    A measured shard has whole sequences that attend to themselves: it is evaluated for sequences as long as the
    rank's part of them, and attention from that part to all keys before it is added by equation.
    """

    shard: Shard
    analytic: AnalyticShard
    cp: int

    def time(self, timed_pass: TimedPass, rows: float, tokens: float, context: float = 0) -> PassSeconds[float]:
        if timed_pass is TimedPass.OPTIMIZER:
            return self.shard.time(timed_pass, rows, tokens, context)
        return self.total(timed_pass, ((1, rows, tokens, context),))

    def each(self, timed_pass: TimedPass, passes: PassColumns) -> PassSeconds[FloatArray]:
        number, rows, tokens, context = passes
        local = PassColumns(number, rows * self.cp, tokens / self.cp, context)
        times, trains, attention = (
            self.shard.each(timed_pass, local),
            timed_pass is TimedPass.TRAIN,
            self.analytic.attention,
        )
        beyond = attention(rows, tokens, trains=trains) - attention(local.rows, local.tokens, trains=trains)
        source = least_trusted([times.source, Source.ANALYTIC])
        return PassSeconds(times.layer + np.maximum(beyond, 0.0), times.ends, source)

    def total(self, timed_pass: TimedPass, passes: Passes) -> PassSeconds[float]:
        local_passes = [(number, rows * self.cp, tokens / self.cp, context) for number, rows, tokens, context in passes]
        local, trains = self.shard.total(timed_pass, local_passes), timed_pass is TimedPass.TRAIN
        attention, attention_seconds = self.analytic.attention, 0.0
        for (number, rows, tokens, _), (_, local_rows, local_tokens, _) in zip(passes, local_passes, strict=True):
            local_attention = attention(local_rows, local_tokens, trains=trains)
            attention_seconds += number * max(0.0, attention(rows, tokens, trains=trains) - local_attention)
        return PassSeconds(local.layer + attention_seconds, local.ends, least_trusted([local.source, Source.ANALYTIC]))


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
            key = chunks_of, num_rows, chunk_tokens
            chunks = self._chunks.memoize(key, lambda: chunks_of(self._workload, num_rows, chunk_tokens))
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

    def time(self, timed_pass: TimedPass, rows: float, tokens: float, context: float = 0) -> PassSeconds[float]:
        return self.total(timed_pass, ((1, rows, tokens, context),))

    def each(self, timed_pass: TimedPass, passes: PassColumns) -> PassSeconds[FloatArray]:
        cached = passes.context + np.array([self.contexts.get(tokens, 0.0) for tokens in passes.tokens.tolist()])
        layers, ends = self.shard.each(TimedPass.PREFILL, passes), self.shard.each(timed_pass, passes)
        without_cache = self.analytic.each(TimedPass.PREFILL, passes._replace(context=0 * cached))
        with_cache = self.analytic.each(TimedPass.PREFILL, passes._replace(context=cached))
        beyond = np.where(cached > 0, np.maximum(with_cache.layer - without_cache.layer, 0.0), 0.0)
        source = least_trusted([layers.source, ends.source, Source.ANALYTIC])
        return PassSeconds(layers.layer + beyond, ends.ends, source)

    def total(self, timed_pass: TimedPass, passes: Passes) -> PassSeconds[float]:
        layers, ends = self.shard.total(TimedPass.PREFILL, passes), self.shard.total(timed_pass, passes)
        cached = [(n, rows, tokens, context + self.contexts[tokens]) for n, rows, tokens, context in passes]
        attention_seconds, source = 0.0, least_trusted([layers.source, ends.source])
        for number, rows, tokens, num_cached in cached:
            if num_cached:
                with_cache = self.analytic.time(TimedPass.PREFILL, rows, tokens, num_cached)
                without_cache = self.analytic.time(TimedPass.PREFILL, rows, tokens)
                attention_seconds += number * max(0.0, with_cache.layer - without_cache.layer)
                source = least_trusted([source, with_cache.source])
        return PassSeconds(layers.layer + attention_seconds, ends.ends, source)
