"""The micro-batches of a batch whose lengths have a distribution, dealt by rows or by tokens, those alike together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from meshwright.profiles.lengths import Histogram
from meshwright.profiles.packing import deal, deal_by_tokens

_MAX_KINDS, _ALIKE = 8, 1.1
"""Micro-batches are costed together in at most this many kinds, and those of one kind always whose tokens differ by no
more than this factor."""

_MOST_DEALT = 2048
"""Rows that are dealt one by one; of more, so many or one micro-batch stand for all."""

_MOST_DRAWN = 4096
"""Rows of the batches over which the number of micro-batches is a mean where tokens cap them."""


class MicroBatches(NamedTuple):
    """`number` micro-batches, each of which costs what `rows` rows of `tokens` tokens would; none need be whole."""

    number: float
    rows: float
    tokens: float


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
        return (_kind([ordered])._replace(number=num_batches),)
    dealt = [[ordered[i] for i in indices] for indices in deal(ordered, micro_batch_size)]
    return tuple(kind._replace(number=kind.number * num_batches / few) for kind in _kinds(dealt))


def capped_micro_batches(lengths: Histogram, num_rows: int, most_tokens: int) -> tuple[MicroBatches, ...]:
    """The micro-batches of a batch on average, of at most so many tokens each, dealt as the runtime does it.

    How many a batch takes depends on what it drew: of few rows several batches are dealt, which have typical lengths
    together, and of many rows a part.
    """
    rows = min(num_rows, _MOST_DEALT)
    number = max(1, _MOST_DRAWN // num_rows)
    drawn = np.random.default_rng(0).permutation(lengths.strata(rows * number)).reshape(number, rows)
    dealt = [[batch[i] for i in indices] for batch in drawn.tolist() for indices in deal_by_tokens(batch, most_tokens)]
    return tuple(kind._replace(number=kind.number * num_rows / (rows * number)) for kind in _kinds(dealt))


def _kinds(dealt: list[list[int]]) -> Iterator[MicroBatches]:
    """Micro-batches of these lengths, those alike together."""
    dealt.sort(key=sum)
    factor = max(_ALIKE, (sum(dealt[-1]) / sum(dealt[0])) ** (1 / _MAX_KINDS))
    kinds: list[list[list[int]]] = []
    for micro_batch in dealt:
        if not kinds or sum(micro_batch) > factor * sum(kinds[-1][0]):
            kinds.append([])
        kinds[-1].append(micro_batch)
    return map(_kind, kinds)


def _kind(alike: list[list[int]]) -> MicroBatches:
    """Micro-batches of these lengths; one row at least, where rows of different micro-batches are costed together."""
    num_tokens = sum(map(sum, alike))
    num_squares = sum(length * length for lengths in alike for length in lengths)
    rows = max(1.0, num_tokens**2 / (len(alike) * num_squares))
    return MicroBatches(len(alike), rows, num_tokens / (len(alike) * rows))
