"""The micro-batches of a batch whose lengths have a distribution, dealt by rows or by tokens, those alike together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.cost_models.question import Once
from meshwright.profiles.lengths import Histogram
from meshwright.profiles.packing import deal, deal_by_tokens

_MAX_KINDS, _ALIKE = 8, 1.1
"""Micro-batches are costed together in at most this many kinds, and those of one kind always whose tokens differ by no
more than this factor."""

_MOST_DEALT = 2048
"""Rows that are dealt one by one; of more, so many or one micro-batch stand for all."""

_MOST_DRAWN = 4096
"""Rows of the batches over which the number of micro-batches is a mean where tokens cap them."""

_TOGETHER = 16
"""So many batches and more are dealt in one pass over their rows, which takes longer than fewer do one by one."""

_FAR = 2**62
"""Above every number of tokens."""


class MicroBatches(NamedTuple):
    """`number` micro-batches, each of which costs what `rows` rows of `tokens` tokens would; none need be whole."""

    number: float
    rows: float
    tokens: float


class Deals:
    """The micro-batches of batches whose rows have some lengths, dealt once for all who ask."""

    def __init__(self, lengths: Histogram) -> None:
        self._lengths = lengths
        self._known: Once[tuple[int, int, int], tuple[MicroBatches, ...]] = Once()

    def of(self, num_rows: int, micro_batch_size: int, most_tokens: int = 0) -> tuple[MicroBatches, ...]:
        """Of at most so many tokens each where there is a cap, of so many rows otherwise."""

        def dealt() -> tuple[MicroBatches, ...]:
            if most_tokens:
                return capped_micro_batches(self._lengths, num_rows, most_tokens)
            return micro_batches(self._lengths, num_rows, micro_batch_size)

        return self._known.of((num_rows, micro_batch_size, most_tokens), dealt)


def micro_batches(lengths: Histogram, num_rows: int, micro_batch_size: int) -> tuple[MicroBatches, ...]:
    """The micro-batches of a typical batch, dealt and packed as the runtime does it; those alike are costed together.

    Rows of lengths l are sum(l) tokens with scores in proportion to sum(l^2). Equal rows that have as many of both are
    sum(l)^2 / sum(l^2) rows of sum(l^2) / sum(l) tokens.
    """
    num_batches = -(-num_rows // micro_batch_size)
    few = -(-num_batches * min(num_rows, _MOST_DEALT) // num_rows)
    ordered = lengths.strata(round(num_rows * few / num_batches)).tolist()
    if ordered[0] == ordered[-1] and num_rows % micro_batch_size == 0:  # of many rows that are alike none is dealt
        return (MicroBatches(num_batches, float(micro_batch_size), float(ordered[0])),)
    if few == 1:
        return (_kind(*_totals([ordered]))._replace(number=num_batches),)
    dealt = [[ordered[i] for i in indices] for indices in deal(ordered, micro_batch_size)]
    return tuple(kind._replace(number=kind.number * num_batches / few) for kind in _kinds(*_totals(dealt)))


def capped_micro_batches(lengths: Histogram, num_rows: int, most_tokens: int) -> tuple[MicroBatches, ...]:
    """The micro-batches of a batch on average, of at most so many tokens each, dealt as the runtime does it.

    How many a batch takes depends on what it drew: of few rows several batches are dealt, which have typical lengths
    together, and of many rows a part.
    """
    rows = min(num_rows, _MOST_DEALT)
    number = max(1, _MOST_DRAWN // num_rows)
    drawn = np.random.default_rng(0).permutation(lengths.strata(rows * number)).reshape(number, rows)
    dealt = _dealt_together(drawn, most_tokens) if number >= _TOGETHER else _dealt_apart(drawn, most_tokens)
    return tuple(kind._replace(number=kind.number * num_rows / (rows * number)) for kind in _kinds(*dealt))


class _Totals(NamedTuple):
    """Of some micro-batches, [micro-batches]: their tokens, and the sums of the squares of their rows' lengths."""

    tokens: NDArray[np.int64]
    squares: NDArray[np.int64]


def _totals(dealt: list[list[int]]) -> _Totals:
    """Of micro-batches of these lengths."""
    tokens = [sum(lengths) for lengths in dealt]
    squares = [sum(length * length for length in lengths) for lengths in dealt]
    return _Totals(np.array(tokens), np.array(squares))


def _dealt_apart(drawn: NDArray[np.int64], most_tokens: int) -> _Totals:
    """Of all micro-batches of some batches [batches, rows], each dealt by `deal_by_tokens`."""
    batches = drawn.tolist()
    return _totals([[batch[i] for i in indices] for batch in batches for indices in deal_by_tokens(batch, most_tokens)])


def _dealt_together(drawn: NDArray[np.int64], most_tokens: int) -> _Totals:
    """As `_dealt_apart`, the same row of all batches at once: its law, the longest row first to the micro-batch with
    the fewest tokens."""
    left, found = -np.sort(-drawn, axis=1), list[_Totals]()
    number = np.maximum((2 * left > most_tokens).sum(axis=1), -(-left.sum(axis=1) // most_tokens))
    while len(left):
        batches, is_dealt = np.arange(len(left)), np.arange(number.max()) < number[:, np.newaxis]
        tokens, squares = np.where(is_dealt, 0, _FAR), np.zeros(is_dealt.shape, dtype=np.int64)
        for rows in left.T:
            lightest = tokens.argmin(axis=1)
            tokens[batches, lightest] += rows
            squares[batches, lightest] += rows * rows
        keeps = ((tokens <= most_tokens) | ~is_dealt).all(axis=1)
        kept = is_dealt & keeps[:, np.newaxis]
        found.append(_Totals(tokens[kept], squares[kept]))
        left, number = left[~keeps], number[~keeps] + 1
    return _Totals(*map(np.concatenate, zip(*found, strict=True)))


def _kinds(tokens: NDArray[np.int64], squares: NDArray[np.int64]) -> Iterator[MicroBatches]:
    """Micro-batches of these totals, those alike together."""
    order = np.argsort(tokens, kind="stable")
    tokens, squares = tokens[order], squares[order]
    factor = max(_ALIKE, (int(tokens[-1]) / int(tokens[0])) ** (1 / _MAX_KINDS))
    first = 0
    while first < len(tokens):
        end = int(np.searchsorted(tokens, factor * int(tokens[first]), side="right"))
        yield _kind(tokens[first:end], squares[first:end])
        first = end


def _kind(tokens: NDArray[np.int64], squares: NDArray[np.int64]) -> MicroBatches:
    """Micro-batches of these totals; one row at least, where rows of different micro-batches are costed together."""
    number, num_tokens = len(tokens), int(tokens.sum())
    rows = max(1.0, num_tokens**2 / (number * int(squares.sum())))
    return MicroBatches(number, rows, num_tokens / (number * rows))
