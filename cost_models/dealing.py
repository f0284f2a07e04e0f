"""The micro-batches of a batch with a distribution of lengths, split by rows or by tokens; similar ones are grouped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.cost_models.question import Memo
from meshwright.profiles.lengths import Histogram
from meshwright.profiles.packing import micro_batches_by_rows, micro_batches_by_tokens

_MAX_GROUPS, _SIMILAR = 8, 1.1
"""Micro-batches are costed in at most about this many kinds; those whose tokens differ by less than the factor are
always of one kind."""

_MAX_SPLIT_ROWS = 2048
"""Most rows that are split one by one; of larger batches a sample of rows is split."""

_SAMPLED_ROWS = 4096
"""Rows in all batches over which the number of micro-batches is averaged, if tokens are capped."""

_MIN_TOGETHER = 16
"""Number of batches from which splitting all of them together is faster than one by one."""

_FAR = 2**62
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
        self._known: Memo[tuple[int, int, int], tuple[MicroBatches, ...]] = Memo()

    def micro_batches(self, num_rows: int, micro_batch_size: int, most_tokens: int = 0) -> tuple[MicroBatches, ...]:
        """Return micro-batches of at most `most_tokens` tokens if that is given, else of `micro_batch_size` rows."""

        def split() -> tuple[MicroBatches, ...]:
            if most_tokens:
                return capped_micro_batches(self._lengths, num_rows, most_tokens)
            return micro_batches(self._lengths, num_rows, micro_batch_size)

        return self._known.memoize((num_rows, micro_batch_size, most_tokens), split)


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

    Their number depends on the lengths that were sampled: of few rows, several batches are split that have typical
    lengths together; of many rows, a part.
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
    """Return the totals of all micro-batches of some batches [batches, rows], each split by `deal_by_tokens`."""
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

    The rule is that of `deal_by_tokens`: the longest row goes first, to the micro-batch with the fewest tokens.
    """
    remaining, totals = -np.sort(-sampled, axis=1), list[_Totals]()
    number = np.maximum((2 * remaining > most_tokens).sum(axis=1), -(-remaining.sum(axis=1) // most_tokens))
    while len(remaining):
        batches, exists = np.arange(len(remaining)), np.arange(number.max()) < number[:, np.newaxis]
        tokens, squares = np.where(exists, 0, _FAR), np.zeros(exists.shape, dtype=np.int64)
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
